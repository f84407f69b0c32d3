"""A diffusion model (Ho et al., 2020) that predicts noise; DDIM (Song et al., 2021) samples it."""

import gzip
import itertools

import torch
from torch import nn
from torch.utils.data import Dataset

import expt


class Images(Dataset):
    """An image in [-1, 1], noise, and a time from 0 (no noise) to 1."""

    def __init__(self, root, train):
        with gzip.open(f"{root}/{'train' if train else 't10k'}-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        self.images = pixels.view(-1, 1, 28, 28)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        noise, time = torch.randn(1, 28, 28), torch.rand(1, 1, 1)
        return {"image": self.images[index] / 127.5 - 1, "noise": noise, "time": time}


class Denoiser(nn.Module):
    """A small U-Net that finds the noise in images; called with noise [b, 784], it samples."""

    def __init__(self, width, steps):
        super().__init__()
        self.steps, wide = steps, 2 * width
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, wide))
        self.first, self.down = nn.Conv2d(1, width, 3, 1, 1), nn.Conv2d(width, wide, 4, 2, 1)
        layers = [layer for _ in range(3) for layer in (nn.SiLU(), nn.Conv2d(wide, wide, 3, 1, 1))]
        self.middle = nn.Sequential(*layers, nn.SiLU(), nn.ConvTranspose2d(wide, width, 4, 2, 1))
        self.last = nn.Sequential(nn.SiLU(), nn.Conv2d(wide, width, 3, 1, 1), nn.SiLU())
        self.out = nn.Conv2d(width, 1, 3, 1, 1)

    def noise_in(self, images, time):
        waves = time.flatten(1) * torch.pi * 2.0 ** torch.arange(4, device=time.device)
        embedded = self.time(torch.cat((waves.sin(), waves.cos()), 1))
        first = self.first(images)
        within = self.middle(self.down(first) + embedded[:, :, None, None])
        return self.out(self.last(torch.cat((first, within), 1)))

    def forward(self, noise):
        images = noise.view(-1, 1, 28, 28)
        times = torch.linspace(0.98, 0, self.steps + 1, device=noise.device).view(-1, 1, 1, 1, 1)
        for time, later in itertools.pairwise(times):
            found = self.noise_in(images, time.expand(len(images), 1, 1, 1))
            clean = images / (time * torch.pi / 2).cos() - found * (time * torch.pi / 2).tan()
            images = mixed(clean.clamp(-1, 1), found, later)
        return (images.clamp(-1, 1) + 1) / 2


class Diffusion(nn.Module):
    """A denoiser, and a step of its training."""

    def __init__(self, width, steps):
        super().__init__()
        self.generator = Denoiser(width, steps)

    def forward(self, image, noise, time):
        return self.generator.noise_in(mixed(image, noise, time), time)


def mixed(images, noise, time):
    """Return images and noise in the shares of a time."""
    return (time * torch.pi / 2).cos() * images + (time * torch.pi / 2).sin() * noise


class Noise(expt.Task):
    """The mean squared error of the noise."""

    def forward(self, model, batch):
        return model(**batch.inputs)

    def loss(self, outputs, batch):
        return (outputs - batch.inputs["noise"]).square().mean((1, 2, 3)).sum(), batch.size
