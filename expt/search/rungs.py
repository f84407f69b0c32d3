"""Early stopping: after which epochs trials pause, which of them continue, and which never will.

Pure functions. `asha` is asynchronous successive halving by promotion (Li et al. 2020, arXiv
1810.05934, algorithm 2), `median` the rule of Vizier (Golovin et al. 2017).
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence

from expt.config.kinds import every_of
from expt.config.rules import measured_each_time
from expt.config.schema import RunConfig
from expt.config.search import Search as Settings
from expt.errors import ConfigError, warn
from expt.runs.result import COMPLETED, FAILED, PRUNED
from expt.search.trial import Goal, Trial

WORST = math.inf
ENDED = (PRUNED, COMPLETED, FAILED)
MEDIAN_OF = 3
"""Trials that must have completed before `median` holds another one back."""


class Rungs(ABC):
    """The epochs after which trials pause, and the rule by which they continue."""

    def __init__(self, epochs: Sequence[int]) -> None:
        self.epochs = list(epochs)

    def next_stop(self, epochs_done: int) -> int | None:
        """Return the epoch after which a trial pauses next, or None where it runs to its end."""
        return next((epoch for epoch in self.epochs if epoch > epochs_done), None)

    def promotable(self, trials: Sequence[Trial]) -> Trial | None:
        """Return the best pruned trial that may continue from the highest rung that has one."""
        for rung in reversed(self.epochs):
            for cost, trial in self._winners(trials, rung):
                if cost < WORST and self._waits(trial, rung):
                    return trial
        return None

    @abstractmethod
    def hopeless(self, trials: Sequence[Trial], planned: int) -> list[Trial]:
        """Return the pruned trials that can't continue, whatever comes of all others.

        `planned` is the number of further trials.
        """

    @abstractmethod
    def _winners(self, trials: Sequence[Trial], rung: int) -> list[tuple[float, Trial]]:
        """Return those that may continue from a rung, the best first."""

    def _ranked(self, trials: Sequence[Trial], rung: int) -> list[tuple[float, Trial]]:
        """Return the trials that reached a rung with their costs, the best first.

        One that failed counts as the worst of the first rung that it did not reach. One that
        violates a limit is the worst only where it waits, and keeps its places at the rungs before:
        the trials that these could go to may have lost their checkpoints already.
        """
        before = max((epoch for epoch in self.epochs if epoch < rung), default=0)
        found = []
        for trial in trials:
            cost = cost_at(trial, rung)
            if not trial.is_allowed and self._waits(trial, rung):
                cost = WORST
            if cost is not None and not (trial.status == FAILED and trial.epochs < before):
                found.append((cost, trial))
        return sorted(found, key=lambda pair: (pair[0], pair[1].number or 0))

    def _waits(self, trial: Trial, rung: int) -> bool:
        """Return whether it was pruned at this rung."""
        passed = [epoch for epoch in self.epochs if epoch <= trial.epochs]
        return trial.status == PRUNED and passed[-1:] == [rung]


class Halving(Rungs):
    """The rule that at each rung the best continue, one of `reduction`."""

    def __init__(self, epochs: Sequence[int], reduction: int) -> None:
        super().__init__(epochs)
        self._reduction = reduction

    def hopeless(self, trials: Sequence[Trial], planned: int) -> list[Trial]:
        """Return those not among the best even if all that can still come there are worse."""
        found, to_come = list[Trial](), planned
        running = [trial for trial in trials if trial.status not in ENDED]
        for rung in self.epochs:
            ranked = self._ranked(trials, rung)
            under_way = sum(self.next_stop(trial.epochs) == rung for trial in running)
            places = (len(ranked) + to_come + under_way) // self._reduction
            left = 0
            for rank, (cost, trial) in enumerate(ranked):
                if self._waits(trial, rung):
                    if rank >= places or cost == WORST:
                        found.append(trial)
                    else:
                        left += 1
            to_come += under_way + left  # all of these may reach the next rung
        return found

    def _winners(self, trials: Sequence[Trial], rung: int) -> list[tuple[float, Trial]]:
        ranked = self._ranked(trials, rung)
        return ranked[: len(ranked) // self._reduction]


class Median(Rungs):
    """The rule that a trial continues while it is no worse than the median of completed ones."""

    def hopeless(self, trials: Sequence[Trial], planned: int) -> list[Trial]:
        """Return all pruned ones at the end: until then a worse one may move the median."""
        running = any(trial.status not in ENDED for trial in trials)
        if planned or running or self.promotable(trials):
            return []
        return [trial for trial in trials if trial.status == PRUNED]

    def _winners(self, trials: Sequence[Trial], rung: int) -> list[tuple[float, Trial]]:
        completed = [cost_at(trial, rung) for trial in trials if trial.status == COMPLETED]
        costs = [cost for cost in completed if cost is not None]
        bound = statistics.median(costs) if len(costs) >= MEDIAN_OF else WORST
        return [pair for pair in self._ranked(trials, rung) if pair[0] <= bound]


def cost_at(trial: Trial, rung: int) -> float | None:
    """Return a trial's cost after the epoch `rung`, or None if it may still reach it.

    One that completed before keeps its cost; one that failed, or completed and violates
    a limit, is the worst.
    """
    has_ended = trial.status == COMPLETED and bool(trial.costs) and rung >= trial.epochs
    if has_ended and not trial.is_allowed:
        return WORST
    if rung in trial.costs or has_ended:
        cost = trial.costs[min(rung, trial.epochs)]
        return WORST if math.isnan(cost) else cost
    return WORST if trial.status == FAILED else None


def rungs_of(settings: Settings, config: RunConfig, goals: Sequence[Goal]) -> Rungs | None:
    """Return the rungs of a search whose runs are like `config`.

    Raises ConfigError where such runs can't be compared after an epoch, and warns where none can
    continue.
    """
    if settings.rungs is None:
        return None
    key = f"search.rungs={settings.rungs}"
    if len(goals) > 1:
        raise ConfigError(f"{key}: compares runs by one objective; name one, or leave rungs out")
    if config.fork:
        raise ConfigError(f"{key}: can't be used with fork={config.fork}; leave one out")
    if not config.evaluates_epochs:
        raise ConfigError(
            f"{key}: compares runs after whole epochs; leave out eval_every_steps and"
            " eval_every_minutes, or rungs"
        )
    rare = {name for name, every in every_of(config.task).items() if every > 1}
    measured = [tag for tag in measured_each_time(config) if tag.partition("/")[0] not in rare]
    if goals[0].tag not in measured:
        raise ConfigError(
            f"{key}: objective={goals[0].tag} is not measured after each epoch; use one of"
            f" {', '.join(measured)}"
        )
    if settings.min_epochs >= config.epochs:
        raise ConfigError(
            f"search.min_epochs={settings.min_epochs}: no run would pause with"
            f" epochs={config.epochs}; give less, or more epochs"
        )
    if settings.rungs == "asha" and settings.reduction > settings.runs:
        warn(
            f"search.reduction={settings.reduction}: of search.runs={settings.runs} none continues"
            " after the first rung; give less, or more runs"
        )
    if settings.rungs == "median":
        return Median(range(settings.min_epochs, config.epochs, settings.min_epochs))
    return Halving(
        geometric(settings.min_epochs, config.epochs, settings.reduction), settings.reduction
    )


def geometric(first: int, epochs: int, reduction: int) -> list[int]:
    """Return `first` and each `reduction` times the one before, none just before the end."""
    found, rung = [first], first * reduction
    while rung * math.sqrt(reduction) <= epochs:
        found.append(rung)
        rung *= reduction
    return found
