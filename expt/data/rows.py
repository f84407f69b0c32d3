"""A table's rows as tensors in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from expt.data import indexing
from expt.data.memory import InMemorySampleLoader, place
from expt.data.source import Part, Source
from expt.data.tree import mapped
from expt.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from expt.data.kinds.table import Rows


def drawn_parts(number: int, test_fraction: float) -> dict[str, np.ndarray]:
    """Return the places of the rows for training and for the test, drawn alike for all runs."""
    train, test = indexing.split(number, test_fraction, None)
    return {"train": train.numpy(), "test": test.numpy()}


def of_rows(
    dataset: Any,
    rows: Rows,
    parts: Mapping[str, np.ndarray],
    device: torch.device,
    trained_on: Mapping[str, Any] | None = None,
) -> Source:
    """Return the rows at the indices of the parts `train`, and `val` and `test` if there are such.

    They are standardised by those that are trained on, or as a record says of `trained_on`.
    """
    if trained_on is not None:
        return _source(as_trained_on(trained_on, rows), parts, device)
    how = dataset.standardise, dataset.standardise_targets

    def fitted(chosen: Tensor) -> Source:
        scaled, scales = standardised(how, rows, parts["train"][chosen.numpy()])
        return _source(scaled, parts, device, standardised=scales)

    return _source(rows, parts, device, fitted=fitted)


def _source(
    rows: Rows, parts: Mapping[str, np.ndarray], device: torch.device, **more: Any
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


def _shapes(rows: Rows) -> Mapping[str, Any]:
    """Return an image of one row and one channel, so that a model of images may flatten it."""
    outputs = len(rows.class_names or rows.target_names)
    return {"channels": 1, "image_size": (1, rows.features.shape[1]), "num_classes": outputs}


def _tensors(rows: Rows, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return features float32 [N, F] and targets float32 [N, T], or classes int64 [N]."""
    targets = torch.from_numpy(rows.targets[index])
    return torch.from_numpy(rows.features[index]).float(), (
        targets if rows.class_names else targets.float()
    )


def standardised(
    standardises: tuple[bool, bool], rows: Rows, training: np.ndarray
) -> tuple[Rows, dict[str, tuple[float, float]]]:
    """Return the rows at mean 0 and deviation 1 over the rows at `training`, and what they had.

    `standardises` says which of features and targets are to be so. A column of one value is only
    shifted.
    """
    found: dict[str, tuple[float, float]] = {}
    if standardises[0]:
        features, scales = _at_unit_scale(rows.features, training)
        rows = rows._replace(features=features)
        found |= dict(zip(rows.feature_names, scales, strict=True))
    if standardises[1] and not rows.class_names:
        targets, scales = _at_unit_scale(rows.targets, training)
        rows = rows._replace(targets=targets)
        found |= dict(zip(rows.target_names, scales, strict=True))
    return rows, found


def _at_unit_scale(
    values: np.ndarray, training: np.ndarray
) -> tuple[np.ndarray, list[tuple[float, float]]]:
    chosen = values[training]
    mean, std = chosen.mean(0), chosen.std(0)
    # A column of one value has no deviation but that of rounding.
    std = np.where(std > 1e-12 * np.abs(chosen).max(0), std, 1.0)
    return (values - mean) / std, list(zip(mean.tolist(), std.tolist(), strict=True))


def as_trained_on(trained_on: Mapping[str, Any], rows: Rows) -> Rows:
    """Return the rows with a run's columns, in its order, names and scales, from its record.

    A single target may have another name. Raise ConfigError where a column is missing.
    """
    targets = trained_on.get("target_names") or rows.target_names
    if len(targets) == len(rows.target_names) == 1:
        rows = rows._replace(target_names=tuple(targets))
    features = trained_on["feature_names"]
    for key, wanted, there in (
        ("features", features, rows.feature_names),
        ("targets", targets, rows.target_names),
    ):
        if missing := [name for name in wanted if name not in there]:
            raise ConfigError(
                f"dataset.{key}: there is no {missing[0]}, which the run was trained with"
                f".{did_you_mean(missing[0], there)}"
            )
    scales = trained_on.get("standardised", {})
    columns = [rows.feature_names.index(name) for name in features]
    rows = rows._replace(
        features=_scaled(scales, features, rows.features[:, columns]), feature_names=tuple(features)
    )
    if rows.class_names:
        return rows
    columns = [rows.target_names.index(name) for name in targets]
    return rows._replace(
        targets=_scaled(scales, targets, rows.targets[:, columns]), target_names=tuple(targets)
    )


def _scaled(
    scales: Mapping[str, Sequence[float]], names: Sequence[str], values: np.ndarray
) -> np.ndarray:
    mean, std = np.array([scales.get(name, (0.0, 1.0)) for name in names]).T
    found: np.ndarray = (values - mean) / std
    return found
