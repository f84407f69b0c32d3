"""The trials of a search, read from run folders, whoever started the runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expt.errors import ConfigError, Diverged, OutOfMemory
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, DAMAGED, FAILED, PAUSED, Record, result_of_any
from expt.runs.sweep import results_of_sweep
from expt.runs.view.query import settings_of
from expt.search.goals import Goal, Limit, costs_of
from expt.search.space import Space, Values

BAD = (Diverged.__name__, OutOfMemory.__name__)
"""Errors that say something of the trial, rather than of the code or the machine."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run as the search sees it."""

    values: Values
    status: str
    """As in result.json."""
    number: int | None = None
    """Its number in this search, or None for a run that this search did not choose."""
    objectives: tuple[float | None, ...] = ()
    """The value of each goal; None where it was not measured."""
    violations: Mapping[str, float] = field(default_factory=dict)
    """By how much it violates each limit; 0 or less is within."""
    costs: Mapping[int, float] = field(default_factory=dict)
    """The first goal after each epoch, where lower is better."""
    error_kind: str = ""
    folder: Path | None = None

    @property
    def epochs(self) -> int:
        """How many epochs it was trained and evaluated."""
        return max(self.costs, default=0)

    @property
    def has_values(self) -> bool:
        """Whether all goals are finite numbers."""
        return all(value is not None and math.isfinite(value) for value in self.objectives)

    @property
    def is_bad(self) -> bool:
        """Whether it diverged, ran out of memory or measured no number."""
        if self.status == FAILED:
            return self.error_kind in BAD
        return self.status == COMPLETED and not self.has_values

    @property
    def is_allowed(self) -> bool:
        """Whether it keeps all limits."""
        return all(value <= 0 for value in self.violations.values())


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes trials of run folders."""

    space: Space
    goals: Sequence[Goal]
    limits: Sequence[Limit] = ()
    differences: Callable[[Values, Record], Sequence[str]] = lambda *_: ()
    """Return the settings, apart from the space, in which a run differs from this search's."""

    def trial(self, paths: RunPaths, record: Record | None = None) -> Trial | None:
        """Return the trial of a run, or None where it has no record or is outside the space."""
        record = result_of_any(paths) if record is None else record
        if not record or record["status"] == DAMAGED:
            return None
        values = self.space.read(_settings(record))
        if values is None:
            return None
        kind = record.get("error_kind", "")
        no_memory = kind == OutOfMemory.__name__
        return Trial(
            values=values,
            status=record["status"],
            number=record.get("search", {}).get("number"),
            objectives=tuple(goal.value(record, paths) for goal in self.goals),
            violations={
                limit.text: limit.violation(record, paths, out_of_memory=no_memory)
                for limit in self.limits
            },
            costs={
                point.epoch: self.goals[0].cost(point.value)
                for point in MetricsReader(paths).read()
                if point.tag == self.goals[0].tag
            },
            error_kind=kind,
            folder=paths.folder,
        )

    def own(self, folder: Path) -> tuple[list[Trial], dict[str, Sequence[str]]]:
        """Return the trials of this search in its folder, and the names of the other runs there.

        With each of the others come the settings in which it differs; none if it is outside the
        space. Of several runs of one number the first that has settings counts.
        """
        trials, others = list[Trial](), dict[str, Sequence[str]]()
        numbers = set[int | None]()
        runs = sorted(results_of_sweep(folder), key=lambda run: "identity" not in run[1])
        for paths, record in runs:
            if record["status"] == DAMAGED:
                continue
            trial = self.trial(paths, record)
            differing = self.differences(trial.values, record) if trial else ()
            if trial is None or differing:
                others[paths.folder.name] = differing
            elif trial.number is None or trial.number not in numbers:
                trials.append(trial)
                numbers.add(trial.number)
        return trials, others

    def of_another(self, source: Path) -> list[Trial]:
        """Return the runs of another sweep that lie in the space, for a warm start."""
        key = f"search.warm_start={source}"
        if not source.is_dir():
            raise ConfigError(f"{key}: there is no such folder; give that of a sweep")
        found = [self.trial(paths, record) for paths, record in results_of_sweep(source)]
        trials = [replace(trial, number=None) for trial in found if trial is not None]
        if not trials:
            raise ConfigError(f"{key}: has no run in this space")
        return trials


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """Sort by number, after those without one."""
    return sorted(trials, key=lambda trial: -1 if trial.number is None else trial.number)


def best(trials: Sequence[Trial], goals: Sequence[Goal]) -> Trial | None:
    """Return the best completed or paused trial that keeps all limits, the first of equal ones."""
    reached = [
        trial
        for trial in in_order(trials)
        if trial.status in (COMPLETED, PAUSED) and trial.has_values and trial.is_allowed
    ]
    return min(reached, key=lambda trial: costs_of(goals, trial.objectives), default=None)


def _settings(record: Record) -> Callable[[str], Any]:
    """Return a lookup of a run's settings: as typed, else as its configuration has them."""
    typed: Mapping[str, Any] = record.get("overrides", {})
    known = functools.cache(lambda: settings_of(record, lists_as_text=False))
    return lambda key: typed[key] if key in typed else known().get(key)
