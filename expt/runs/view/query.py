"""Runs anywhere below a folder, filtered and sorted."""

from __future__ import annotations

import fnmatch
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expt.config.identity import hyperparameters
from expt.errors import ConfigError, did_you_mean
from expt.runs.result import Record, results_below
from expt.runs.view.progress import shown_path

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which runs are asked for, in which order, and what is to become of them."""

    folders: tuple[Path, ...]
    sort: str | None
    reverse: bool
    filters: tuple[str, ...]
    csv: str | None
    plot: Path | None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked but to look at the folder."""
        return not (self.sort or self.reverse or self.filters or self.csv or self.plot)


@dataclass(frozen=True)
class Run:
    """A run's folder, and what result.json says of it."""

    folder: Path
    result: Record

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """All that a run can be chosen or sorted by: columns, settings and metrics."""
        result, metrics = self.result, self.result.get("metrics") or {}
        best = result.get("best")
        return {
            "run": shown_path(self.folder),
            "started": result.get("started"),
            "status": result.get("status"),
            "workers": result.get("world_size"),
            "best": best["value"] if best else metrics.get(f"best/{self.objective}", metrics.get(self.objective)),
            "time": sum(result.get("epoch_s") or [0.0]),
            **hyperparameters(result.get("config") or {}),
            **metrics,
        }

    @property
    def objective(self) -> str:
        """What its best value is a value of."""
        config: Mapping[str, Any] = self.result.get("config") or {}
        objective = self.result.get("objective")
        return str(objective["name"] if objective else config.get("objective", ""))


def runs_below(folder: Path) -> list[Run]:
    """Every run below `folder`. Raises ConfigError where there is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    found = [Run(paths.folder, result) for paths, result in results_below(folder)]
    if not found:
        raise ConfigError(f"{folder}: holds no run; start one with python -m expt")
    return found


def chosen(runs: Sequence[Run], asked: Query) -> list[Run]:
    """The runs that pass every filter, in the order asked for: else newest first."""
    known = {key for run in runs for key in run.values}
    tests = [_test(text, known) for text in asked.filters]
    left = [run for run in runs if all(test(run.values) for test in tests)]
    if not left:
        raise ConfigError(f"none of {len(runs)} runs has {' and '.join(asked.filters)}")
    key = asked.sort or "started"
    _check_key("--sort", key, known)
    objectives = {run.objective for run in left}
    falls = key == "started" or "accuracy" in (key if key != "best" else " ".join(objectives))
    having = [run for run in left if run.values.get(key) not in (None, "") and run.values[key] == run.values[key]]
    mixed = len({isinstance(run.values[key], str) for run in having}) > 1
    having.sort(key=lambda run: str(run.values[key]) if mixed else run.values[key], reverse=falls != asked.reverse)
    return [*having, *(run for run in left if run not in having)]  # without a value, or with nan: last, either way


def _check_key(option: str, key: str, known: set[str]) -> None:
    if key not in known:
        raise ConfigError(f"{option} {key}: no run has such a column, setting or metric.{did_you_mean(key, known)}")


def _test(text: str, known: set[str]) -> Callable[[Mapping[str, Any]], bool]:
    match = re.fullmatch(r"([^=!<>]+)(=|!=|<=|>=|<|>)(.*)", text)
    if match is None:
        raise ConfigError(f"--filter {text}: write KEY=VALUE, with = != < > <= or >=")
    key, how, wanted = match.groups()
    _check_key("--filter", key, known)
    if how in ("=", "!="):
        return lambda values: _equal(values.get(key), wanted) == (how == "=")
    limit = _number(wanted)
    if limit is None:
        raise ConfigError(f"--filter {text}: {wanted!r} is no number")

    def within(values: Mapping[str, Any]) -> bool:
        value = _number(values.get(key))
        return value is not None and _COMPARE[how](value, limit)

    return within


def _equal(value: Any, wanted: str) -> bool:
    number = _number(wanted)
    if number is not None and not isinstance(value, bool) and _number(value) is not None:
        return _number(value) == number
    return fnmatch.fnmatchcase(str(value).lower() if isinstance(value, bool) else str(value), wanted)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
