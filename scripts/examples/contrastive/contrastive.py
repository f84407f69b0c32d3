"""SimCLR (Chen et al., 2020): two views of an image are alike, those of all others are not."""

import gzip

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.utils.data import Dataset

import expt


class Views(Dataset):
    """Two crops of each image of Fashion-MNIST, one of them mirrored at random."""

    def __init__(self, root, train, side):
        with gzip.open(f"{root}/{'train' if train else 't10k'}-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        self.images, self.side = pixels.view(-1, 1, 28, 28), side

    def __len__(self):
        return len(self.images)

    def view(self, image):
        top, left = torch.randint(29 - self.side, (2,)).tolist()
        image = image[:, top : top + self.side, left : left + self.side] / 255
        return image.flip(-1) if torch.rand(()) < 0.5 else image

    def __getitem__(self, index):
        return self.view(self.images[index]), self.view(self.images[index])


class Encoder(nn.Module):
    """A point on the sphere for each image."""

    def __init__(self, width, features):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, stride=2), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(), nn.Flatten()),
            *(nn.LazyLinear(features), nn.ReLU(), nn.Linear(features, features)),
        )

    def forward(self, images):
        return functional.normalize(self.layers(images), dim=1)


class SimCLR(expt.Task):
    """Each view finds its other among those of the global batch, by cross-entropy."""

    def __init__(self, temperature):
        self.temperature = temperature

    def forward(self, model, batch):
        return model(torch.cat((batch.inputs, batch.targets))).chunk(2)

    def scores(self, views, everyones, first=0):
        """Return each view's cosines with all but itself, and the place of its partner."""
        size, number = len(views[0]), len(everyones[0])
        own = first + torch.arange(size, device=views[0].device)
        itself, partner = torch.cat((own, own + number)), torch.cat((own + number, own))
        scores = torch.cat(views) @ torch.cat(everyones).T / self.temperature
        return scores.scatter(1, itself[:, None], -torch.inf), partner

    def loss(self, outputs, batch):
        return functional.cross_entropy(*self.scores(outputs, outputs), reduction="sum"), batch.size

    def training_loss(self, outputs, batch):
        if not dist.is_initialized():
            return self.loss(outputs, batch)
        everyones = [torch.cat(all_gather(one)) for one in outputs]
        scores, partner = self.scores(outputs, everyones, dist.get_rank() * batch.size)
        return functional.cross_entropy(scores, partner, reduction="sum"), batch.size

    def measure(self, outputs, batch):
        scores, partner = self.scores(outputs, outputs)
        return {"found": ((scores.argmax(1) == partner).sum(), len(partner))}
