"""Samples of an image and a mask of class numbers: root/{train,val,test}/{images,masks}, or of a
person's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.config import datasets
from expt.data import samples
from expt.data.image_folder_files import MODES, in_mode
from expt.data.loading import Finish, Loader, LoaderOptions
from expt.data.mask_files import Pair, decode, numbers_of, resized
from expt.data.source import NOTHING, Part, Source
from expt.data.stream import SampleLoader
from expt.errors import DataError


@dataclass(frozen=True, kw_only=True)
class MaskValues:
    """What masks may hold."""

    num_classes: int
    ignore_index: int = 255

    def wrong(self, mask: Tensor) -> int | None:
        """A value that is neither a class nor to be ignored; None where there is none."""
        out = (mask < 0) | (mask >= self.num_classes)
        out &= mask != self.ignore_index
        return int(mask[out][0]) if out.any() else None

    @property
    def expected(self) -> str:
        """In words."""
        return f"expected 0 to {self.num_classes - 1}, or {self.ignore_index} (task.ignore_index)"


def values_of(dataset: object, task: Any) -> MaskValues:
    """What masks may hold by the configuration: the dataset says how many classes, else the task."""
    settings = {"ignore_index": task.ignore_index} if task.TARGETS == "mask" else {}
    return MaskValues(num_classes=datasets.mask_classes(dataset) or task.num_classes, **settings)


class MaskFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images uint8 [C, H, W] and masks int64 [H, W] of one part, resized to `image_size`.

    Raises DataError, when it is read, for what cannot be read, a mask of another size than its
    image, or one with other values."""

    def __init__(
        self, pairs: list[Pair], image_size: tuple[int, int], values: MaskValues, channels: int = 3
    ) -> None:
        self._pairs, self._image_size, self._values, self._channels = (
            pairs,
            image_size,
            values,
            channels,
        )

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pair = self._pairs[index]
        image, mask = map(
            torch.from_numpy, decode(pair, self._image_size, self._refuse, self._channels)
        )
        return image.permute(2, 0, 1).contiguous(), mask

    def _refuse(self, mask: str, array: Any) -> None:
        if (wrong := self._values.wrong(torch.from_numpy(array))) is not None:
            raise DataError(
                f"{mask} holds the class {wrong}, {self._values.expected}; mend the mask, or"
                " dataset.num_classes"
            )


class MaskPictures(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of (picture, mask), both Pillow's, as images uint8 [C, H, W] and masks int64 [H,
    W].

    They are resized to `size`, without one all must have that of the first. `classes` makes of a
    mask's numbers those of its classes. Raises DataError, when it is read, for what is damaged, and
    as MaskFolder for a mask."""

    def __init__(
        self,
        dataset: Dataset[Any],
        values: MaskValues,
        *,
        channels: int,
        size: tuple[int, int] | None,
        classes: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers,
    ) -> None:
        self._dataset, self._values, self._mode, self._classes = (
            dataset,
            values,
            MODES[channels],
            classes,
        )
        self.size = size
        """That all get, or must have."""
        self._resizes = size is not None

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            picture, drawn = self._dataset[index]
            picture = in_mode(picture, self._mode)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(
                f"sample {index} cannot be read as an image ({error}); replace or remove it"
            ) from error
        mask = self._classes(numbers_of(drawn, picture, f"sample {index}: its mask"))
        if (wrong := self._values.wrong(torch.from_numpy(mask))) is not None:
            raise DataError(
                f"sample {index}: its mask holds the class {wrong}, {self._values.expected}; mend"
                " the mask"
            )
        height_width = mask.shape[0], mask.shape[1]
        if not self._resizes and self.size not in (None, height_width):
            (height, width), (first_height, first_width) = height_width, self.size or (0, 0)
            raise DataError(
                f"dataset.image_size=null: image {index} is {height}x{width}, and the first "
                f"{first_height}x{first_width}; give one size, as in 'dataset.image_size=[224,224]'"
            )
        image, classes = map(torch.from_numpy, resized(picture, mask, self.size or height_width))
        return image.permute(2, 0, 1).contiguous(), classes


def of_mask_pictures(
    sets: Mapping[str, MaskPictures], num_classes: int, num_workers: int
) -> Source:
    """The parts `train`, and `val` and `test` if there are.

    Raises DataError where the first sample cannot be read.
    """
    channels, height, width = sets["train"][0][0].shape
    for each in sets.values():
        each.size = height, width
    parts = {
        part: Part(len(each), loading(each, num_workers, channels)) for part, each in sets.items()
    }
    return of_masks(parts, (channels, height, width), num_classes)


def of_masks(parts: Mapping[str, Part], shape: tuple[int, int, int], num_classes: int) -> Source:
    """Parts of images of one shape (channels, height, width) and their masks."""
    channels, *size = shape
    shapes = {"channels": channels, "image_size": tuple(size), "num_classes": num_classes}
    example = torch.zeros(shape), torch.zeros(*size, dtype=torch.int64)
    train = parts.get("train", NOTHING)
    more: dict[str, Any] = {"val": parts.get("val"), "normalises": True, "moves": False}
    return Source(shapes, (), example, train, parts.get("test"), torch.zeros(train.size), **more)


class ImageMaskLoader(SampleLoader):
    """Batches of images and masks; see SampleLoader.

    The images are normalised, the masks stay as they are.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        indices: Tensor,
        options: LoaderOptions,
        *,
        num_workers: int,
        channels: int = 3,
    ) -> None:
        # Logits of many classes are as large as an image: no more of them at a time than in
        # training.
        chunk = max(1, options.batch_size // options.shard.world_size)
        options = dataclasses.replace(options, eval_batch_size=chunk)
        finish = Finish(options, channels=channels)
        super().__init__(
            dataset,
            indices,
            options,
            collate=samples.collated,
            num_workers=num_workers,
            finish=finish,
        )


def loading(
    dataset: Dataset[Any], num_workers: int, channels: int = 3
) -> Callable[[Tensor, LoaderOptions], Loader]:
    """What makes a loader of the samples at given indices."""
    how = {"num_workers": num_workers, "channels": channels}
    return lambda indices, options: ImageMaskLoader(dataset, indices, options, **how)


def checked_mask(sample: Any, values: MaskValues) -> tuple[Any, Tensor]:
    """A person's own (inputs, mask), the mask as int64.

    Raises DataError for another: a GPU says nothing of it.
    """
    if not isinstance(sample, list | tuple) or len(sample) != 2:
        raise DataError(f"is a {type(sample).__name__}, expected (image, mask)")
    mask = torch.as_tensor(sample[1])
    if mask.dim() != 2 or mask.is_floating_point():
        raise DataError(
            f"its mask is {mask.dtype} {list(mask.shape)}, expected class numbers, int64 [height,"
            " width]"
        )
    if (wrong := values.wrong(mask)) is not None:
        raise DataError(
            f"its mask holds the class {wrong}, {values.expected}; mend the mask, or"
            " task.num_classes"
        )
    return sample[0], mask.long()
