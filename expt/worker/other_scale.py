"""Whose normalisation a run has that begins with weights which were trained with another one: it is
told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from expt.config.groups import NamedModel
from expt.config.schema import RunConfig
from expt.errors import warn
from expt.models import named
from expt.runs.named_checkpoint import chosen
from expt.runs.paths import RunPaths
from expt.runs.result import read_result

Scale = tuple[list[float], list[float]]
"""Mean and standard deviation of each channel."""


def warn_of_published(config: RunConfig, module: nn.Module) -> None:
    """Of a model by name, with its published weights; not where a run's are loaded over them."""
    if isinstance(config.model, NamedModel) and config.model.pretrained and config.weights is None:
        scale = named.normalisation(config.model, module)
        if scale is not None:
            _warn("model.pretrained=true", scale, "its authors", config.dataset)


def warn_of_runs(
    config: RunConfig, trained_by: Mapping[str, Any], standardised: Mapping[str, Sequence[float]]
) -> None:
    """Of a run that had the settings `trained_by`; `standardised` is what this run does to each
    column of a table.
    """
    then = trained_by.get("dataset") or {}
    word = f"weights={config.weights}"
    if "mean" in then:
        name = f"dataset={then.get('target') or then.get('name')}"
        _warn(word, _scale(then.get), name, config.dataset)
    if standardised and then.get("standardise") and config.weights:
        run = chosen(config.weights).run
        earlier = (
            (read_result(RunPaths(run)).get("data") or {}).get("standardised") if run else None
        )
        if earlier is not None and earlier != json.loads(json.dumps(standardised)):
            warn(
                f"{word}: rows are standardised by those of this run, and not by those that the"
                " weights saw"
            )


def _warn(word: str, before: Scale | None, whose: str, dataset: object) -> None:
    now = _scale(lambda key: getattr(dataset, key, None))
    if before == now:
        return
    mend = ""
    if hasattr(dataset, "mean") and (
        before is None or now is None or len(before[0]) == len(now[0])
    ):
        keys = (
            [f"'{each}'" for each in _settings(before)]
            if before
            else ["dataset.mean=null", "dataset.std=null"]
        )
        mend = f"; for theirs give {' '.join(keys)}"
    warn(
        f"{word}: images are normalised by this run's dataset ({_shown(now)}), and those that the"
        f" weights were trained on by {whose} ({_shown(before)}){mend}"
    )


def _scale(get: Callable[[str], Any]) -> Scale | None:
    mean, std = get("mean"), get("std")
    return (list(mean), list(std)) if mean is not None and std is not None else None


def _shown(scale: Scale | None) -> str:
    return ", ".join(_settings(scale)) if scale else "not at all: pixels are in [0, 1]"


def _settings(scale: Scale) -> list[str]:
    both = zip(("mean", "std"), scale, strict=True)
    return [f"dataset.{key}=[{','.join(f'{value:g}' for value in values)}]" for key, values in both]
