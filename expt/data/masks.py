"""Samples of an image and a mask of class numbers: files, pictures, or a custom dataset's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expt.data.checked_samples import labelled
from expt.data.image_files import open_picture, stretch
from expt.data.images import Pictures, image_part, of_one_shape
from expt.data.kinds import DatasetConfig
from expt.data.source import NOTHING, Source
from expt.errors import DataError

_MODES = ("1", "L", "P", "I", "I;16")  # one number for each pixel


@dataclass(frozen=True, kw_only=True)
class MaskValues:
    """What masks may hold."""

    num_classes: int
    ignore_index: int = 255

    def check(self, mask: Tensor, name: str) -> None:
        """Raise DataError for a value that is neither a class nor to be ignored."""
        out = (mask < 0) | (mask >= self.num_classes)
        out &= mask != self.ignore_index
        if out.any():
            raise DataError(
                f"{name} holds the class {int(mask[out][0])}, expected 0 to {self.num_classes - 1},"
                f" or {self.ignore_index} (task.ignore_index); fix the mask, or num_classes"
            )


def values_of(dataset: DatasetConfig, task: Any) -> MaskValues:
    """Return what masks may hold: the dataset says how many classes, else the task."""
    settings = {"ignore_index": task.ignore_index} if hasattr(task, "ignore_index") else {}
    return MaskValues(num_classes=dataset.mask_classes() or task.num_classes, **settings)


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPictures(Pictures):
    """Pictures as uint8 [C, H, W], and their masks int64 [H, W], both resized to `size`.

    `target` makes of a mask's numbers those of its classes. Raise DataError, when it is read, also
    for a mask of another size than its picture, or one with other values.
    """

    values: MaskValues
    target: Callable[[Any], Any] = lambda numbers: numbers

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, source = self.opened(index)
        name = source if isinstance(source, str) else f"sample {index}: its mask"
        mask = self._numbers(open_picture(source, name=name), image, name)
        if self.size is None:
            self.check_size(index, image)
        return _resized(image, mask, self.size or (image.height, image.width))

    def _numbers(self, mask: Any, image: Any, name: str) -> np.ndarray:
        """Return the class of each pixel of a mask, int64 [height, width]."""
        if mask.mode not in _MODES:
            raise DataError(
                f"{name} is a picture of mode {mask.mode}; save its mask with one number for each"
                " pixel, as a grey or palette PNG"
            )
        if mask.size != image.size:
            one, other = (f"{each.height}x{each.width}" for each in (mask, image))
            raise DataError(f"{name} is {one}, and its image {other}; make them one size")
        numbers: np.ndarray = self.target(np.array(mask).astype(np.int64))
        self.values.check(torch.from_numpy(numbers), name)
        return numbers


def _resized(image: Any, mask: np.ndarray, image_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a picture as uint8 [C, height, width], and its mask: bilinear, and nearest."""
    height, width = image_size
    if image.size != (width, height):
        image = stretch(image, image_size)
        # As Pillow's nearest, whose modes do not hold all numbers: the pixel in whose middle the
        # new one's lies.
        rows, columns = (
            ((np.arange(new) + 0.5) * old / new).astype(int)
            for new, old in zip(image_size, mask.shape, strict=True)
        )
        mask = np.ascontiguousarray(mask[rows][:, columns])
    pixels = torch.from_numpy(np.array(image).reshape(height, width, -1))
    return pixels.permute(2, 0, 1).contiguous(), torch.from_numpy(mask)


def of_masks(sets: Mapping[str, MaskPictures], num_classes: int, num_workers: int) -> Source:
    """Return the parts `train`, `val` and `test` that there are."""
    shape, sets = of_one_shape(sets)

    # Logits of many classes are as large as an image.
    parts = {
        part: image_part(each, shape, num_workers, eval_as_training=True)
        for part, each in sets.items()
    }
    shapes = {"channels": shape[0], "image_size": shape[1:], "num_classes": num_classes}
    example = torch.zeros(shape), torch.zeros(shape[1:], dtype=torch.int64)
    train = parts.get("train", NOTHING)
    more: dict[str, Any] = {"val": parts.get("val"), "normalises": True, "moves": False}
    return Source(shapes, (), example, train, parts.get("test"), torch.zeros(train.size), **more)


def checked_mask(sample: Any, values: MaskValues) -> tuple[Any, Tensor]:
    """Return a custom (inputs, mask), the mask as int64.

    Raise DataError for another: a GPU says nothing of it.
    """
    inputs, mask = labelled(sample, "image", "mask")
    mask = torch.as_tensor(mask)
    if mask.dim() != 2 or mask.is_floating_point():
        raise DataError(
            f"its mask is {mask.dtype} {list(mask.shape)}, expected class numbers, int64 [height,"
            " width]"
        )
    values.check(mask, "its mask")
    return inputs, mask.long()
