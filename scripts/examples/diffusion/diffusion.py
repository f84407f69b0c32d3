"""A diffusion model (Ho et al., 2020) that predicts noise; DDIM (Song et al., 2021) samples it."""

import gzip
import itertools

import torch
from torch import nn
from torch.utils.data import Dataset

import expt


class Images(Dataset):
    """An image in [-1, 1], noise, and the angle between both, from 0 to pi / 2 (noise only)."""

    def __init__(self, root, train):
        with gzip.open(f"{root}/{'train' if train else 't10k'}-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        self.images = pixels.view(-1, 1, 28, 28)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        noise, angle = torch.randn(1, 28, 28), torch.rand(1, 1, 1) * torch.pi / 2
        return {"image": self.images[index] / 127.5 - 1, "noise": noise, "angle": angle}


def layers(*parts):
    """Return the parts, each after a SiLU."""
    return nn.Sequential(*(layer for part in parts for layer in (nn.SiLU(), part)))


class Denoiser(nn.Module):
    """A small U-Net that finds the noise in images; called with noise [b, 784], it samples."""

    def __init__(self, width, steps):
        super().__init__()
        self.steps, two, four = steps, 2 * width, 4 * width
        self.first, self.time = nn.Conv2d(1, width, 3, 1, 1), nn.Linear(8, four)
        self.down = layers(nn.Conv2d(width, two, 4, 2, 1), nn.Conv2d(two, four, 4, 2, 1))
        up = nn.ConvTranspose2d(four, two, 4, 2, 1), nn.ConvTranspose2d(two, width, 4, 2, 1)
        self.middle = layers(*(nn.Conv2d(four, four, 3, 1, 1) for _ in range(3)), *up)
        self.last = layers(nn.Conv2d(two, width, 3, 1, 1), nn.Conv2d(width, 1, 3, 1, 1))

    def noise_in(self, images, angle):
        waves = angle.flatten(1) * 2.0 ** torch.arange(1, 5, device=angle.device)
        embedded = self.time(torch.cat((waves.sin(), waves.cos()), 1))
        first = self.first(images)
        within = self.middle(self.down(first) + embedded[:, :, None, None])
        return self.last(torch.cat((first, within), 1))

    def forward(self, noise):
        images, angles = noise.view(-1, 1, 28, 28), torch.linspace(1.54, 0, self.steps).to(noise)
        for angle, later in itertools.pairwise(angles):
            found = self.noise_in(images, angle.expand(len(images), 1, 1, 1))
            clean = ((images - angle.sin() * found) / angle.cos()).clamp(-1, 1)
            images = mixed(clean, (images - angle.cos() * clean) / angle.sin(), later)
        return (images + 1) / 2


class Diffusion(nn.Module):
    """A denoiser, and a step of its training."""

    def __init__(self, width, steps):
        super().__init__()
        self.generator = Denoiser(width, steps)

    def forward(self, image, noise, angle):
        return self.generator.noise_in(mixed(image, noise, angle), angle)


def mixed(images, noise, angle):
    """Return images and noise in the shares of an angle."""
    return angle.cos() * images + angle.sin() * noise


class Noise(expt.Task):
    """The mean squared error of the noise."""

    def forward(self, model, batch):
        return model(**batch.inputs)

    def loss(self, outputs, batch):
        return (outputs - batch.inputs["noise"]).square().mean((1, 2, 3)).sum(), batch.size
