"""What the points of a history count as for a sampler that learns from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from expt.runs.result import COMPLETED, FAILED
from expt.search.goals import Goal, costs_of
from expt.search.history import Point


class Rated(NamedTuple):
    """A point, and what it has come to."""

    point: Point
    costs: list[float] | None
    """Of each goal, lower is better; None where it runs, and has come to no rung."""
    is_of_rung: bool = False
    """Whether it has come to that at a rung, and to no end yet."""
    is_bad: bool = False
    """Whether nobody wants it: it has diverged, say. Its costs are the worst of the others'."""


def rated(points: Sequence[Point], goals: Sequence[Goal]) -> Iterator[Rated]:
    """Each point; left out are failures of the code or the machine, and runs of others that have
    come to nothing yet.

    A bad one, and one whose last rung's value is no number, counts as the worst of all that have
    been measured, also at a rung: with rungs only the best complete, and the worst of these is a
    good one."""
    at_rungs = {
        id(point): cost for point in points if (cost := _cost_at_rung(point, goals)) is not None
    }
    measured = [costs_of(goals, point.objectives) for point in points if point.is_measured]
    measured += [[cost] for cost in at_rungs.values() if math.isfinite(cost)]
    worst = [max(costs) for costs in zip(*measured, strict=True)]
    for point in points:
        cost = at_rungs.get(id(point))
        if point.is_measured:
            yield Rated(point, costs_of(goals, point.objectives))
        elif point.is_bad or point.is_refused or (cost is not None and not math.isfinite(cost)):
            if worst:
                yield Rated(point, worst, is_bad=True)
        elif cost is not None:
            yield Rated(point, [cost], is_of_rung=True)
        elif point.status != FAILED and not _is_of_others(point):
            yield Rated(point, None)


def _cost_at_rung(point: Point, goals: Sequence[Goal]) -> float | None:
    """That of the last rung that one has come to which waits there, or trains on: it is the same
    point as before.
    """
    if point.status in (COMPLETED, FAILED) or not point.rung_values or len(goals) > 1:
        return None
    return goals[0].cost(point.rung_values[max(point.rung_values)])


def _is_of_others(point: Point) -> bool:
    """Whether it is nobody's who is at work here: a run of a warm start, or one typed by hand."""
    return point.number is None
