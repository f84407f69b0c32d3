"""Runs anywhere below a folder, filtered and sorted."""

from __future__ import annotations

import fnmatch
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from expt.config.identity import flat, hyperparameters
from expt.config.tasks import metrics_of
from expt.errors import ConfigError, did_you_mean
from expt.runs.result import Record, results_below
from expt.runs.view.progress import shown_path

T = TypeVar("T")

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class ListedRun:
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
            **settings_of(result),
            **metrics,
        }

    @property
    def objective(self) -> str:
        """What its best value is a value of."""
        config: Mapping[str, Any] = self.result.get("config") or {}
        objective = self.result.get("objective")
        return str(objective["name"] if objective else config.get("objective", ""))


def settings_of(record: Record) -> dict[str, Any]:
    """All settings of a run, flat, as they are typed.

    A person's own class has the name by which it was chosen, or else the class's.
    """
    config = flat(record.get("config") or {})
    found: dict[str, Any] = {**hyperparameters(config), **{key: None for key, value in config.items() if value is None}}
    for group in [key for key, value in found.items() if value == "_target_" and f"{key}.target" in found]:
        own = f"{group}.kwargs."
        typed = {key: f"{group}.{key.removeprefix(own)}" for key in found if key.startswith(own)}
        found = {(key if typed.get(key) in found else typed.get(key, key)): value for key, value in found.items()}
        chosen_as = record.get("overrides", {}).get(group)
        found[group] = chosen_as if isinstance(chosen_as, str) else found[f"{group}.target"].rpartition(".")[2]
    return found


def runs_below(folder: Path) -> list[ListedRun]:
    """Every run below `folder`. Raises ConfigError where there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    return [ListedRun(paths.folder, result) for paths, result in results_below(folder)]


def chosen(runs: Sequence[ListedRun], filters: Sequence[str]) -> list[ListedRun]:
    """The runs that pass every filter, as in `model=mlp` and `optimizer.lr<0.1`; ConfigError for a wrong one."""
    tests = [_test(text, runs) for text in filters]
    return [run for run in runs if all(test(run.values) for test in tests)]


def in_order(runs: Sequence[ListedRun], key: str = "started", *, reverse: bool = False) -> list[ListedRun]:
    """The runs by a column, a setting or a metric: newest first, accuracies from the highest, all else rising."""
    down = falls(key if key != "best" else " ".join({run.objective for run in runs}), [run.result for run in runs])
    return ordered(runs, lambda run: run.values.get(key), falling=down != reverse)


def falls(key: str, records: Iterable[Record]) -> bool:
    """Whether the highest value of `key` comes first, as of when a run began, and of a metric that is better so."""
    better = {name: way for task in map(_task, records) for name, way in metrics_of(task).items()}
    return key == "started" or any(better.get(part) == "max" for part in re.split("[/ ]", key))


def _task(record: Record) -> Any:
    return (record.get("config") or {}).get("task")


def best_first(records: Iterable[Record]) -> list[str]:
    """The metrics of some runs, the one that is shown beside the loss first, and the loss last."""
    names = [name for task in map(_task, records) for name in metrics_of(task) if name != "loss"]
    return list(dict.fromkeys([*names, "loss"]))


def ordered(items: Sequence[T], value_of: Callable[[T], Any], *, falling: bool) -> list[T]:
    """The items by their values; those without one, or with nan, come last, either way."""
    having, without = list[tuple[Any, T]](), list[T]()
    for item in items:
        value = value_of(item)
        if value in (None, "") or value != value:
            without.append(item)
        else:
            having.append((value, item))
    mixed = len({isinstance(value, str) for value, _ in having}) > 1
    having.sort(key=lambda pair: str(pair[0]) if mixed else pair[0], reverse=falling)
    return [*(item for _, item in having), *without]


def check_key(key: str, runs: Sequence[ListedRun]) -> None:
    """Raise ConfigError where no run has `key`."""
    known = {key for run in runs for key in run.values}
    if key not in known:
        hint = did_you_mean(key, known) or " `report --csv -` has all of them in its first line."
        raise ConfigError(f"{key}: no run has such a column, setting or metric.{hint}")


def _test(text: str, runs: Sequence[ListedRun]) -> Callable[[Mapping[str, Any]], bool]:
    match = re.fullmatch(r"([^=!<>]+)(==?|!=|<=|>=|<|>)(.*)", text)
    if match is None:
        raise ConfigError(f"{text}: write KEY=VALUE, with = != < > <= or >=")
    key, how, wanted = match.groups()
    check_key(key, runs)
    if how in ("=", "==", "!="):
        return lambda values: _equal(values.get(key), wanted) == (how != "!=")
    limit = _number(wanted)
    if limit is None:
        raise ConfigError(f"{text}: {wanted!r} is no number")

    def within(values: Mapping[str, Any]) -> bool:
        value = _number(values.get(key))
        return value is not None and _COMPARE[how](value, limit)

    return within


def _equal(value: Any, wanted: str) -> bool:
    if value is None:
        return wanted == "None" or fnmatch.fnmatchcase("null", wanted)
    number = _number(wanted)
    if number is not None and not isinstance(value, bool) and _number(value) is not None:
        return _number(value) == number
    return fnmatch.fnmatchcase(str(value).lower() if isinstance(value, bool) else str(value), wanted)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
