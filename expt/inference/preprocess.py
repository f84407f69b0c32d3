"""What a model gets of images, rows and texts: as its dataset gave them to it, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from expt.data.image_files import MODES, fit, open_picture, stretch
from expt.data.kinds import DatasetConfig
from expt.data.loading import Normalise
from expt.errors import ConfigError

Sample: TypeAlias = Any
"""A picture's path or a picture of Pillow's; a text; or a tensor or array, by itself or with a
batch's dimension.
"""
Columns: TypeAlias = Mapping[str, tuple[float, float]]
"""By name the mean and the deviation."""


class Scales(NamedTuple):
    """What columns were standardised by; empty where they are as they lie in the data."""

    features: Columns
    targets: Columns


def scales_of(dataset: DatasetConfig, trained_on: Mapping[str, Any]) -> Scales:
    """Return the scales of a run whose record says `trained_on` of its data."""
    known = list(trained_on.get("standardised", {}).items())  # features first, in their order
    rows = dataset.has_rows and getattr(dataset, "standardise", False)
    number = trained_on["image_size"][1] if rows else 0
    return Scales(dict(known[:number]), dict(known[number:]))


class Preprocess:
    """`preprocess(SAMPLE)` and `preprocess([SAMPLE, ...])` return a batch on the model's device.

    Images are scaled to cover the size that the model was trained on and cropped at the centre, or
    stretched to it where those with masks were; as tensors they are uint8, or float in [0, 1], [C,
    H, W] or [N, C, H, W], of any size. They come out as float32 [N, C, H, W], normalised. Rows [F]
    or [N, F] of a table, lists of numbers too, come out standardised, [N, 1, 1, F]. A text comes
    out as its tokens, int64 [1, length]. Other samples must be tensors, and are only moved.

    Raise ConfigError for what is no sample, DataError for a damaged picture.
    """

    def __init__(
        self,
        dataset: DatasetConfig,
        data: Mapping[str, Any],
        device: torch.device,
        *,
        segments: bool = False,
    ) -> None:
        self._dataset, self._data, self._device = dataset, data, device
        self._resize = stretch if dataset.has_masks(segments) else fit
        self.scales = scales_of(dataset, data)
        self._normalise: Normalise | None = None
        if "channels" in data and not dataset.has_rows and not dataset.passes_as_is:
            self._normalise = Normalise(
                dataset.mean,
                dataset.std,
                channels=data["channels"],
                device=device,
                channels_last=False,
            )

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        """Return the batch."""
        if "vocab_size" in self._data:
            return self._tokens(samples)
        if isinstance(samples, list | tuple):
            is_of_tensors = any(isinstance(sample, Tensor | np.ndarray) for sample in samples)
            if self._dataset.has_rows and not is_of_tensors:
                return self._rows(_of_lists(samples))
            return torch.cat([self(sample) for sample in samples])
        if self._dataset.has_rows:
            return self._rows(_tensor(samples))
        if self._normalise is None:
            return _tensor(samples).to(self._device)
        is_array = isinstance(samples, Tensor | np.ndarray)
        images = _tensor(samples) if is_array else self.picture(samples)
        images = images.unsqueeze(0) if images.dim() == 3 else images
        channels = self._data["channels"]
        if images.dim() != 4 or images.shape[1] != channels:
            raise ConfigError(
                f"an image of shape {list(images.shape)}: give [{channels}, height, width], or many"
            )
        return self._normalise(images.to(self._device, copy=True))

    def picture(self, given: Any, name: str = "the picture") -> Tensor:
        """Return a picture, or that of a path, as uint8 [C, H, W] of the model's size.

        Raise DataError for a damaged one, by its path or `name`.
        """
        channels, (height, width) = self._data["channels"], self._data["image_size"]
        if channels not in MODES:
            raise ConfigError(f"a picture: the model takes {channels} channels; give a tensor")
        picture = open_picture(given, MODES[channels], name)
        pixels = torch.from_numpy(np.array(self._resize(picture, (height, width))))
        return pixels.reshape(height, width, -1).permute(2, 0, 1)

    def _rows(self, given: Tensor) -> Tensor:
        rows = given.double().unsqueeze(0) if given.dim() == 1 else given.double()
        number = self._data["image_size"][1]
        if rows.dim() != 2 or rows.shape[1] != number:
            raise ConfigError(f"rows of shape {list(rows.shape)}: give [N, {number}]")
        if scales := [*self.scales.features.values()]:
            mean, std = torch.tensor(scales, dtype=torch.float64).T
            rows = (rows - mean) / std
        return rows.float().view(-1, 1, 1, number).to(self._device)

    def _tokens(self, given: Any) -> Tensor:
        if isinstance(given, str):
            given = torch.tensor([self._dataset.encode(given)])
        elif isinstance(given, bytes):
            given = torch.tensor([list(given)])
        return _tensor(given).long().to(self._device)


def _of_lists(given: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(given, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rows: {error}; give lists of numbers, as many in each") from error


def _tensor(given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given if given.flags.writeable else given.copy())
    raise ConfigError(f"a {type(given).__name__}: give a tensor, with a batch's dimension")
