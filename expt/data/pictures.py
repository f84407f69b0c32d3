"""Datasets of Pillow's pictures, each of one class, that are read one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data import transforms
from expt.data.image_folder_files import fitted, in_mode
from expt.data.source import Part, Source, of_images, streamed
from expt.data.stream import to_tensor
from expt.errors import DataError


class Pictures(Dataset[tuple[Tensor, Any]]):
    """A dataset of (picture, class) as uint8 [C, H, W], in Pillow's `mode` L or RGB; `target` makes
    the class, or else.

    With a size each is scaled to cover that, then cropped at the centre, as an image folder's are.
    Raises DataError, when it is read, for a picture that is damaged, or without a size of another
    than `one_size`."""

    def __init__(
        self,
        dataset: Dataset[Any],
        mode: str,
        size: tuple[int, int] | None,
        target: Callable[[Any], Any] = int,
    ) -> None:
        self._dataset, self._mode, self._size, self._target = dataset, mode, size, target
        self.one_size: tuple[int, int] | None = None
        """That all must have."""

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        try:
            picture, label = self._dataset[index]
            picture = in_mode(picture, self._mode)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(
                f"sample {index} cannot be read as an image ({error}); replace or remove it"
            ) from error
        if self._size is not None:
            picture = fitted(picture, self._size)
        elif self.one_size and picture.size[::-1] != self.one_size:
            (width, height), (first_height, first_width) = picture.size, self.one_size
            first = f"{first_height}x{first_width}"
            raise DataError(
                f"dataset.image_size=null: image {index} is {height}x{width}, and the first"
                f" {first}; give one size, as in 'dataset.image_size=[224,224]'"
            )
        return to_tensor(picture).contiguous(), self._target(label)

    def as_they_lie(self) -> Pictures:
        """The same pictures, neither scaled nor all of one size."""
        return Pictures(self._dataset, self._mode, None, self._target)


def of_pictures(
    sets: Mapping[str, Pictures],
    class_names: Sequence[str],
    labels: Tensor | None,
    num_workers: int,
    in_memory: Mapping[str, Part] | None = None,
) -> Source:
    """The parts `train`, and `val` and `test` if there are; `labels` are those of train, if they
    are known.

    Without transforms the parts are those `in_memory`, where they are given.
    """
    originals = sets["train"].as_they_lie()
    channels, height, width = sets["train"][0][0].shape
    for each in sets.values():
        each.one_size = height, width
    shape, number = (channels, height, width), len(class_names)
    parts = in_memory or {
        part: streamed(each, shape, number, num_workers) for part, each in sets.items()
    }
    train = transforms.transformed(parts["train"], originals, shape, number, num_workers)
    classes = torch.zeros(train.size) if labels is None else labels
    return of_images(
        shape, class_names, train, parts.get("test"), val=parts.get("val"), classes=classes
    )
