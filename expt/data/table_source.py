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
    """The rows, of which a part drawn alike for all runs is the test set; standardised by those that are trained on.

    Raises ConfigError and DataError, see table.load.
    """
    rows = table.load(dataset, task)
    train, test = (index.numpy() for index in indexing.split(len(rows.features), dataset.test_fraction, None))
    return of_rows(dataset, rows, {"train": train, "test": test}, device)


def of_rows(
    dataset: table.TableConfig | HuggingFace, rows: table.Rows, parts: Mapping[str, np.ndarray], device: torch.device
) -> Source:
    """The rows at the indices of each of the parts `train`, and `val` and `test` if there are such."""
    train = parts["train"]
    classes = torch.from_numpy(rows.targets[train]) if rows.class_names else torch.zeros(len(train))

    def part(rows: table.Rows, index: np.ndarray) -> Part:
        samples = mapped(lambda tensor: place(tensor, device), _tensors(rows, index))
        return Part(len(index), functools.partial(InMemorySampleLoader, samples))

    def source(rows: table.Rows, **more: Any) -> Source:
        example = mapped(lambda tensor: torch.zeros_like(tensor[0]), _tensors(rows, train[:1]))
        each = {name: part(rows, index) for name, index in parts.items() if len(index)}
        more |= {"val": each.get("val"), "targets_of": torch.from_numpy(rows.targets[train]).__getitem__}
        return Source(_shapes(rows), rows.class_names, example, each["train"], each.get("test"), classes, **more)

    def fitted(chosen: Tensor) -> Source:
        standardised, scales = table.standardised(dataset, rows, train[chosen.numpy()])
        return _source(standardised, train, test, device, standardised=scales)

    return _source(rows, train, test, device, fitted=fitted)


def rows_as_in(trained_on: Mapping[str, Any], dataset: table.TableConfig, task: Any, device: torch.device) -> Source:
    """The rows as those were given to a run whose record says `trained_on` of its data: its columns, its scales.

    Raises ConfigError where a column is missing, ConfigError and DataError as table.load.
    """
    rows, train, test = _read(dataset, task)
    rows = table.in_order_of(trained_on, rows, dataset)
    return _source(table.scaled(trained_on.get("standardised", {}), rows), train, test, device)


def _read(dataset: table.TableConfig, task: Any) -> tuple[table.Rows, np.ndarray, np.ndarray]:
    """All rows, and the places of those for training and for the test."""
    rows = table.load(dataset, task)
    train, test = indexing.split(len(rows.features), dataset.test_fraction, None)
    return rows, train.numpy(), test.numpy()


def _source(rows: table.Rows, train: np.ndarray, test: np.ndarray, device: torch.device, **more: Any) -> Source:
    def part(index: np.ndarray) -> Part:
        samples = mapped(lambda tensor: place(tensor, device), _tensors(rows, index))
        return Part(len(index), functools.partial(InMemorySampleLoader, samples))

    example = mapped(lambda tensor: torch.zeros_like(tensor[0]), _tensors(rows, train[:1]))
    classes = torch.from_numpy(rows.targets[train]) if rows.class_names else torch.zeros(len(train))
    more |= {"feature_names": rows.feature_names, "target_names": rows.target_names}
    to_test = part(test) if len(test) else None
    return Source(_shapes(rows), rows.class_names, example, part(train), to_test, classes, **more)


def _shapes(rows: table.Rows) -> Mapping[str, Any]:
    """As an image of one row and one channel, so that a model of images may flatten it."""
    outputs = len(rows.class_names or rows.target_names)
    return {"channels": 1, "image_size": (1, rows.features.shape[1]), "num_classes": outputs}


def _tensors(rows: table.Rows, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Features float32 [N, F] and targets float32 [N, T], or classes int64 [N]."""
    targets = torch.from_numpy(rows.targets[index])
    return torch.from_numpy(rows.features[index]).float(), targets if rows.class_names else targets.float()
