"""Samples of an image and a mask of class numbers: files, pictures, or a custom dataset's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data import samples
from expt.data.image_files import MODES, read_image, stretch
from expt.data.images import check_size, read_picture
from expt.data.kinds import DatasetConfig
from expt.data.loading import Finish, Loader, LoaderOptions
from expt.data.source import NOTHING, Part, Source
from expt.data.stream import SampleLoader
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


class MaskFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images uint8 [C, H, W] and masks int64 [H, W] of (image, mask) files, resized.

    Raise DataError, when it is read, for what cannot be read, a mask of another size than its
    image, or one with other values.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        image_size: tuple[int, int],
        values: MaskValues,
        channels: int = 3,
    ) -> None:
        self._pairs, self._size, self._values = pairs, image_size, values
        self._mode = MODES[channels]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, mask = self._pairs[index]
        image = read_image(path, self._mode)
        return _resized(image, _numbers(read_image(mask), image, mask, self._values), self._size)


class MaskPictures(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of (picture, mask), both Pillow's, as images uint8 [C, H, W] and masks int64.

    They are resized to `size`; without one all must have `one_size`, where that is set. `classes`
    makes of a mask's numbers those of its classes. Raise DataError, when it is read, for what is
    damaged, and as MaskFolder for a mask.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        values: MaskValues,
        *,
        channels: int,
        size: tuple[int, int] | None,
        classes: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers,
    ) -> None:
        self._dataset, self._values, self._classes = dataset, values, classes
        self._mode, self._size = MODES[channels], size
        self.one_size: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, drawn = read_picture(self._dataset, index, self._mode)
        mask = _numbers(drawn, image, f"sample {index}: its mask", self._values, self._classes)
        size = mask.shape[0], mask.shape[1]
        if self._size is None:
            check_size(index, size, self.one_size)
        return _resized(image, mask, self._size or size)


def _numbers(
    mask: Any,
    image: Any,
    name: str,
    values: MaskValues,
    classes: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers,
) -> np.ndarray:
    """Return the class of each pixel of a picture, int64 [height, width]."""
    if mask.mode not in _MODES:
        raise DataError(
            f"{name} is a picture of mode {mask.mode}; save its mask with one number for each"
            " pixel, as a grey or palette PNG"
        )
    if mask.size != image.size:
        one, other = (f"{each.height}x{each.width}" for each in (mask, image))
        raise DataError(f"{name} is {one}, and its image {other}; make them one size")
    numbers = classes(np.array(mask).astype(np.int64))
    values.check(torch.from_numpy(numbers), name)
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


def of_mask_pictures(
    sets: Mapping[str, MaskPictures], num_classes: int, num_workers: int
) -> Source:
    """Return the parts `train`, and `val` and `test` if there are.

    Raise DataError where the first sample cannot be read.
    """
    channels, height, width = sets["train"][0][0].shape
    for each in sets.values():
        each.one_size = height, width
    return of_masks(sets, (channels, height, width), num_classes, num_workers)


def of_masks(
    sets: Mapping[str, Dataset[Any]],
    shape: tuple[int, int, int],
    num_classes: int,
    num_workers: int,
) -> Source:
    """Return parts of images of one shape (channels, height, width) and their masks."""
    channels, *size = shape

    def part(dataset: Dataset[Any]) -> Part:
        def load(indices: Tensor, options: LoaderOptions) -> Loader:
            # Logits of many classes are as large as an image: no more of them at a time than in
            # training.
            chunk = max(1, options.batch_size // options.shard.world_size)
            options = dataclasses.replace(options, eval_batch_size=chunk)
            how: Any = {"num_workers": num_workers, "finish": Finish(options, channels=channels)}
            return SampleLoader(dataset, indices, options, collate=samples.collated, **how)

        return Part(len(cast(Sized, dataset)), load)

    parts = {name: part(dataset) for name, dataset in sets.items()}
    shapes = {"channels": channels, "image_size": tuple(size), "num_classes": num_classes}
    example = torch.zeros(shape), torch.zeros(*size, dtype=torch.int64)
    train = parts.get("train", NOTHING)
    more: dict[str, Any] = {"val": parts.get("val"), "normalises": True, "moves": False}
    return Source(shapes, (), example, train, parts.get("test"), torch.zeros(train.size), **more)


def checked_mask(sample: Any, values: MaskValues) -> tuple[Any, Tensor]:
    """Return a custom (inputs, mask), the mask as int64.

    Raise DataError for another: a GPU says nothing of it.
    """
    if not isinstance(sample, list | tuple) or len(sample) != 2:
        raise DataError(f"is a {type(sample).__name__}, expected (image, mask)")
    mask = torch.as_tensor(sample[1])
    if mask.dim() != 2 or mask.is_floating_point():
        raise DataError(
            f"its mask is {mask.dtype} {list(mask.shape)}, expected class numbers, int64 [height,"
            " width]"
        )
    values.check(mask, "its mask")
    return sample[0], mask.long()
