"""The result of a search: the runs that keep its limits, the best of them, the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.table import Table

from expt.errors import BAD_TRIALS, ConfigError, listed, warn
from expt.runs.found import FoundRun, by_objective
from expt.runs.paths import SWEEP_RECORD
from expt.runs.result import COMPLETED, FAILED, PRUNED
from expt.runs.view.text import Console, cells, plain_table, say
from expt.search.trial import Goal, Limit, costs_of, goals_for, limits_of

NAMED = 3
"""The largest number of runs that are named for violating a limit."""


class SearchRecord(NamedTuple):
    """The goals and limits of the search that was made in a sweep's folder."""

    goals: list[Goal]
    limits: list[Limit]

    def allowed(self, run: FoundRun) -> bool:
        """Return whether the run has ended or was pruned, and has all goals and limits."""
        if run.status not in (COMPLETED, PRUNED) or self.breaks_limits(run):
            return False
        return all(value is not None and math.isfinite(value) for value in self.values(run))

    def breaks_limits(self, run: FoundRun) -> bool:
        """Return whether it has measured something that violates a limit."""
        return any(limit.violation(run) > 0 for limit in self.limits)

    def best(self, runs: Sequence[FoundRun]) -> FoundRun | None:
        """Return the best allowed run by the first goal, of equal ones by the next."""
        allowed = [run for run in runs if self.allowed(run)]
        return min(allowed, key=lambda run: (self._costs(run), run.number), default=None)

    def front(self, runs: Sequence[FoundRun]) -> list[FoundRun]:
        """Return the Pareto front, sorted by the first goal."""
        reached = [(self._costs(run), run.number, run) for run in runs if self.allowed(run)]
        found = [
            each for each in reached if not any(_beats(other[0], each[0]) for other in reached)
        ]
        return [run for _, _, run in sorted(found, key=lambda each: each[:2])]

    def values(self, run: FoundRun) -> list[float | None]:
        """Return the value of each goal."""
        return [run.value_of(goal.tag) for goal in self.goals]

    def _costs(self, run: FoundRun) -> list[float]:
        return costs_of(self.goals, self.values(run))


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def search_in(folder: Path, runs: Sequence[FoundRun]) -> SearchRecord | None:
    """Return the search of a sweep's folder; None where it was none, or nothing was measured."""
    measured = next((run for run in runs if run.record.get("objective")), None)
    if measured is None or not any("search" in run.record for run in runs):
        return None
    task, own, path = measured.config.get("task"), [measured.objective], folder / SWEEP_RECORD
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


def best_of(folder: Path, runs: Sequence[FoundRun]) -> tuple[FoundRun | None, list[FoundRun]]:
    """Return the best run of a sweep, and the Pareto front of a search of several goals.

    None where no run has completed, or they were chosen by different metrics.
    """
    if (search := search_in(folder, runs)) is not None:
        return search.best(runs), search.front(runs) if len(search.goals) > 1 else []
    ranked = by_objective(run for run in runs if run.status == COMPLETED)
    same = len({run.objective for run in ranked}) == 1
    return ranked[0] if same else None, []


def bad_trials(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return the trials that failed because of their values, if any other trial did not."""
    trials = [run for run in runs if "search" in run.record]
    if not any(run.status in (COMPLETED, PRUNED) for run in trials):
        return []
    failed = [run for run in trials if run.status == FAILED]
    return [run for run in failed if run.record.get("error_kind") in BAD_TRIALS]


def conclude_search(
    console: Console, folder: Path, runs: Sequence[FoundRun], again: Callable[[FoundRun], str]
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
        broken = [run.folder.name for run in runs if found.breaks_limits(run)]
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
    say(console, f"best         {best.folder.name}  {tag} {value:.4f}", "bold green")
    say(console, f"      to train it: {again(best)}")


def _table(front: Sequence[FoundRun], found: SearchRecord) -> Table:
    table = plain_table(("run", *(goal.tag for goal in found.goals)), left=["run"])
    for run in front:
        table.add_row(*cells(run.folder.name, *(f"{value:.6g}" for value in found.values(run))))
    return table
