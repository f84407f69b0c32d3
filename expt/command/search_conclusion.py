"""What a search has come to: its best point, or of several goals those that no other beats in all
of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from expt.runs.paths import SWEEP_RECORD, RunPaths
from expt.runs.result import COMPLETED, FAILED, PAUSED, FoundRecord
from expt.runs.sweep import place
from expt.runs.view.text import cells, say
from expt.search.goals import Goal, Limit, costs_of, goals_for, limits_for
from expt.search.history import BAD

NAMED = 3
"""Runs that exceed a limit, and are named."""
NOT_COUNTED = "runs_not_counted"
"""In a sweep's record: the names of runs in its folder that are none of the points of its search.
"""


class SearchRecord(NamedTuple):
    """What a sweep's folder says of the search that was made there."""

    goals: list[Goal]
    limits: list[Limit]
    others: frozenset[str] = frozenset()
    """The names of runs that are none of its points."""

    def allowed(self, run: FoundRecord) -> bool:
        """Whether the run has completed, or paused, and has measured all goals and kept all limits."""
        return (
            run["status"] in (COMPLETED, PAUSED)
            and all(value is not None and math.isfinite(value) for value in self.values(run))
            and not self.breaks_limits(run)
        )

    def breaks_limits(self, run: FoundRecord) -> bool:
        """Whether it has measured something that exceeds a limit."""
        return not all(limit.violation(run, RunPaths(run["folder"])) <= 0 for limit in self.limits)

    def best(self, runs: Sequence[FoundRecord]) -> FoundRecord | None:
        """By the first goal, of equal ones by the next, of those that are allowed; of alike ones
        the first point.
        """
        return min((run for run in runs if self.allowed(run)), key=self._rank, default=None)

    def front(self, runs: Sequence[FoundRecord]) -> list[FoundRecord]:
        """The Pareto front: those of which no other is as good by all goals, and better by one; by
        the first goal.
        """
        reached = {id(run): self._costs(run) for run in runs if self.allowed(run)}
        found = [
            run
            for run in runs
            if id(run) in reached
            and not any(_beats(other, reached[id(run)]) for other in reached.values())
        ]
        return sorted(found, key=lambda run: (reached[id(run)], place(run)))

    def values(self, run: FoundRecord) -> list[float | None]:
        """What it has come to, of each goal."""
        return [goal.value(run, RunPaths(run["folder"])) for goal in self.goals]

    def _costs(self, run: FoundRecord) -> list[float]:
        return costs_of(self.goals, self.values(run))

    def _rank(self, run: FoundRecord) -> tuple[list[float], tuple[int, int]]:
        return self._costs(run), place(run)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def search_in(folder: Path, runs: Sequence[FoundRecord]) -> SearchRecord | None:
    """The search of a sweep's folder, by its own record; None where it was none, or nothing was
    measured.
    """
    record, others = _record(folder), frozenset[str]()
    if record:
        others = frozenset(map(str, record.get(NOT_COUNTED) or ()))
        runs = [run for run in runs if run["folder"].name not in others]
    task: Any = next(
        ((run.get("config") or {}).get("task") for run in runs if run.get("objective")), None
    )
    objective = next((run["objective"]["name"] for run in runs if run.get("objective")), None)
    if objective is None or not any("search" in run for run in runs):
        return None
    try:
        several, constraints = (
            record["objective"],
            (record.get("search") or {}).get("constraints") or (),
        )
    except (KeyError, AttributeError):
        several, constraints = objective, ()
    tags = several if isinstance(several, list) and several else [objective]
    return SearchRecord(
        goals_for(tags, task),
        limits_for([constraints] if isinstance(constraints, str) else constraints),
        others,
    )


def _record(folder: Path) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    try:
        found = yaml.load(
            (folder / SWEEP_RECORD).read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def bad_points(runs: Sequence[FoundRecord]) -> list[FoundRecord]:
    """Runs of a search whose failure says that their points are bad; none where no run has come to
    anything.
    """
    if not any("search" in run for run in runs) or not any(
        run["status"] in (COMPLETED, PAUSED) for run in runs
    ):
        return []
    of_search = [run for run in runs if "search" in run]
    return [run for run in of_search if run["status"] == FAILED and run.get("error_kind") in BAD]


def conclude_search(
    console: Console, folder: Path, runs: Sequence[FoundRecord], again: Callable[[FoundRecord], str]
) -> None:
    """Print the best of a search and what to type for it `again`, and of several goals the table.

    Of another sweep it prints nothing.
    """
    found = search_in(folder, runs)
    if found is None:
        return
    runs = [run for run in runs if run["folder"].name not in found.others]
    if found.limits:
        kept = sum(map(found.allowed, runs))
        within = " and ".join(limit.text for limit in found.limits)
        others = _named([run for run in runs if found.breaks_limits(run)])
        say(console, f"limits       {kept} of {len(runs)} runs keep {within}{others}")
    if len(found.goals) > 1:
        front = found.front(runs)
        say(
            console,
            f"Pareto       {len(front)} of {len(runs)} runs, which no other beats in all goals",
            "bold",
        )
        if front:
            console.print(_table(front, found))
    best = found.best(runs)
    if best is None:
        say(
            console,
            "best         none: no run has completed, measured all goals and kept all limits",
        )
        return
    say(
        console,
        f"best         {best['folder'].name}  {found.goals[0].tag} {found.values(best)[0]:.4f}",
        "bold green",
    )
    say(console, f"      alone: {again(best)}")


def _named(broken: Sequence[FoundRecord]) -> str:
    """The first of those that exceed a limit."""
    names = [run["folder"].name for run in broken[:NAMED]] + ["..."] * (len(broken) > NAMED)
    return f"; not {', '.join(names)}" if names else ""


def _table(front: Sequence[FoundRecord], found: SearchRecord) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    for goal in found.goals:
        table.add_column(cells(goal.tag)[0], justify="right", no_wrap=True)
    for run in front:
        table.add_row(*cells(run["folder"].name, *(f"{value:.6g}" for value in found.values(run))))
    return table
