"""Runs by what they have come to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from expt.config.tasks import metrics_of
from expt.runs import tags
from expt.runs.result import Record, objective_of

T = TypeVar("T")


def by_objective(runs: Iterable[tuple[T, Record]]) -> list[T]:
    """Of runs of one objective those that have measured it, best first; of equal ones the first of
    a search.
    """
    measured = [(run, record) for run, record in runs if math.isfinite(objective_of(record))]
    highest = bool(measured) and _highest_is_best(measured[0][1])
    measured.sort(key=lambda pair: place(pair[1]))
    measured.sort(key=lambda pair: objective_of(pair[1]), reverse=highest)
    return [run for run, _ in measured]


def place(record: Record) -> tuple[int, int]:
    """When a run's point was chosen: those typed by hand come first, as they stand."""
    return (1, record["search"]["number"]) if "search" in record else (0, 0)


def _highest_is_best(record: Record) -> bool:
    metrics = metrics_of((record.get("config") or {}).get("task"))
    return tags.is_higher_better(record["objective"]["name"], metrics)
