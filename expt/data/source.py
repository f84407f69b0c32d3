"""A dataset as it is found, before it is split and batched."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.data.iterable import IterableLoader
from expt.data.loading import Finish, Load, Loader, LoaderOptions
from expt.data.stream import StreamLoader, checked_image, stacked
from expt.errors import DataError


class Part(NamedTuple):
    """The training, validation or test part of a dataset, before it is split and batched."""

    size: int
    load: Load

    def whole(self, options: LoaderOptions) -> Loader:
        """A loader of all its samples."""
        return self.load(torch.arange(self.size), options)


def _of_nothing(indices: Tensor, options: LoaderOptions) -> Loader:
    raise DataError("there is no train; add it")


NOTHING = Part(0, _of_nothing)
"""In place of what is not there to be trained on, in an evaluation."""


@dataclass(frozen=True)
class Source:
    """Its parts, and what is known of its samples; see DataInfo and Data of expt.data.build."""

    shapes: Mapping[str, Any]
    class_names: tuple[str, ...]
    example: tuple[Any, Any]
    train: Part
    test: Part | None
    classes: Tensor
    """of the training samples [N]; all alike where they have none"""
    in_random_order: bool = False
    """whether the training samples come in one"""
    val: Part | None = None
    """where it is a part of its own, and not held out of train"""
    standardised: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """see DataInfo"""
    feature_names: tuple[str, ...] = ()
    """see DataInfo"""
    target_names: tuple[str, ...] = ()
    """see DataInfo"""
    fitted: Callable[[Tensor], Source] | None = None
    """the same, with what is taken from the training samples at these indices, which are chosen
    first
    """

    normalises: bool = False
    """whether its samples are images [C, H, W], by mean and std, though not of one class each"""
    moves: bool = True
    """whether such images may be augmented: a mask would stay where it is"""

    targets_of: Callable[[Tensor], Tensor] | None = None
    """the targets of the training samples at these indices, or of some of them, where they are
    numbers
    """

    @property
    def tells_classes(self) -> bool:
        """Whether `classes` are the classes of the training samples, by their numbers."""
        classes, number = self.classes, len(self.class_names)
        if not (number and len(classes)) or classes.is_floating_point():
            return False
        return 0 <= int(classes.min()) <= int(classes.max()) < number


def of_images(
    shape: tuple[int, int, int],
    class_names: Sequence[str],
    train: Part,
    test: Part | None,
    **more: Any,
) -> Source:
    """Images of one shape (channels, height, width), each of one class."""
    shapes = {"channels": shape[0], "image_size": shape[1:], "num_classes": len(class_names)}
    example = torch.zeros(shape), torch.zeros((), dtype=torch.int64)
    return Source(shapes, tuple(class_names), example, train, test, **more)


def streamed(
    dataset: Dataset[Any],
    shape: tuple[int, int, int],
    num_classes: int,
    num_workers: int,
    sample_s: float = math.inf,
) -> Part:
    """Images of a Dataset, read one by one while a run trains."""

    def load_part(indices: Tensor, options: LoaderOptions) -> Loader:
        if isinstance(dataset, IterableDataset):
            check = functools.partial(checked_image, shape=shape, num_classes=num_classes)
            how: Any = {"num_workers": num_workers, "finish": Finish(options, channels=shape[0])}
            return IterableLoader(dataset, indices, options, check=check, collate=stacked, **how)
        return StreamLoader(
            dataset,
            indices,
            options,
            shape=shape,
            num_classes=num_classes,
            num_workers=num_workers,
            sample_s=sample_s,
        )

    return Part(len(cast(Sized, dataset)), load_part)
