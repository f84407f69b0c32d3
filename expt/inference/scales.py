"""What a run's columns were standardised by, and what undoes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expt.data.kind import DatasetConfig

Columns = Mapping[str, tuple[float, float]]
"""By name the mean and the deviation."""


class Scales(NamedTuple):
    """Empty where that is as it lies in the data."""

    features: Columns
    targets: Columns


def scales_of(dataset: DatasetConfig, trained_on: Mapping[str, Any]) -> Scales:
    """Of the run whose record says `trained_on` of its data: first come the features, in their
    order.
    """
    known: list[tuple[str, tuple[float, float]]] = list(trained_on.get("standardised", {}).items())
    rows = dataset.has_rows and getattr(dataset, "standardise", False)
    number = trained_on["image_size"][1] if rows else 0
    return Scales(dict(known[:number]), dict(known[number:]))


class Undone(nn.Module):
    """A model whose numbers come out in the targets' own units, float64: float32 would lose those
    far from 0.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: nn.Module, scales: Iterable[tuple[float, float]]) -> None:
        super().__init__()
        self.model = model
        mean, deviation = torch.tensor([*scales], dtype=torch.float64).T
        self.register_buffer("mean", mean.clone())
        self.register_buffer("deviation", deviation.clone())

    def forward(self, samples: Tensor) -> Tensor:
        """Of the shape that the model gives."""
        output: Tensor = self.model(samples)
        columns = output.double().reshape(output.shape[0], -1)
        return (columns * self.deviation + self.mean).reshape(output.shape)

    def standardised(self, output: Tensor) -> Tensor:
        """What the model gave, of what came out."""
        return ((output.reshape(len(output), -1) - self.mean) / self.deviation).reshape(
            output.shape
        )


def undoes(task: Any, scales: Scales) -> bool:
    """Whether a person is told of the targets in their own units, as `expt predict` does."""
    return task.TARGETS == "numbers" and bool(scales.targets)
