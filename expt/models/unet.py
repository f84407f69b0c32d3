"""A small U-Net (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597) with padded
convolutions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.errors import ConfigError


class UNet(nn.Module):
    """Images [B, C, H, W] to logits [B, num_classes, H, W].

    Going up, features are repeated to the size of the level above, whatever that is, and convolved:
    transposed convolutions leave checkerboards. Sides may be of any length from 2 ** (len(widths) -
    1) on."""

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        widths: Sequence[int] = (16, 32, 64),
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        smallest = 2 ** (len(widths) - 1)
        if min(image_size) < smallest:
            raise ConfigError(
                f"model.widths={list(widths)}: {len(widths)} levels need images of"
                f" {smallest}x{smallest} or more, and these are {image_size[0]}x{image_size[1]};"
                " use fewer"
            )
        self.down = nn.ModuleList(
            _convolutions(before, width, batch_norm)
            for before, width in itertools.pairwise((channels, *widths))
        )
        self.up = nn.ModuleList(
            _convolutions(below + width, width, batch_norm)
            for below, width in itertools.pairwise(widths[::-1])
        )
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        features = images
        levels: list[Tensor] = []
        for down in self.down:
            features = down(functional.max_pool2d(features, 2) if levels else features)
            levels.append(features)
        for up, above in zip(self.up, levels[-2::-1], strict=True):
            repeated = functional.interpolate(features, size=above.shape[-2:], mode="nearest")
            features = up(torch.cat([repeated, above], 1))
        logits: Tensor = self.head(features)
        return logits


def _convolutions(channels: int, width: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (channels, width):
        layers.append(nn.Conv2d(before, width, 3, padding=1, bias=not batch_norm))
        layers += (
            [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            if batch_norm
            else [nn.ReLU(inplace=True)]
        )
    return nn.Sequential(*layers)
