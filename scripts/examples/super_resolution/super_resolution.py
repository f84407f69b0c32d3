"""Images of twice the size, by a network that rearranges channels (Shi et al. 2016)."""

import gzip
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import expt


class Shrunk(Dataset):
    """Images in MNIST's format at half their size, and as they are."""

    def __init__(self, root, train):
        with gzip.open(f"{root}/{'train' if train else 't10k'}-images-idx3-ubyte.gz") as file:
            pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
        self.images = pixels.view(-1, 1, 28, 28)
        self.small = nn.AvgPool2d(2)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index] / 255
        return self.small(image), image


class Upscale(nn.Sequential):
    """Four channels for each pixel of the small image become four pixels of the large one."""

    def __init__(self, width):
        super().__init__(
            *(nn.Conv2d(1, width, 5, padding=2), nn.ReLU()),
            *(nn.Conv2d(width, width // 2, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(width // 2, 4, 3, padding=1), nn.PixelShuffle(2)),
        )


class Pixels(expt.Task):
    """The squared error of a pixel; and as decibels, next to those of bicubic interpolation."""

    sums = {"error": 1, "bicubic_error": 1}

    def loss(self, outputs, batch):
        return functional.mse_loss(outputs, batch.targets, reduction="sum"), outputs.numel()

    def measure(self, outputs, batch):
        bicubic = functional.interpolate(batch.inputs, scale_factor=2, mode="bicubic")
        error = functional.mse_loss(bicubic, batch.targets, reduction="sum")
        return {"error": self.loss(outputs, batch), "bicubic_error": (error, outputs.numel())}

    def derive(self, means):
        names = {"psnr": "error", "bicubic": "bicubic_error"}
        return {name: -10 * math.log10(means[error]) for name, error in names.items()}
