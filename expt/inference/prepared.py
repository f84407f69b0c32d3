"""A model with its normalisation before it, in one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from expt.data.kind import DatasetConfig
from expt.errors import ConfigError
from expt.inference.load import TrainedModel


def prepared(
    model: TrainedModel, dataset: DatasetConfig, trained_on: Mapping[str, Any]
) -> nn.Module:
    """A module of pixels in [0, 1], float32 [N, C, H, W], or of a table's rows, float32 [N, F].

    Raises ConfigError for samples that go in as they are.
    """
    if "channels" not in trained_on or dataset.passes_as_is:
        raise ConfigError("--preprocess: the run's samples go in as they are; leave it out")
    if dataset.has_rows:
        number = trained_on["image_size"][1]
        scales = [*model.preprocess.standardised.values()][:number] or [(0.0, 1.0)] * number
        mean, std = torch.tensor(scales, dtype=torch.float64).T
        return _OfRows(model.model, mean, std)
    channels = trained_on["channels"]
    mean, std = dataset.mean, dataset.std
    shape = (1, channels, 1, 1)
    return _OfImages(
        model.model,
        torch.tensor(mean or [0.0] * channels).view(shape),
        torch.tensor(std or [1.0] * channels).view(shape),
    )


class _Normalised(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)


class _OfImages(_Normalised):
    def forward(self, images: Tensor) -> Any:
        return self.model((images - self.mean) / self.std)


class _OfRows(_Normalised):
    def forward(self, rows: Tensor) -> Any:
        return self.model(((rows.double() - self.mean) / self.std).float())
