"""A table's rows as tensors in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expt.config.datasets import HuggingFace
from expt.data import indexing, table
from expt.data.memory import InMemorySampleLoader, place
from expt.data.source import Part, Source
from expt.data.tree import mapped


def rows_in_memory(dataset: table.TableConfig, task: Any, device: torch.device) -> Source:
    """The rows, of which a part drawn alike for all runs is the test set; standardised by those
    that are trained on.

    Raises ConfigError and DataError, see table.load.
    """
    return of_rows(dataset, *_read(dataset, task), device)


def rows_as_in(
    trained_on: Mapping[str, Any], dataset: table.TableConfig, task: Any, device: torch.device
) -> Source:
    """The rows as those were given to a run whose record says `trained_on` of its data: its
    columns, its scales.

    Raises ConfigError where a column is missing, ConfigError and DataError as table.load.
    """
    return of_rows(dataset, *_read(dataset, task, learns=False), device, trained_on)


def of_rows(
    dataset: table.TableConfig | HuggingFace,
    rows: table.Rows,
    parts: Mapping[str, np.ndarray],
    device: torch.device,
    trained_on: Mapping[str, Any] | None = None,
) -> Source:
    """The rows at the indices of each of the parts `train`, and `val` and `test` if there are such.

    Standardised by those that are trained on, or as those that a record says `trained_on` of.
    """
    if trained_on is not None:
        rows = table.in_order_of(trained_on, rows, dataset)
        return _source(table.scaled(trained_on.get("standardised", {}), rows), parts, device)

    def fitted(chosen: Tensor) -> Source:
        standardised, scales = table.standardised(dataset, rows, parts["train"][chosen.numpy()])
        return _source(standardised, parts, device, standardised=scales)

    return _source(rows, parts, device, fitted=fitted)


def _read(
    dataset: table.TableConfig, task: Any, *, learns: bool = True
) -> tuple[table.Rows, dict[str, np.ndarray]]:
    """All rows, and the places of those for training and for the test."""
    rows = table.load(dataset, task, learns=learns)
    train, test = indexing.split(len(rows.features), dataset.test_fraction, None)
    return rows, {"train": train.numpy(), "test": test.numpy()}


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
    """As an image of one row and one channel, so that a model of images may flatten it."""
    outputs = len(rows.class_names or rows.target_names)
    return {"channels": 1, "image_size": (1, rows.features.shape[1]), "num_classes": outputs}


def _tensors(rows: table.Rows, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Features float32 [N, F] and targets float32 [N, T], or classes int64 [N]."""
    targets = torch.from_numpy(rows.targets[index])
    return torch.from_numpy(rows.features[index]).float(), (
        targets if rows.class_names else targets.float()
    )
