"""From a row of sums to means: only here are its numbers known, so some of a task's mistakes are
found here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expt.errors import ConfigError
from expt.tasks.task import Task
from expt.tasks.terms import loss_method, measure_method

LOSS = "loss"


@dataclass(frozen=True)
class Averages:
    """What a log point shows."""

    values: Mapping[str, float]
    """The loss, then the task's metrics, by name."""
    samples: int
    """Of all workers."""
    has_weight: bool = True
    """False where nothing of the samples counts, as of a mask that is all to be ignored; the loss
    is nan then.
    """

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.values[LOSS]


def columns_of(task: Task) -> dict[str, slice]:
    """Where a row of sums has each one's values, and its weight behind them: the samples come
    first, then the loss.
    """
    columns, end = dict[str, slice](), 1
    for name, size in {LOSS: 1, **task.sums}.items():
        columns[name] = slice(end, end + size)
        end += size + 1
    return columns


def averages_of(row: Sequence[float], task: Task, *, learns: bool) -> Averages | None:
    """The means, and what the task derives from them, of a row of sums; None where nothing was
    counted.

    Raises ConfigError for weights by which gradients and metrics were not divided, or by which
    nothing can be."""
    samples = row[0]
    if not samples:
        return None
    means, columns = dict[str, Any](), columns_of(task)
    for name, its in columns.items():
        sums, weight = row[its], row[its.stop]
        if not 0 <= weight < math.inf:
            method = loss_method(task, learns=learns) if name == LOSS else measure_method(task)
            if weight < 0 or all(map(math.isfinite, sums)):
                raise ConfigError(
                    f"{method}: the weights of {name} add up to {weight:g}, or one is below 0; let"
                    " each be a finite number that is not"
                )
        found = [value / weight if weight else math.nan for value in sums]
        means[name] = found[0] if len(found) == 1 else found
    weight = row[columns[LOSS].stop]
    if task.weight_is_samples and weight != samples and math.isfinite(weight):
        raise ConfigError(
            f"{loss_method(task, learns=learns)}: its weights add up to {weight:g} for {samples:g}"
            " samples, and weight_is_samples says that they are the samples; leave that out"
        )
    known = {**means, **_derived(task, means)}
    return Averages(
        {name: float(known[name]) for name in (LOSS, *task.metrics)}, int(samples), bool(weight)
    )


def refuse_weightless(averages: Averages, task: Task, epoch: int) -> None:
    """Raise ConfigError where nothing in all of an epoch had a weight: there were no gradients."""
    if not averages.has_weight:
        raise ConfigError(
            f"{loss_method(task)}: its weights add up to 0 in epoch {epoch}, so that nothing was"
            " learned; give samples a weight, or targets that are not all to be ignored"
        )


def _derived(task: Task, means: Mapping[str, Any]) -> Mapping[str, float]:
    found, name_of = task.derive(means), type(task).__name__
    given = {**means, **found} if isinstance(found, Mapping) else {}
    if missing := [name for name in task.metrics if name not in given]:
        raise ConfigError(
            f"{name_of}: task.metrics names {', '.join(missing)}, which neither measure nor derive"
            " gives; add it there"
        )
    return given
