"""A generative adversarial network of convolutions (Radford et al. 2016)."""

import gzip

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset

import expt


class Images(Dataset):
    """Images in MNIST's format from -1 to 1, each with the noise of another, generated one."""

    def __init__(self, root, train, noise):
        with gzip.open(f"{root}/{'train' if train else 't10k'}-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        self.images, self.noise = pixels.view(-1, 1, 28, 28), noise

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index] / 127.5 - 1, "noise": torch.randn(self.noise)}


class GAN(nn.Module):
    """A generator and a discriminator; the task calls each."""

    def __init__(self, noise, width):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Unflatten(1, (noise, 1, 1)),
            *(nn.ConvTranspose2d(noise, 2 * width, 7, bias=False), nn.BatchNorm2d(2 * width)),
            nn.ReLU(),
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width)),
            nn.ReLU(),
            *(nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width)),
            nn.LeakyReLU(0.2),
            *(nn.Conv2d(2 * width, 1, 7), nn.Flatten(0)),
        )


class Adversarial(expt.PhasedTask):
    """An update of the discriminator, then one of the generator."""

    phases = {"discriminator": "^discriminator", "generator": "^generator"}

    def phase(self, name, model, batch, outputs):
        if name == "generator":
            fake = model.discriminator(outputs["images"])
            return softplus(-fake).sum(), len(fake)
        outputs["images"] = model.generator(batch.inputs["noise"])
        real, fake = map(model.discriminator, (batch.inputs["image"], outputs["images"]))
        outputs["d_real"] = real.sigmoid().sum(), len(real)
        outputs["d_fake"] = fake.sigmoid().sum(), len(fake)
        return (softplus(-real) + softplus(fake)).sum(), len(real)
