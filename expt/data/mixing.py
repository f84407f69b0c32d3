"""Mixup and cutmix of whole batches: each sample with the one before it in the *global* batch.

The first is mixed with the last. The maths are those of torchvision.transforms.v2.MixUp and CutMix
on the global batch. A worker reads the sample before its share too, so that any number of workers
sees the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch.nn import functional

from expt.data.indexing import mix

if TYPE_CHECKING:
    from expt.data.loading import Batch

_SEED = (
    20_261_123  # sets these numbers apart from the order of the samples and from what augments them
)


class Box(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right` of an image [pixels]."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True)
class Mixing:
    """What is done to each training batch; with both, one of them, drawn for each batch."""

    num_classes: int
    mixup: float | None = None
    """alpha of the share's Beta(alpha, alpha) distribution (Zhang et al. 2018, arXiv:1710.09412);
    None: no mixup
    """
    cutmix: float | None = None
    """the same, of the area (Yun et al. 2019, arXiv:1905.04899); None: no cutmix"""

    def mixed(self, batches: Iterator[Batch], seed: int, epoch: int, skip: int) -> Iterator[Batch]:
        """Yield an epoch's batches from number `skip` on, mixed, without their first sample.

        Targets are float32 [b, num_classes] then: the share of each class.
        """
        for number, batch in enumerate(batches, skip):
            share, box = self.drawn(seed, epoch, number, tuple(batch.inputs.shape[2:]))
            samples, partners = batch.inputs[1:], batch.inputs[:-1]
            if box is None:
                inputs = partners.mul(1 - share).add_(samples.mul(share))
            else:
                inputs = samples.clone()
                rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
                inputs[..., rows, columns] = partners[..., rows, columns]
            classes = functional.one_hot(batch.targets, self.num_classes).float()
            yield batch._replace(
                inputs=inputs, targets=classes[:-1].mul(1 - share).add_(classes[1:].mul(share))
            )

    def drawn(
        self, seed: int, epoch: int, number: int, image_size: tuple[int, ...]
    ) -> tuple[float, Box | None]:
        """Return how much of a sample stays in batch `number`, and its partner's box in cutmix."""
        # RandomState's numbers are the same in every version of NumPy; torch's Beta takes no
        # generator.
        generator = np.random.RandomState(mix(_SEED, seed, epoch, number))
        cuts = self.cutmix is not None and (self.mixup is None or generator.random_sample() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        assert alpha is not None
        share = float(generator.beta(alpha, alpha))
        if not cuts:
            return share, None
        height, width = image_size
        box = box_of(share, generator.randint(height), generator.randint(width), image_size)
        return 1 - (box.bottom - box.top) * (box.right - box.left) / (height * width), box


def box_of(share: float, y: int, x: int, image_size: tuple[int, ...]) -> Box:
    """Return a box of 1 - share of the image, around row y and column x, clipped at the edges."""
    height, width = image_size
    half = 0.5 * math.sqrt(1 - share)
    rows, columns = int(half * height), int(half * width)
    return Box(
        max(y - rows, 0), min(y + rows, height), max(x - columns, 0), min(x + columns, width)
    )
