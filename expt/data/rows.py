"""A table's rows as tensors in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expt.data import indexing
from expt.data.kinds import table
from expt.data.memory import InMemorySampleLoader, place
from expt.data.source import Part, Source
from expt.data.tree import mapped


def drawn_parts(number: int, test_fraction: float) -> dict[str, np.ndarray]:
    """Return the places of the rows for training and for the test, drawn alike for all runs."""
    train, test = indexing.split(number, test_fraction, None)
    return {"train": train.numpy(), "test": test.numpy()}


def of_rows(
    dataset: Any,
    rows: table.Rows,
    parts: Mapping[str, np.ndarray],
    device: torch.device,
    trained_on: Mapping[str, Any] | None = None,
) -> Source:
    """Return the rows at the indices of the parts `train`, and `val` and `test` if there are such.

    They are standardised by those that are trained on, or as a record says of `trained_on`.
    """
    if trained_on is not None:
        return _source(table.as_trained_on(trained_on, rows), parts, device)
    how = dataset.standardise, dataset.standardise_targets

    def fitted(chosen: Tensor) -> Source:
        standardised, scales = table.standardised(how, rows, parts["train"][chosen.numpy()])
        return _source(standardised, parts, device, standardised=scales)

    return _source(rows, parts, device, fitted=fitted)


def _source(
    rows: table.Rows, parts: Mapping[str, np.ndarray], device: torch.device, **more: Any
) -> Source:
    def part(index: np.ndarray) -> Part:
        samples = mapped(lambda tensor: place(tensor, device), _tensors(rows, index))
        return Part(len(index), functools.partial(InMemorySampleLoader, samples))

    train, each = parts["train"], {name: part(index) for name, index in parts.items() if len(index)}
    example = mapped(lambda tensor: torch.zeros_like(tensor[0]), _tensors(rows, train[:1]))
    targets = torch.from_numpy(rows.targets[train])
    classes = targets if rows.class_names else torch.zeros(len(train))
    more |= {"feature_names": rows.feature_names, "target_names": rows.target_names}
    more |= {"val": each.get("val"), "targets_of": targets.__getitem__}
    return Source(
        _shapes(rows), rows.class_names, example, each["train"], each.get("test"), classes, **more
    )


def _shapes(rows: table.Rows) -> Mapping[str, Any]:
    """Return an image of one row and one channel, so that a model of images may flatten it."""
    outputs = len(rows.class_names or rows.target_names)
    return {"channels": 1, "image_size": (1, rows.features.shape[1]), "num_classes": outputs}


def _tensors(rows: table.Rows, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return features float32 [N, F] and targets float32 [N, T], or classes int64 [N]."""
    targets = torch.from_numpy(rows.targets[index])
    return torch.from_numpy(rows.features[index]).float(), (
        targets if rows.class_names else targets.float()
    )
