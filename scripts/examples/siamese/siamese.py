"""A siamese network: one tower for both of two images, of the same kind or not."""

import gzip

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import expt


def read(path, header):
    """Return the bytes after the header of a file in MNIST's format."""
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)


class Pairs(Dataset):
    """Each image with another: for even numbers of the same class, for odd ones of another."""

    def __init__(self, root, train):
        start = f"{root}/{'train' if train else 't10k'}"
        self.images = read(f"{start}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
        self.labels = read(f"{start}-labels-idx1-ubyte.gz", 8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        same = index % 2 == 0
        others = torch.nonzero((self.labels == self.labels[index]) == same).flatten()
        other = others[torch.randint(len(others), ())]
        return (self.images[index] / 255, self.images[other] / 255), float(same)


class Siamese(nn.Module):
    """The distance of what a tower makes of two images, from each number to one logit."""

    def __init__(self, width, features):
        super().__init__()
        self.tower = nn.Sequential(
            *(nn.Conv2d(1, width, 3, stride=2), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(72 * width, features)),
        )
        self.head = nn.Linear(features, 1)

    def forward(self, one, other):
        return self.head((self.tower(one) - self.tower(other)).abs())[:, 0]


class Same(expt.Task):
    """Whether two images are of the same class."""

    def forward(self, model, batch):
        return model(*batch.inputs)

    def loss(self, outputs, batch):
        loss = functional.binary_cross_entropy_with_logits
        return loss(outputs, batch.targets, reduction="sum"), len(outputs)

    def measure(self, outputs, batch):
        return {"accuracy": (((outputs > 0) == (batch.targets > 0.5)).sum(), len(outputs))}
