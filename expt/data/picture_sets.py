"""Pictures and masks that are decoded when they are read, or taken from the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.cache import CachedImages
from expt.data.checked_samples import to_tensor
from expt.data.checksums import Checksums
from expt.data.loader import Held
from expt.data.loading import LoaderOptions
from expt.data.memory import InMemory, eval_batch_size
from expt.data.picture_survey import look, look_at_pair
from expt.data.pictures import (
    MODES,
    Picture,
    fit,
    numbers_of_mask,
    open_picture,
    refuse_damaged,
    stretch,
)
from expt.errors import DataError
from expt.features import Mask


@dataclass(frozen=True, eq=False)
class Pictures(Dataset[tuple[Tensor, Any]]):
    """Pictures as uint8 [C, H, W], and their targets by `target`.

    `pairs` holds them, opened, as paths or as streams. With a `size` each is fitted to it; without
    one all must have `one_size`, where that is set. Raise DataError, when it is read, for a picture
    that is damaged, or of another size.
    """

    pairs: Any
    channels: int
    size: tuple[int, int] | None
    target: Callable[[Any], Any] = int
    one_size: tuple[int, int] | None = None
    needed: tuple[int, int] | None = None
    """the height and width to decode at the least; see open_picture"""
    sums: Checksums | None = None
    """refuses files that have changed: the run's record names their content"""
    resize: Callable[[Any, tuple[int, int]], Any] = fit
    """makes a picture of the `size`"""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        picture, target = self.opened(index)
        self.check_size(index, picture.image)
        try:
            return self.pixels(picture.image), self.target(target)
        except (TypeError, ValueError) as error:
            raise DataError(f"sample {index}: its target is {target!r} ({error})") from error

    def pair(self, index: int, name: str) -> tuple[Any, Any]:
        """Return the sources of a picture and its target. Raise DataError if they have changed."""
        with refuse_damaged(name):
            source, target = self.pairs[index]
        for file in (source, target):
            if self.sums and isinstance(file, str):
                self.sums.refuse_changed(file)
        return source, target

    def opened(self, index: int) -> tuple[Picture, Any]:
        """Return a picture, and the source of its target."""
        source, target = self.pair(index, name := f"sample {index}")
        return open_picture(source, MODES[self.channels], name, self.needed), target

    def pixels(self, image: Any) -> Tensor:
        """Return a picture of Pillow's as uint8 [C, H, W], of the `size` if there is one."""
        if self.size not in (None, image.size[::-1]):
            image = self.resize(image, self.size)
        return to_tensor(image).contiguous()

    def look(self, index: int, name: str) -> Picture:
        """Return a picture for `look_at`. Raise DataError by its `name` where one is wrong."""
        return look(self.pair(index, name)[0], MODES[self.channels], name=name)

    def check_size(self, index: int, image: Any) -> None:
        """Raise DataError for a picture of another height and width than the first's."""
        size = image.height, image.width
        first = self.one_size
        if self.size is None and first not in (None, size):
            raise DataError(
                f"dataset.image_size=null: image {index} is {size[0]}x{size[1]}, and the first"
                f" {first[0]}x{first[1]}; give one size, e.g. 'dataset.image_size=[224,224]'"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPictures(Pictures):
    """Pictures as uint8 [C, H, W], and their masks int64 [H, W], both resized to `size`.

    Raise DataError, when it is read, also for a mask of another size than its picture, or one with
    other values.
    """

    values: Mask
    resize: Callable[[Any, tuple[int, int]], Any] = stretch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, source = self.opened(index)
        name = source if isinstance(source, str) else f"sample {index}: its mask"
        mask, _ = numbers_of_mask(open_picture(source, name=name), picture, name)
        self.values.check_values(mask, name)
        self.check_size(index, picture.image)
        return self.pixels(picture.image), _resized(mask, self.size or mask.shape)

    def look(self, index: int, name: str) -> Picture:
        """See Pictures; of the mask, too."""
        source, mask = self.pair(index, name)
        return look_at_pair(source, mask, MODES[self.channels], self.values, name)

    def occurring(self, indices: Tensor) -> Tensor:
        """Return the numbers in masks, of at most 512 that lie evenly, until all classes occur."""
        found, wanted = set[int](), {*range(self.values.num_classes)}
        places = torch.linspace(0, len(indices) - 1, min(len(indices), 512)).long()
        for index in indices[places].tolist():
            if wanted <= found:
                break
            _, source = self.pair(index, name := f"sample {index}")
            mask = open_picture(source, name=name)
            found |= {*np.unique(numbers_of_mask(mask, mask, name)[0]).tolist()}
        return torch.tensor(sorted(found))


def _resized(mask: np.ndarray, image_size: tuple[int, int]) -> Tensor:
    """Return a mask of a height and width.

    As Pillow's nearest, whose modes do not hold all numbers: a pixel is that in whose middle the
    new one's lies.
    """
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int)
        for new, old in zip(image_size, mask.shape, strict=True)
    )
    return torch.from_numpy(np.ascontiguousarray(mask[rows][:, columns]))


@dataclass(frozen=True, eq=False)
class Kept(Held):
    """Pictures that are decoded once: taken from the cache, or put there by who reads them."""

    pictures: Pictures
    labels: Any
    """the class of each, or numbers [N, T]"""
    cached: CachedImages
    device: torch.device

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.cached.has(index):
            return torch.from_numpy(self.cached.images[index].copy()), self.labels[index]
        image, label = self.pictures[index]
        self.pictures.pair(index, f"sample {index}")  # refused if it has changed meanwhile
        self.cached.put(index, image.numpy())
        return image, label

    def held(self, indices: Tensor, options: LoaderOptions) -> Held | None:
        """See Held: they are in memory once the cache has all, where a batch may still lack."""
        if self.cached.are_whole:
            return self._whole
        missing = [index for index in indices.tolist() if not self.cached.has(index)]
        if len(missing) <= options.batch_size:  # an epoch drops less
            for index in missing:
                self[index]
        return self._placed() if all(map(self.cached.has, missing)) else None

    @functools.cached_property
    def _whole(self) -> InMemory:
        return self._placed()  # one for all loaders

    def _placed(self) -> InMemory:
        """Return all images on the device, as they are now."""
        labels = torch.as_tensor(self.labels)
        return InMemory(torch.from_numpy(self.cached.images), labels, self.device)

    def evaluated_at_once(self, options: LoaderOptions) -> int | None:
        """See Held."""
        return eval_batch_size(options)
