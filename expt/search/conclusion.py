"""The result of a search: its best run, and of several goals the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from expt.errors import BAD_TRIALS, ConfigError, listed, warn
from expt.runs.paths import SWEEP_RECORD, RunPaths
from expt.runs.result import COMPLETED, FAILED, PRUNED, FoundRecord
from expt.runs.sweep import by_objective, place
from expt.runs.view.text import cells, plain_table, say
from expt.search.trial import Goal, Limit, costs_of, goals_for, limits_of, value_of

NAMED = 3
"""Runs that violate a limit, and are named."""


class SearchRecord(NamedTuple):
    """The goals and limits of the search that was made in a sweep's folder."""

    goals: list[Goal]
    limits: list[Limit]

    def allowed(self, run: FoundRecord) -> bool:
        """Return whether the run has ended or was pruned, and has all goals and limits."""
        if run["status"] not in (COMPLETED, PRUNED) or self.breaks_limits(run):
            return False
        return all(value is not None and math.isfinite(value) for value in self.values(run))

    def breaks_limits(self, run: FoundRecord) -> bool:
        """Return whether it has measured something that violates a limit."""
        return any(limit.violation(run, RunPaths(run["folder"])) > 0 for limit in self.limits)

    def best(self, runs: Sequence[FoundRecord]) -> FoundRecord | None:
        """Return the best allowed run by the first goal, of equal ones by the next."""
        allowed = [run for run in runs if self.allowed(run)]
        return min(allowed, key=lambda run: (self._costs(run), place(run)), default=None)

    def front(self, runs: Sequence[FoundRecord]) -> list[FoundRecord]:
        """Return the Pareto front, sorted by the first goal."""
        reached = [(self._costs(run), place(run), run) for run in runs if self.allowed(run)]
        found = [
            each for each in reached if not any(_beats(other[0], each[0]) for other in reached)
        ]
        return [run for _, _, run in sorted(found, key=lambda each: each[:2])]

    def values(self, run: FoundRecord) -> list[float | None]:
        """Return the value of each goal."""
        return [value_of(goal.tag, run, RunPaths(run["folder"])) for goal in self.goals]

    def _costs(self, run: FoundRecord) -> list[float]:
        return costs_of(self.goals, self.values(run))


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def search_in(folder: Path, runs: Sequence[FoundRecord]) -> SearchRecord | None:
    """Return the search of a sweep's folder; None where it was none, or nothing was measured."""
    measured = next((run for run in runs if run.get("objective")), None)
    if measured is None or not any("search" in run for run in runs):
        return None
    task: Any = (measured.get("config") or {}).get("task")
    own, path = [measured["objective"]["name"]], folder / SWEEP_RECORD
    if not path.is_file():  # the sweep's runs were moved
        return SearchRecord(goals_for(own, task), [])
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 20 times as fast
        record = yaml.load(path.read_bytes(), loader)
        tags, constraints = record.get("objective"), (record.get("search") or {}).get("constraints")
        limits = limits_of([constraints] if isinstance(constraints, str) else constraints or [])
        return SearchRecord(goals_for(tags if isinstance(tags, list) else own, task), limits)
    except (AttributeError, ConfigError, TypeError, ValueError, yaml.YAMLError):
        warn(f"{path}: is damaged; the best run is chosen by the runs' own objective")
        return SearchRecord(goals_for(own, task), [])


def best_of(
    folder: Path, runs: Sequence[FoundRecord]
) -> tuple[FoundRecord | None, list[FoundRecord]]:
    """Return the best run of a sweep, and the Pareto front of a search of several goals.

    None where no run has completed, or they were chosen by different metrics.
    """
    if (search := search_in(folder, runs)) is not None:
        return search.best(runs), search.front(runs) if len(search.goals) > 1 else []
    ranked = by_objective((run, run) for run in runs if run["status"] == COMPLETED)
    same = len({run["objective"]["name"] for run in ranked}) == 1
    return ranked[0] if same else None, []


def bad_trials(runs: Sequence[FoundRecord]) -> list[FoundRecord]:
    """Return the trials that failed because of their values, if any other trial did not."""
    if not any("search" in run and run["status"] in (COMPLETED, PRUNED) for run in runs):
        return []
    failed = [run for run in runs if "search" in run and run["status"] == FAILED]
    return [run for run in failed if run.get("error_kind") in BAD_TRIALS]


def conclude_search(
    console: Console, folder: Path, runs: Sequence[FoundRecord], again: Callable[[FoundRecord], str]
) -> None:
    """Print the best run of a search and the command for it, and the Pareto front of several goals.

    Print nothing for another sweep.
    """
    found = search_in(folder, runs)
    if found is None:
        return
    if found.limits:
        kept = sum(map(found.allowed, runs))
        within = " and ".join(limit.text for limit in found.limits)
        broken = [run["folder"].name for run in runs if found.breaks_limits(run)]
        others = f"; not {listed(broken, NAMED)}" if broken else ""
        say(console, f"limits       {kept} of {len(runs)} runs keep {within}{others}")
    if len(found.goals) > 1:
        front = found.front(runs)
        of_all = f"{len(front)} of {len(runs)} runs, which no other beats in all goals"
        say(console, f"Pareto       {of_all}", "bold")
        if front:
            console.print(_table(front, found))
    best = found.best(runs)
    if best is None:
        say(console, "best         none yet: no run has measured all goals and kept all limits")
        return
    tag, value = found.goals[0].tag, found.values(best)[0]
    say(console, f"best         {best['folder'].name}  {tag} {value:.4f}", "bold green")
    say(console, f"      to train it: {again(best)}")


def _table(front: Sequence[FoundRecord], found: SearchRecord) -> Table:
    table = plain_table(("run", *(goal.tag for goal in found.goals)), left=["run"])
    for run in front:
        table.add_row(*cells(run["folder"].name, *(f"{value:.6g}" for value in found.values(run))))
    return table
