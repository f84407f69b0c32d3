"""What is known of the points of a space: read from run folders, whoever made the runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expt.errors import ConfigError, Diverged, OutOfMemory
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths
from expt.runs.result import (
    COMPLETED,
    DAMAGED,
    FAILED,
    INTERRUPTED,
    PAUSED,
    Record,
    result_of_any,
    whole_epochs,
)
from expt.runs.spending import device_s
from expt.runs.view.query import settings_of
from expt.search.goals import Goal, Limit, costs_of
from expt.search.space import Space, Values

BAD = (Diverged.__name__, OutOfMemory.__name__)
"""Failures that say something of the point, and not of the code or the machine."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run as the search sees it."""

    values: Values
    status: str
    """As in result.json; that of one which has paused on its way to a rung is INTERRUPTED: it waits
    at none.
    """
    number: int | None = None
    """Its place in this search; None for a run of a warm start, or one typed by hand."""
    objectives: tuple[float | None, ...] = ()
    """One for each goal; None where it was not measured."""
    violations: Mapping[str, float] = field(default_factory=dict)
    """Of each limit how far it was exceeded; zero or less is within."""
    rung_values: Mapping[int, float] = field(default_factory=dict)
    """The first goal after each epoch that the run has trained itself: a fork has its parent's
    before.
    """
    replaces: int | None = None
    """Of population based training: the number of the point whose place it has taken."""
    parent: int | None = None
    """The number of the point that it is a fork of."""
    began_at: int = 0
    """Of a fork: the epochs that the other run had done."""
    kind_of_error: str = ""
    is_past_rungs: bool = False
    """Whether it has completed, and has lost what it measured on the way: it has passed all rungs.
    """
    is_of_others: bool = False
    """Whether what is not searched is another than in this search: it may inform the sampler, and
    no more.
    """
    device_s: float = 0.0
    folder: Path | None = None

    @property
    def is_measured(self) -> bool:
        """Whether it has completed, and all goals are numbers."""
        return self.status == COMPLETED and _are_numbers(self.objectives)

    @property
    def is_bad(self) -> bool:
        """Whether it has shown that nobody wants it: by diverging, or for want of memory."""
        return (self.status == FAILED and self.kind_of_error in BAD) or (
            self.status == COMPLETED and not self.is_measured
        )

    @property
    def is_refused(self) -> bool:
        """Whether its settings do not go together."""
        return self.status == FAILED and self.kind_of_error == ConfigError.__name__

    @property
    def is_allowed(self) -> bool:
        """Whether it keeps all limits."""
        return all(value <= 0 for value in self.violations.values())


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes points of runs."""

    space: Space
    goals: Sequence[Goal]
    limits: Sequence[Limit] = ()
    with_rungs: bool = False
    """Whether to read the values after each epoch of all runs, and not of those alone that have
    paused.
    """
    differences: Callable[[Values, Record], Sequence[str]] = lambda *_: ()
    """In what, beside the space, a run is none of this search; see expt.command.search_settings."""

    def point(self, paths: RunPaths, record: Record | None = None) -> Point | None:
        """The point that a run is; None where it says nothing of itself, or lies outside of the
        space.
        """
        record = result_of_any(paths) if record is None else record
        if not record or record["status"] == DAMAGED:
            return None
        values = self.space.read(_settings(record))
        if values is None:
            return None
        kind, began_at = (
            record.get("error_kind", ""),
            record["forked_from"]["epoch"] if "forked_from" in record else 0,
        )
        return Point(
            values=values,
            status=INTERRUPTED if self.with_rungs and _is_under_way(record) else record["status"],
            number=record.get("search", {}).get("number"),
            objectives=tuple(goal.value(record, paths) for goal in self.goals),
            violations={
                limit.text: limit.violation(
                    record, paths, had_no_memory=kind == OutOfMemory.__name__
                )
                for limit in self.limits
            },
            rung_values=(
                self._rungs(paths, began_at)
                if self.with_rungs or record["status"] == PAUSED
                else {}
            ),
            replaces=record.get("search", {}).get("replaces"),
            parent=record.get("search", {}).get("parent"),
            began_at=began_at,
            kind_of_error=kind,
            device_s=device_s(record),
            folder=paths.folder,
        )

    def _rungs(self, paths: RunPaths, began_at: int) -> dict[int, float]:
        tag, points = self.goals[0].tag, MetricsReader(paths).read()
        return {
            point.epoch: point.value
            for point in points
            if point.tag == tag and point.epoch > began_at
        }


def _is_under_way(record: Record) -> bool:
    """Whether a run of a search has paused on its way to a rung, or to its end, as a person had
    told it to.
    """
    until = record.get("until_epoch", math.inf)
    return record["status"] == PAUSED and "search" in record and whole_epochs(record) < until


def _are_numbers(values: Sequence[float | None]) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)


def in_order(points: Iterable[Point]) -> list[Point]:
    """By their numbers, those without first."""
    return sorted(points, key=lambda point: -1 if point.number is None else point.number)


def _chosen(point: Point) -> tuple[int, int]:
    """As expt.runs.ranking.place."""
    return (0, 0) if point.number is None else (1, point.number)


def best(points: Sequence[Point], goals: Sequence[Goal]) -> Point | None:
    """The best by the first goal, of equal ones by the next, of those that keep all limits; of
    alike ones the first.

    One that has paused counts by what it has come to.
    """
    reached = [
        point
        for point in points
        if point.status in (COMPLETED, PAUSED) and _are_numbers(point.objectives)
    ]
    measured = [point for point in reached if point.is_allowed]
    return min(
        measured,
        key=lambda point: (costs_of(goals, point.objectives), _chosen(point)),
        default=None,
    )


def _settings(record: Record) -> Callable[[str], Any]:
    """The value of a key in a run, as it was typed, or as its configuration has it."""
    typed: Mapping[str, Any] = record.get("overrides", {})

    @functools.cache
    def known() -> dict[str, Any]:
        return settings_of(record, lists_as_text=False)

    def setting(key: str) -> Any:
        if key in typed:
            return typed[key]
        return known()[key] if key in known() else _in(record.get("config") or {}, key)

    return setting


def _in(config: Mapping[str, Any], key: str) -> Any:
    """What has no value of its own there: a mapping, maybe an argument of an own class; None where
    there is nothing.
    """
    group, *below = key.split(".")
    for parts in ([group, *below], [group, "kwargs", *below]):
        found: Any = config
        for part in parts:
            found = found.get(part) if isinstance(found, dict) else None
        if found is not None:
            return found
    return None
