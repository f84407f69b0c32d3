"""Augmentation of whole batches on their device: crop, flip, cutout, mixup and cutmix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from expt.data.indexing import mix
from expt.data.kinds import Augment

if TYPE_CHECKING:
    from expt.data.loading import Batch

_SEED = 20_250_301  # sets these numbers apart from the order of the images
_TURNS_SEED = 20_261_123  # for the first turn of each image, and for mixing, by other numbers
_BITS = 15  # of each random number: those of int16
_FLIP, _CROP_TOP, _CROP_LEFT, _CUT_Y, _CUT_X = range(5)


class Augmentation(Augment):
    """The augmentation of each training image; `bool()` is False if there is none."""

    def __bool__(self) -> bool:
        return bool(self.crop_padding or self.flip or self.cutout)

    @staticmethod
    def draw(size: int, seed: int, epoch: int) -> Tensor:
        """Return the random numbers of an epoch, int16 [5, size], a column for each position.

        Drawn for all samples at once, they depend on no batch size, rank or device; setting one
        option leaves the numbers of the others.
        """
        generator = torch.Generator().manual_seed(mix(_SEED, seed, epoch))
        return torch.randint(1 << _BITS, (5, size), dtype=torch.int16, generator=generator)

    def in_turn(self, drawn: Tensor, samples: Tensor, of: Tensor, seed: int, epoch: int) -> Tensor:
        """Return the numbers `drawn` [5, size] with those that mirror `samples` in turn.

        Half of the images begin mirrored, and each is so in every second epoch (Jordan, 2024): two
        epochs show all of them both ways, where chance would show every second one twice the same
        way.
        """
        if self.flip != "alternate":
            return drawn
        generator = torch.Generator().manual_seed(mix(_TURNS_SEED, seed))
        first = torch.randint(2, (int(of.max()) + 1,), dtype=torch.int16, generator=generator)
        drawn[_FLIP] = ((first[samples] + epoch) % 2) << _BITS - 1  # below it an image is mirrored
        return drawn

    def move(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Crop and flip images [b, C, H, W], black being 0, by the numbers `drawn` [5, b]."""
        if not (self.crop_padding or self.flip):
            return images
        height, width = images.shape[2:]
        rows = torch.arange(height, device=drawn.device).expand(len(images), -1)
        columns = torch.arange(width, device=drawn.device).expand(len(images), -1)
        if self.flip:
            columns = torch.where(drawn[_FLIP, :, None] < 1 << _BITS - 1, columns.flip(1), columns)
        if self.crop_padding:
            rows = rows + _scaled(drawn[_CROP_TOP], 2 * self.crop_padding + 1)
            columns = columns + _scaled(drawn[_CROP_LEFT], 2 * self.crop_padding + 1)
        if self.crop_padding and self.padding_mode == "reflect":
            rows = _reflected(rows - self.crop_padding, height)
            columns = _reflected(columns - self.crop_padding, width)
        elif self.crop_padding:
            images = functional.pad(images, (self.crop_padding,) * 4)
        # One gather does both; on a CPU it is a quarter faster than a crop alone by windows.
        taken = (rows * images.shape[3])[:, :, None] + columns[:, None, :]
        taken = taken.flatten(1)[:, None].expand(-1, images.shape[1], -1)
        return images.flatten(2).gather(2, taken).reshape(len(images), -1, height, width)

    def cut(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Normalised images with a square set to 0, the mean, in place."""
        if not self.cutout:
            return images
        rows = self._within(drawn[_CUT_Y], images.shape[2])[:, None, :, None]
        columns = self._within(drawn[_CUT_X], images.shape[3])[:, None, None, :]
        return images.mul_(1 - rows * columns)  # on a CPU a sixth of the time of masked_fill_

    def _within(self, drawn: Tensor, length: int) -> Tensor:
        """Return float32 [b, length]: 1 for pixels in the square around a point, else 0."""
        first = _scaled(drawn, length) - self.cutout // 2
        offset = torch.arange(length, device=drawn.device) - first
        return ((offset >= 0) & (offset < self.cutout)).float()


def _reflected(places: Tensor, length: int) -> Tensor:
    """Return places outside 0 to length - 1 as a mirror at the edge shows them."""
    places = places.abs()
    return torch.where(places < length, places, 2 * (length - 1) - places)


def _scaled(drawn: Tensor, number: int) -> Tensor:
    """Random integers from 0 to number - 1, int64 [b, 1]."""
    return (drawn.long() * number >> _BITS)[:, None]


@dataclass(frozen=True)
class Mixing:
    """The mixing of each training batch; with both kinds, one is drawn for each batch."""

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
                rows, columns = box
                inputs[..., rows, columns] = partners[..., rows, columns]
            classes = batch.targets  # shares, as a custom `collate` may make of them
            if classes.dim() == 1:
                classes = functional.one_hot(classes, self.num_classes).float()
            yield batch._replace(
                inputs=inputs, targets=classes[:-1].mul(1 - share).add_(classes[1:].mul(share))
            )

    def drawn(
        self, seed: int, epoch: int, number: int, image_size: tuple[int, ...]
    ) -> tuple[float, tuple[slice, slice] | None]:
        """Return how much of a sample stays in batch `number`, and its partner's box in cutmix."""
        # RandomState's numbers are the same in every version of NumPy; torch's Beta takes no
        # generator.
        generator = np.random.RandomState(mix(_TURNS_SEED, seed, epoch, number))
        cuts = self.cutmix is not None and (self.mixup is None or generator.random_sample() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        assert alpha is not None
        share = float(generator.beta(alpha, alpha))
        if not cuts:
            return share, None
        height, width = image_size
        y, x = generator.randint(height), generator.randint(width)
        rows, columns = box_of(share, y, x, image_size)
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return 1 - area / (height * width), (rows, columns)


def box_of(share: float, y: int, x: int, image_size: tuple[int, ...]) -> tuple[slice, slice]:
    """Return rows and columns of a box of 1 - share of the image around y and x, clipped to it."""
    height, width = image_size
    half = 0.5 * math.sqrt(1 - share)
    above, beside = int(half * height), int(half * width)
    rows = slice(max(y - above, 0), min(y + above, height))
    return rows, slice(max(x - beside, 0), min(x + beside, width))
