"""What an exported file says of what goes in and what comes out: as metadata, and in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.inference.scales import Scales, scales_of, undoes

if TYPE_CHECKING:
    from expt.config.schema import RunConfig
    from expt.data.kind import DatasetConfig
    from expt.inference.load import TrainedModel

SHOWN = 12
"""Names in a line."""


def metadata(
    run: Path,
    model: TrainedModel,
    config: RunConfig,
    trained_on: Mapping[str, Any],
    epoch: int,
    *,
    preprocess: bool,
) -> dict[str, str]:
    """Each value in JSON."""
    scales, names = scales_of(config.dataset, trained_on), _names(config.dataset, trained_on)
    standardised = {
        "features": {} if preprocess else scales.features,
        "targets": {} if preprocess and undoes(config.task, scales) else scales.targets,
    }
    about: dict[str, Any] = {
        "class_names": model.class_names,
        "feature_names": names.features,
        "target_names": () if model.class_names else names.targets,
        "mean": None if preprocess else config.dataset.mean,
        "std": None if preprocess else config.dataset.std,
        "standardised": {key: value for key, value in standardised.items() if value},
        "preprocess": preprocess,
        "run": run.resolve().name,
        "epoch": epoch,
    }
    return {
        key: json.dumps(value) for key, value in about.items() if value not in (None, (), [], {})
    }


def words(
    config: RunConfig,
    trained_on: Mapping[str, Any],
    class_names: Sequence[str],
    *,
    preprocess: bool,
) -> tuple[str, str]:
    """What the numbers mean that go in, and those that come out; empty where only a person's own
    task knows.
    """
    scales, names = scales_of(config.dataset, trained_on), _names(config.dataset, trained_on)
    inputs = _inputs(config, trained_on, scales, names, preprocess)
    return inputs, _outputs(config.task, scales, names, class_names, preprocess)


class _Names(NamedTuple):
    features: Sequence[str]
    targets: Sequence[str]


def _names(dataset: DatasetConfig, trained_on: Mapping[str, Any]) -> _Names:
    """In the order of the columns; of an older record those that it has."""
    scales = scales_of(dataset, trained_on)
    return _Names(
        trained_on.get("feature_names") or [*scales.features],
        trained_on.get("target_names") or [*scales.targets],
    )


def _inputs(
    config: RunConfig,
    trained_on: Mapping[str, Any],
    scales: Scales,
    names: _Names,
    preprocess: bool,
) -> str:
    if config.dataset.has_rows:
        how = (
            "standardised, see the metadata"
            if scales.features and not preprocess
            else "as in the table"
        )
        return f"rows {how}{_listed(names.features)}"
    normalised = config.dataset.mean or config.dataset.std
    if "channels" not in trained_on or (config.dataset.custom_class and not normalised):
        return ""
    return (
        "pixels in [0,"
        f" 1]{', normalised, see the metadata' if normalised and not preprocess else ''}"
    )


def _outputs(
    task: Any, scales: Scales, names: _Names, class_names: Sequence[str], preprocess: bool
) -> str:
    if task.TARGETS == "numbers":
        units = (
            "in their own units"
            if preprocess or not scales.targets
            else "in standard deviations, see the metadata"
        )
        return f"numbers {units}{_listed(names.targets)}"
    if task.TARGETS == "class":
        return f"logits of the classes{_listed(class_names)}"
    if task.TARGETS == "labels":
        return f"logits of the labels{_listed(names.targets)}"
    if task.TARGETS == "mask":
        return "logits of each pixel's classes"
    return "logits of the next token" if task.TARGETS == "tokens" else ""


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f": {shown}{', ...' if len(names) > SHOWN else ''}" if names else ""
