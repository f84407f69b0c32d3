"""What a model gets of what a person has: images, rows of a table and texts as its dataset gave
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from expt.data.image_files import fit, in_mode, read_image, stretch
from expt.data.kind import DatasetConfig
from expt.data.loading import Normalise
from expt.errors import ConfigError

Sample: TypeAlias = Any
"""A picture's path or a picture of Pillow's; a text; or a tensor or array, by itself or with a
batch's dimension.
"""


class Preprocess:
    """`preprocess(SAMPLE)` and `preprocess([SAMPLE, ...])` give a batch for the model, on its
    device.

    Images are scaled to cover the size that the model was trained on and cropped at the centre, or
    stretched to it where those with masks were; as tensors they are uint8, or float in [0, 1], [C,
    H, W] or [N, C, H, W], of any size. They come out as float32 [N, C, H, W], normalised. Rows [F]
    or [N, F] of a table, lists of numbers too, come out standardised, [N, 1, 1, F]. A text comes
    out as its tokens, int64 [1, length]. What is of none of these kinds, as the samples of one's
    own dataset without classes, is refused where it is no tensor, and else only moved."""

    def __init__(
        self,
        dataset: DatasetConfig,
        data: Mapping[str, Any],
        device: torch.device,
        *,
        segments: bool = False,
    ) -> None:
        """`segments`: whether it is of a task=segmentation."""
        self._dataset, self._data, self._device = dataset, data, device
        self._is_text = "vocab_size" in data
        self._is_table = dataset.has_rows
        self._resized = stretch if dataset.has_masks(segments) else fit
        scaled = self._is_table and getattr(dataset, "standardise", False)
        self.standardised: dict[str, tuple[float, float]] = (
            dict(data.get("standardised", {})) if scaled else {}
        )
        """Of a table's columns the mean and the deviation: first of the features, in their order.
        """
        self._normalise: Normalise | None = None
        if "channels" in data and not self._is_table and not dataset.passes_as_is:
            mean, std = dataset.mean, dataset.std
            channels = data["channels"]
            self._normalise = Normalise(
                mean, std, channels=channels, device=device, channels_last=False
            )

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        """See the class. Raises ConfigError for what it cannot make a batch of, DataError for a
        damaged picture.
        """
        if self._is_text:
            return self._tokens(samples)
        if self._is_table and isinstance(samples, list | tuple) and not _are_tensors(samples):
            return self._rows(_of_lists(samples))
        if isinstance(samples, list | tuple):
            return torch.cat([self(sample) for sample in samples])
        if self._is_table:
            return self._rows(samples)
        if self._normalise is None:
            return _tensor(samples).to(self._device)
        images = (
            _tensor(samples)
            if isinstance(samples, Tensor | np.ndarray)
            else self.picture(samples)[None]
        )
        images = images.unsqueeze(0) if images.dim() == 3 else images
        if images.dim() != 4 or images.shape[1] != self._data["channels"]:
            channels = self._data["channels"]
            raise ConfigError(
                f"an image of shape {list(images.shape)}: give [{channels}, height, width], or many"
            )
        return self._normalise(images.to(self._device, copy=True))

    def picture(self, given: Any) -> Tensor:
        """A picture's path, or a picture of Pillow's, as uint8 [C, H, W] of the model's size, not
        yet normalised.
        """
        mode = {1: "L", 3: "RGB"}.get(self._data["channels"])
        if mode is None:
            raise ConfigError(
                f"a picture: the model takes {self._data['channels']} channels; give a tensor"
            )
        picture = (
            read_image(str(given), mode) if isinstance(given, str | Path) else in_mode(given, mode)
        )
        height, width = self._data["image_size"]
        pixels = torch.from_numpy(np.array(self._resized(picture, (height, width))))
        return pixels.reshape(height, width, -1).permute(2, 0, 1)

    def _rows(self, given: Any) -> Tensor:
        rows = _tensor(given).double()
        rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
        num_features = self._data["image_size"][1]
        if rows.dim() != 2 or rows.shape[1] != num_features:
            raise ConfigError(
                f"rows of shape {list(rows.shape)}: the model takes {num_features} features; give"
                " [N, F]"
            )
        # Targets, where they are standardised, come after them.
        if scales := list(self.standardised.values())[:num_features]:
            mean, std = torch.tensor(scales, dtype=torch.float64).T
            rows = (rows - mean) / std
        return rows.float().view(-1, 1, 1, num_features).to(self._device)

    def _tokens(self, given: Any) -> Tensor:
        if isinstance(given, str):
            given = torch.tensor([self._dataset.encode(given)])
        if isinstance(given, bytes):
            given = torch.tensor([list(given)])
        return _tensor(given).long().to(self._device)


def _are_tensors(samples: Sequence[Any]) -> bool:
    return any(isinstance(sample, Tensor | np.ndarray) for sample in samples)


def _of_lists(given: Sequence[Any]) -> Tensor:
    """A row of numbers, or rows of them."""
    try:
        return torch.tensor(given, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rows: {error}; give lists of numbers, as many in each") from error


def _tensor(given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given if given.flags.writeable else given.copy())
    raise ConfigError(
        f"a {type(given).__name__}: the model takes tensors; give one, with a batch's dimension"
    )
