"""Images made on the spot, whose class shows in them: for trials of speed, memory and launching."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from expt.config import datasets
from expt.data.indexing import mix

_CHUNK = 1024  # images: bounds what is held beside the result


def synthetic(dataset: datasets.Synthetic) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test (images uint8 [N, C, H, W], labels int64 [N]), from `dataset.seed` alone.

    An image is the mean of its class's smooth pattern and of noise.
    """
    generator = torch.Generator().manual_seed(mix(dataset.seed))
    coarse = torch.rand(dataset.num_classes, dataset.channels, 4, 4, generator=generator)
    patterns = (
        functional.interpolate(coarse, size=list(dataset.image_size), mode="bilinear")
        .mul_(127)
        .to(torch.uint8)
    )
    return _draw(patterns, dataset.train_size, generator), _draw(
        patterns, dataset.test_size, generator
    )


def _draw(patterns: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(len(patterns), (size,), generator=generator)
    images = torch.empty(size, *patterns.shape[1:], dtype=torch.uint8)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        images[chunk].random_(0, 128, generator=generator).add_(patterns[labels[chunk]])
    return images, labels
