"""A small generative adversarial network (Goodfellow et al. 2014), of fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


class GAN(nn.Module):
    """A generator of images [B, 1, H, W] from noise [B, N], and a discriminator [B]."""

    def __init__(self, image_size: Sequence[int], noise: int, width: int) -> None:
        super().__init__()
        pixels = math.prod(image_size)
        self.generator = nn.Sequential(
            nn.Linear(noise, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, pixels),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, *image_size)),
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
            nn.Flatten(0),
        )
