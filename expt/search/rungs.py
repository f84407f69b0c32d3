"""How long a run of a search trains before it pauses, which one goes on, and which never will.

Pure functions.

`asha` is asynchronous successive halving by promotion (Li et al. 2020, arXiv 1810.05934, algorithm
2), `hyperband` several brackets of it side by side, each with a later first rung (Li et al. 2018,
arXiv 1603.06560), and `median` the rule of Vizier (Golovin et al. 2017): a run waits until it is no
worse than the median of those that have completed."""

from __future__ import annotations

import functools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from expt.runs.result import COMPLETED, FAILED, PAUSED

Kind: TypeAlias = Literal["asha", "hyperband", "median"]
BEST, WORST = -math.inf, math.inf
MEDIAN_OF = 3
"""Runs that must have completed before `median` holds another back."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a search, as it is compared with the others."""

    number: int
    status: str
    """As in result.json."""
    costs: Mapping[int, float]
    """After each epoch that was evaluated: the lower the better."""
    is_allowed: bool = True
    """Whether it keeps all limits; one that does not counts as worst where it came to exceed them,
    and no earlier.
    """
    is_past_rungs: bool = False
    """Whether it has completed, and it is not known what it was at each rung: it counts as best
    there.
    """

    @property
    def epochs(self) -> int:
        """How many it has been trained and evaluated."""
        return max(self.costs, default=0)

    def cost_at(self, rung: int) -> float | None:
        """Its cost when it came to the epoch `rung`; None where it has not, and may yet.

        A run that completed before keeps what it had come to; one that failed on the way, or then
        exceeds a limit, is the worst."""
        has_ended = self.status == COMPLETED and bool(self.costs) and rung >= self.epochs
        if has_ended and not self.is_allowed:
            return WORST
        if rung in self.costs:
            cost = self.costs[rung]
            return WORST if math.isnan(cost) else cost
        if self.status == FAILED:
            return WORST
        if self.is_past_rungs:
            return BEST
        return self.cost_at(self.epochs) if has_ended else None


class Rungs(ABC):
    """Where the runs of a search pause, and who goes on from there.

    Trials may come in any order.
    """

    @abstractmethod
    def of(self, number: int) -> Sequence[int]:
        """The epochs after which the run of that number pauses, rising; it may go on to its end
        without any.
        """

    def next_stop(self, number: int, epochs_done: int) -> int | None:
        """The epoch after which the run pauses next; None where it goes to its end."""
        return next((epoch for epoch in self.of(number) if epoch > epochs_done), None)

    @abstractmethod
    def promotable(self, trials: Sequence[Trial]) -> int | None:
        """The number of the paused run that is to go on first; None where none is to."""

    @abstractmethod
    def hopeless(self, trials: Sequence[Trial], planned: Collection[int]) -> list[int]:
        """The paused runs that will never go on in a search of the runs of these numbers, whatever
        others come to.
        """


class Halving(Rungs):
    """At each rung of a bracket the best go on, one of so many."""

    def __init__(
        self, brackets: Sequence[Sequence[int]], weights: Sequence[int], reduction: int
    ) -> None:
        """Of so many runs of each bracket as `weights` say, evenly mixed."""
        self._brackets, self._reduction = brackets, reduction
        self._turns = list(_mixed(weights))

    def of(self, number: int) -> Sequence[int]:
        """Those of its bracket."""
        return self._brackets[self.bracket(number)]

    def bracket(self, number: int) -> int:
        """The index of its bracket."""
        return self._turns[number % len(self._turns)]

    def promotable(self, trials: Sequence[Trial]) -> int | None:
        """From the highest rung that has one, and there the best."""
        found: list[tuple[int, float, int]] = []
        for bracket, rungs in enumerate(self._brackets):
            mine = [trial for trial in trials if self.bracket(trial.number) == bracket]
            found += _astray(mine, rungs)
            for rung in rungs:
                ranked = _ranked(mine, rungs, rung)
                best = ranked[: self._quota(len(ranked))]
                found += [
                    (-rung, cost, one.number)
                    for cost, one in best
                    if _waits(one, rungs, rung) and cost < WORST
                ]
        return min(found)[2] if found else None

    def hopeless(self, trials: Sequence[Trial], planned: Collection[int]) -> list[int]:
        """Who would not be among the best even if all that can still come to its rung were worse."""
        found = list[int]()
        for bracket, rungs in enumerate(self._brackets):
            mine = [trial for trial in trials if self.bracket(trial.number) == bracket]
            known = {trial.number for trial in mine}
            to_come = sum(
                self.bracket(number) == bracket and number not in known for number in planned
            )
            to_come += len(_astray(mine, rungs))
            for rung in rungs:
                ranked = _ranked(mine, rungs, rung)
                under_way = sum(_is_on_its_way(trial, rungs, rung) for trial in mine)
                quota = self._quota(len(ranked) + to_come + under_way)
                left = 0
                for rank, (cost, trial) in enumerate(ranked):
                    if not _waits(trial, rungs, rung):
                        continue
                    if rank >= quota or cost == WORST:
                        found.append(trial.number)
                    else:
                        left += 1
                to_come += under_way + left  # may all come to the next rung
        return sorted(found)

    def _quota(self, count: int) -> int:
        return count // self._reduction


class Median(Rungs):
    """A run goes on while it is no worse than the median of the completed ones was after as many
    epochs.
    """

    def __init__(self, rungs: Sequence[int]) -> None:
        self._rungs = rungs

    def of(self, number: int) -> Sequence[int]:
        """The same for all."""
        return self._rungs

    def promotable(self, trials: Sequence[Trial]) -> int | None:
        """From the highest rung that has one, and there the best."""
        found = _astray(trials, self._rungs)
        waiting = self._waiting(trials)
        found += [
            (-rung, cost, one.number)
            for one, rung, cost in waiting
            if self._may(trials, rung, cost)
        ]
        return min(found)[2] if found else None

    def hopeless(self, trials: Sequence[Trial], planned: Collection[int]) -> list[int]:
        """Who would stay below the median even if all others that can still complete were the
        worst.
        """
        waiting = {one.number: (rung, cost) for one, rung, cost in self._waiting(trials)}
        ended = {trial.number for trial in trials if trial.status in (COMPLETED, FAILED)}
        coming = {number for number in planned if number not in waiting and number not in ended}
        coming |= {
            trial.number
            for trial in trials
            if trial.number not in waiting and trial.number not in ended
        }
        left = {number: each for number, each in waiting.items() if each[1] < WORST}
        grown = True
        while grown:  # who goes on may make the median worse, and so let another go on
            grown = False
            for number, (rung, cost) in sorted(left.items()):
                # Now, as too few have completed, maybe; later the more likely, the more have that
                # were worse.
                if self._may(trials, rung, cost) or self._may(
                    trials, rung, cost, worse=len(coming)
                ):
                    coming.add(number)
                    del left[number]
                    grown = True
        return sorted(number for number in waiting if number not in coming)

    def _waiting(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, int, float]]:
        for trial in trials:
            rung = next((each for each in self._rungs if _waits(trial, self._rungs, each)), None)
            cost = None if rung is None else _cost(trial, self._rungs, rung)
            if rung is not None and cost is not None:
                yield trial, rung, cost

    def _may(self, trials: Sequence[Trial], rung: int, cost: float, *, worse: int = 0) -> bool:
        """Whether a run of this cost goes on from there, with so many more completed that were
        worse.
        """
        found = [trial.cost_at(rung) for trial in trials if trial.status == COMPLETED]
        costs = [*(each for each in found if each is not None), *[WORST] * worse]
        return cost < WORST and (len(costs) < MEDIAN_OF or cost <= statistics.median(costs))


def rungs_of(
    kind: Kind, *, epochs: int, min_epochs: int, reduction: int, begins_at: int = 0
) -> Rungs:
    """The rungs of a search whose runs have so many epochs, and of which none pauses before
    `min_epochs`.

    Of forks, which have `begins_at` epochs of another run, those epochs do not count.
    """
    if kind == "median":
        return Median(range(begins_at + min_epochs, epochs, min_epochs))
    rungs = [begins_at + rung for rung in _geometric(min_epochs, epochs - begins_at, reduction)]
    if kind == "asha":
        return Halving([rungs], [1], reduction)
    most = len(rungs)
    # As many runs begin in each as Hyperband has there: with s halvings to come, (most + 1) / (s +
    # 1) * reduction^s.
    weights = [
        math.ceil((most + 1) / (most - skip + 1) * reduction ** (most - skip))
        for skip in range(most + 1)
    ]
    return Halving([rungs[skip:] for skip in range(most + 1)], weights, reduction)


@functools.cache
def _geometric(first: int, epochs: int, reduction: int) -> list[int]:
    """The first, and each `reduction` times the one before; the last leaves a fair part of the
    epochs to be saved.
    """
    found, rung = [first], first * reduction
    while rung * math.sqrt(reduction) <= epochs:
        found.append(round(rung))
        rung *= reduction
    return found


def _mixed(weights: Sequence[int]) -> Iterator[int]:
    """Each index as often as its weight says, as evenly as can be: smooth weighted round robin."""
    credit = [0] * len(weights)
    for _ in range(sum(weights)):
        credit = [have + more for have, more in zip(credit, weights, strict=True)]
        chosen = credit.index(max(credit))
        credit[chosen] -= sum(weights)
        yield chosen


def _ranked(trials: Sequence[Trial], rungs: Sequence[int], rung: int) -> list[tuple[float, Trial]]:
    """Who has come to a rung, the best first; who failed on the way counts at the first that it did
    not come to.
    """
    found = []
    for trial in trials:
        cost = _cost(trial, rungs, rung)
        before = max((each for each in rungs if each < rung), default=0)
        if cost is None or (trial.status == FAILED and trial.epochs < before):
            continue
        found.append((cost, trial))
    return sorted(found, key=lambda pair: (pair[0], pair[1].number))


def _cost(trial: Trial, rungs: Sequence[int], rung: int) -> float | None:
    """That of `cost_at`; who waits at this rung and exceeds a limit is the worst: it had kept all
    until the one before.

    There it keeps its place. No other may take that: the best of the others could have lost its
    checkpoints by then."""
    return WORST if not trial.is_allowed and _waits(trial, rungs, rung) else trial.cost_at(rung)


def _waits(trial: Trial, rungs: Sequence[int], rung: int) -> bool:
    """Whether it has paused at this rung, and at no later one."""
    return trial.status == PAUSED and rung == max(
        (each for each in rungs if each <= trial.epochs), default=None
    )


def _astray(trials: Sequence[Trial], rungs: Sequence[int]) -> list[tuple[int, float, int]]:
    """Who has paused before the first rung, as there were others then: all of them go on, after
    those at a rung.
    """
    first = min(rungs, default=math.inf)
    paused = (trial for trial in trials if trial.status == PAUSED and trial.is_allowed)
    return [(0, 0.0, trial.number) for trial in paused if trial.epochs < first]


def _is_on_its_way(trial: Trial, rungs: Sequence[int], rung: int) -> bool:
    """Whether it trains, or is to, towards this rung as the next."""
    if trial.status in (PAUSED, COMPLETED, FAILED):
        return False
    return rung == next((each for each in rungs if each > trial.epochs), None)
