"""A variational autoencoder (Kingma and Welling 2014)."""

import gzip

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import expt


class Images(Dataset):
    """Images in MNIST's format, each with the noise by which its code is drawn.

    The noise is drawn here and not in the model: so it depends on the sample, the epoch and the
    seed, and is the same on any number of workers.
    """

    def __init__(self, root, train, latent):
        with gzip.open(f"{root}/{'train' if train else 't10k'}-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        self.images, self.latent = pixels.view(-1, 1, 28, 28), latent

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index] / 255, "noise": torch.randn(self.latent)}


class VAE(nn.Module):
    """An encoder that gives the mean and the log variance of a code, and a decoder."""

    def __init__(self, width, latent):
        super().__init__()
        layers = nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 2 * latent)
        self.encoder = nn.Sequential(*layers)
        layers = nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 784)
        self.generator = nn.Sequential(*layers, nn.Sigmoid(), nn.Unflatten(1, (1, 28, 28)))

    def forward(self, image, noise):
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        return self.generator(mean + noise * (log_variance / 2).exp()), mean, log_variance


class Evidence(expt.Task):
    """The negative evidence lower bound: an error of reconstruction, and a divergence."""

    def forward(self, model, batch):
        images, mean, log_variance = model(**batch.inputs)
        error = functional.binary_cross_entropy(images, batch.inputs["image"], reduction="none")
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance) / 2
        return {"reconstruction": error.flatten(1).sum(1), "divergence": divergence.sum(1)}

    def loss(self, outputs, batch):
        return sum(outputs.values()).sum(), batch.size

    def measure(self, outputs, batch):
        return {name: (values.sum(), batch.size) for name, values in outputs.items()}
