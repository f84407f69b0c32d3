"""Transforms of training images, one by one: torchvision.transforms.v2, or custom ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.config import secrets, user_code
from expt.data.checked_samples import to_tensor
from expt.errors import ConfigError, DataError

Transform = Callable[[Any], Any]
# what a resize may overshoot [0, 1] by; pixels in 0..255 and normalised ones lie further out
_BEYOND = 0.5


def build(configured: Sequence[dict[str, Any]]) -> tuple[Transform, ...]:
    """Return an instance of each `{_target_: a.B, ...}`. Raise ConfigError for no callable."""
    try:
        made = user_code.nested_built({"transforms": list(configured)})["transforms"]
    except ConfigError as error:
        raise ConfigError(
            [f"dataset.transforms: {problem}" for problem in error.problems]
        ) from error
    for each in made:
        if not callable(each):
            raise ConfigError(
                f"dataset.transforms: a {type(each).__name__} cannot be called with an image"
            )
    return tuple(made)


class Transformed(Dataset[tuple[Tensor, Any]]):
    """A dataset of (image, label) with each image transformed to one `shape`, [C, H, W].

    Raise DataError for a sample that a transform does not take, or makes another shape of.
    """

    def __init__(
        self, dataset: Dataset[Any], transforms: Sequence[Transform], shape: tuple[int, int, int]
    ) -> None:
        self._dataset, self._transforms, self._shape = dataset, transforms, shape

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, label = self._dataset[index]
        for place, transform in enumerate(self._transforms):
            try:
                image = transform(image)
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                told = secrets.said(error)
                name = type(transform).__name__
                raise DataError(
                    f"dataset.transforms.{place}: {name} does not take sample {index}: {told}"
                ) from error
        return self._checked(image, index), label

    def _checked(self, image: Any, index: int) -> Tensor:
        try:
            tensor = to_tensor(image)
        except TypeError as error:
            raise DataError(
                f"dataset.transforms: make of sample {index} no image: {error}"
            ) from error
        if tuple(tensor.shape) != self._shape:
            raise DataError(
                f"dataset.transforms: make of sample {index} an image {tuple(tensor.shape)}, and"
                f" images are {self._shape} (channels, height, width) where they are evaluated; end"
                " with a crop or resize to that"
            )
        if tensor.is_floating_point():
            low, high = (float(value) for value in torch.aminmax(tensor))
            if low < -_BEYOND or high > 1 + _BEYOND:
                raise DataError(
                    f"dataset.transforms: make of sample {index} pixels from {low:g} to {high:g},"
                    " expected [0, 1]; leave scaling to dataset.mean and std, which evaluations"
                    " use too"
                )
        return tensor
