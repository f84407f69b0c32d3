"""Who pauses when, who goes on, and who never will: held against the papers, written out."""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from expt.config.search import Search as Settings
from expt.errors import ConfigError
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PRUNED, RUNNING
from expt.search.rungs import Halving, Median, Rungs, geometric, rungs_of
from expt.search.trial import Goal, Trial
from tests.conftest import Configured

Cost = Callable[[int, int], float]
"""Of a trial after an epoch."""
BROKEN = {"a limit": 1.0}


def trial(number: int, status: str, costs: Mapping[int, float], *, allowed: bool = True) -> Trial:
    broken = {} if allowed else BROKEN
    return Trial(values={}, number=number, status=status, costs=costs, violations=broken)


def pruned(number: int, *, allowed: bool = True, **costs: float) -> Trial:
    found = {int(key[1:]): cost for key, cost in costs.items()}
    return trial(number, PRUNED, found, allowed=allowed)


def promoted(rungs: Rungs, trials: Sequence[Trial]) -> int | None:
    found = rungs.promotable(trials)
    return None if found is None else found.number


def given_up(rungs: Rungs, trials: Sequence[Trial], planned: int) -> list[int]:
    return sorted(trial.number or 0 for trial in rungs.hopeless(trials, planned))


def rungs_by(kind: str, *, epochs: int = 9, reduction: int = 3) -> Rungs:
    if kind == "median":
        return Median(range(1, epochs))
    return Halving(geometric(1, epochs, reduction), reduction)


class Search:
    """A search of several runs at a time with known costs and fates."""

    def __init__(
        self,
        rungs: Rungs,
        cost: Cost,
        *,
        epochs: int,
        runs: int,
        at_a_time: int = 1,
        seed: int = 0,
        ends: Mapping[int, int] | None = None,
        exceeds: Mapping[int, int] | None = None,
    ) -> None:
        """Some runs end by themselves after an epoch, and some exceed a limit from one on."""
        self.rungs, self.cost, self.epochs, self.runs, self.at_a_time = (
            rungs, cost, epochs, runs, at_a_time,
        )  # fmt: skip
        self._ends, self._exceeds = ends or {}, exceeds or {}
        self.trials: dict[int, Trial] = {}
        self.until: dict[int, int] = {}
        """Of those that train, where they will stop."""
        self.decisions: list[tuple[str, int]] = []
        self._random = random.Random(seed)

    def decide(self) -> bool:
        """Let one more train; returns whether there was one."""
        number = promoted(self.rungs, list(self.trials.values()))
        if number is not None:
            self.decisions.append(("promote", number))
        elif len(self.trials) < self.runs:
            number = len(self.trials)
            self.decisions.append(("new", number))
            self.trials[number] = trial(number, RUNNING, {})
        else:
            return False
        known = self.trials[number]
        self.trials[number] = dataclasses.replace(known, status=RUNNING)
        self.until[number] = self.rungs.next_stop(known.epochs) or self.epochs
        return True

    def advance(self) -> None:
        """Let one of those that train come to its stop, or fail."""
        number = self._random.choice(sorted(self.until))
        epoch, known = self.until.pop(number), self.trials[number]
        ends = self._ends.get(number, self.epochs)
        epoch = min(epoch, ends)
        values = {each: self.cost(number, each) for each in range(known.epochs + 1, epoch + 1)}
        if WORSE in values.values():
            self.trials[number] = dataclasses.replace(known, status=FAILED)
            return
        status = PRUNED if epoch < ends else COMPLETED
        allowed = epoch < self._exceeds.get(number, epoch + 1)
        self.trials[number] = trial(number, status, {**known.costs, **values}, allowed=allowed)

    def run(self) -> "Iterator[Search]":
        """To its end; yields after each thing that happens."""
        while True:
            while len(self.until) < self.at_a_time and self.decide():
                yield self
            if not self.until:
                return
            self.advance()
            yield self


WORSE = math.pi
"""The cost at which a run fails."""


def noisy(seed: int, *, failures: float = 0.0) -> Cost:
    def cost(number: int, epoch: int) -> float:
        one = random.Random(f"{seed}/{number}")
        quality, fails_at = one.random(), one.randrange(1, 6) if one.random() < failures else 99
        if epoch >= fails_at:
            return WORSE
        return quality + random.Random(f"{seed}/{number}/{epoch}").random() / epoch

    return cost


def by_the_paper(
    cost: Cost, *, epochs: Sequence[int], reduction: int, runs: int
) -> list[tuple[str, int]]:
    """Algorithm 2 of Li et al. 2020 with one worker, with rungs as lists."""
    rungs: list[list[tuple[float, int]]] = [[] for _ in epochs]
    promoted: list[set[int]] = [set() for _ in epochs]
    decisions, started = [], 0
    while True:
        job = None
        for k in reversed(range(len(epochs) - 1)):
            best = sorted(rungs[k])[: len(rungs[k]) // reduction]
            candidates = [number for _, number in best if number not in promoted[k]]
            if candidates:
                job = candidates[0], k + 1
                promoted[k].add(candidates[0])
                decisions.append(("promote", candidates[0]))
                break
        if job is None:
            if started == runs:
                return decisions
            job = started, 0
            decisions.append(("new", started))
            started += 1
        number, k = job
        rungs[k].append((cost(number, epochs[k]), number))


@pytest.mark.parametrize("seed", range(5))
def test_asha_is_the_papers_algorithm(seed: int) -> None:
    cost, rungs = noisy(seed), rungs_by("asha", epochs=27)
    assert rungs.epochs == [1, 3, 9]
    search = Search(rungs, cost, epochs=27, runs=60)
    list(search.run())
    assert search.decisions == by_the_paper(cost, epochs=[1, 3, 9, 27], reduction=3, runs=60)
    assert any(trial.status == COMPLETED for trial in search.trials.values())


@pytest.mark.parametrize(
    ("epochs", "first", "reduction", "stops"),
    [
        (9, 1, 3, [1, 3]),
        (10, 1, 3, [1, 3]),
        (8, 1, 3, [1, 3]),
        (16, 1, 2, [1, 2, 4, 8]),
        (30, 2, 4, [2, 8]),
        (3, 2, 3, [2]),
    ],
)
def test_rungs_are_geometric(epochs: int, first: int, reduction: int, stops: list[int]) -> None:
    rungs = Halving(geometric(first, epochs, reduction), reduction)
    assert rungs.epochs == stops
    assert [rungs.next_stop(done) for done in (0, *stops)] == [*stops, None]


def wild(seed: int) -> Cost:
    """Many ties, and some values that are not numbers."""
    plain = noisy(seed, failures=0.2)

    def cost(number: int, epoch: int) -> float:
        found = plain(number, epoch)
        chance = random.Random(f"wild {seed}/{number}/{epoch}").random()
        return found if found == WORSE else math.nan if chance < 0.1 else round(found * 4)

    return cost


def some(seed: int, share: float) -> dict[int, int]:
    """Of 30 runs, and for each an epoch of nine."""
    chance = random.Random(seed)
    return {number: chance.randrange(1, 9) for number in range(30) if chance.random() < share}


@pytest.mark.parametrize("kind", ["asha", "median"])
@pytest.mark.parametrize("at_a_time", [1, 4])
def test_hopeless_trial_never_continues(kind: str, at_a_time: int) -> None:
    """They fail, end by themselves, violate a limit late, are equal, or measure nan."""
    early = failed = 0
    for seed in range(16):
        rungs = rungs_by(kind, reduction=2 + seed % 2)
        runs, fates = 3 + seed % 28, {"ends": some(seed, 0.15), "exceeds": some(seed + 1000, 0.3)}
        search = Search(
            rungs, wild(seed), epochs=9, runs=runs, at_a_time=at_a_time, seed=seed, **fates
        )
        before: set[int] = set()
        for now in search.run():
            assert not now.until.keys() & before
            found = {*given_up(rungs, list(now.trials.values()), runs - len(now.trials))}
            assert before <= found, "once it is, it stays so"
            before = found
            early += len(before) if len(now.trials) < runs else 0
        trials = search.trials.values()
        assert before == {trial.number for trial in trials if trial.status == PRUNED}
        failed += sum(trial.status == FAILED for trial in trials)
    assert failed
    assert early or kind == "median", "some are known before all have begun"


def test_failed_and_diverged_trials_and_those_beyond_a_limit_count_as_worst() -> None:
    rungs = rungs_by("asha")
    good, failed, nan = pruned(0, e1=0.5), trial(1, FAILED, {}), pruned(2, e1=math.nan)
    assert promoted(rungs, [good, failed]) is None, "two are not three"
    assert promoted(rungs, [good, failed, nan]) == 0
    beyond = pruned(3, e1=0.1, allowed=False)
    assert promoted(rungs, [good, failed, beyond]) == 0
    assert given_up(rungs, [good, failed, nan, beyond], 95) == [2, 3]
    worst = [nan, beyond, failed, *(dataclasses.replace(nan, number=n) for n in (4, 5, 6))]
    assert promoted(rungs, worst) is None
    went_on = trial(1, FAILED, {1: 0.1, 2: 0.1})  # failed between two rungs
    assert promoted(rungs, [good, went_on, pruned(2, e1=0.9)]) is None, "the best has failed since"
    higher = [pruned(number, e1=0.1, e3=number / 10) for number in (7, 8)]
    assert promoted(rungs, [went_on, *higher]) == 7, "it counts at the rung that it did not reach"


@pytest.mark.parametrize("status", [PRUNED, RUNNING, INTERRUPTED, FAILED, COMPLETED])
def test_late_violation_keeps_the_place_at_earlier_rungs(status: str) -> None:
    rungs, costs = rungs_by("asha"), dict.fromkeys((1, 2, 3), 0.1)
    late = trial(0, status, costs | {9: 0.1} if status == COMPLETED else costs, allowed=False)
    others = [pruned(number, e1=0.4 + number / 10) for number in (1, 2)]
    assert promoted(rungs, [late, *others]) is None, "the first place at rung 1 is taken"
    assert given_up(rungs, [late, *others], 0) == ([0, 1, 2] if status == PRUNED else [1, 2])
    higher = [pruned(number, e1=0.2, e3=0.9) for number in (3, 4)]
    expected = 3 if status == PRUNED else None
    assert promoted(rungs, [late, *higher]) == expected, "it is the worst only where it waits"


@pytest.mark.parametrize("end", [2, 3])
def test_early_end_beyond_a_limit_is_worst_at_the_next_rung(end: int) -> None:
    rungs = rungs_by("asha")
    ended = trial(0, COMPLETED, dict.fromkeys(range(1, end + 1), 0.1), allowed=False)
    assert promoted(rungs, [ended, pruned(1, e1=0.5), pruned(2, e1=0.6)]) is None
    assert promoted(rungs, [ended, *(pruned(n, e1=0.2, e3=0.9) for n in (1, 2))]) == 1


def test_a_trial_that_ended_by_itself_keeps_its_place_and_running_ones_are_waited_for() -> None:
    rungs, stopped_early = rungs_by("asha"), trial(0, COMPLETED, {1: 0.1, 2: 0.3})
    assert promoted(rungs, [stopped_early, pruned(1, e1=0.5), pruned(2, e1=0.6)]) is None
    others = [pruned(number, e1=0.5 + number / 10) for number in range(1, 6)]
    assert promoted(rungs, [stopped_early, *others]) == 1
    for status in (RUNNING, INTERRUPTED, "lost"):
        lost = trial(9, status, {1: 0.2})
        assert promoted(rungs, [pruned(0, e1=0.9), pruned(1, e1=0.8), lost]) is None


def test_equal_trials_continue_in_the_order_of_their_numbers_from_the_highest_rung() -> None:
    rungs = rungs_by("asha", epochs=27)
    low = [pruned(number, e1=0.5) for number in (5, 3, 4)]
    assert promoted(rungs, low) == 3
    high = [pruned(number, e1=0.1, e3=0.9) for number in (8, 6, 7)]
    assert promoted(rungs, [*low, *high]) == 6


def test_the_median_is_that_of_completed_trials_at_the_same_epoch() -> None:
    rungs = Median(range(2, 6, 2))
    assert rungs.epochs == [2, 4]
    done = [trial(n, COMPLETED, {2: cost, 6: 0.0}) for n, cost in enumerate((0.4, 0.5, 0.9))]
    assert promoted(rungs, [*done[:2], pruned(3, e2=99.0)]) == 3, "too few to compare with"
    assert statistics.median(each.costs[2] for each in done) == 0.5
    assert promoted(rungs, [*done, pruned(3, e2=0.51)]) is None
    assert promoted(rungs, [*done, pruned(3, e2=0.51), pruned(4, e2=0.5)]) == 4
    assert promoted(rungs, [*done, pruned(3, e2=math.nan)]) is None
    assert given_up(rungs, [*done, pruned(3, e2=0.51)], 0) == [3]
    assert given_up(rungs, [*done, pruned(3, e2=0.51)], 1) == [], "the next may move the median"


@pytest.mark.parametrize(
    ("settings", "words", "goals", "key"),
    [
        ({}, (), ["loss/test"], "search.rungs=asha"),
        ({}, (), ["speed/samples_per_s"], "search.rungs=asha"),
        ({}, (), ["loss/val", "accuracy/val"], "search.rungs=asha"),
        ({}, ("fork=a",), ["loss/val"], "search.rungs=asha"),
        ({}, ("eval_every_steps=9",), ["loss/val"], "search.rungs=asha"),
        ({"min_epochs": 3}, ("epochs=3",), ["loss/val"], "search.min_epochs=3"),
        ({"rungs": "median", "min_epochs": 9}, ("epochs=3",), ["loss/val"], "search.min_epochs=9"),
    ],
)
def test_trials_that_cannot_be_compared_at_rungs_are_refused(
    settings: dict[str, Any],
    words: tuple[str, ...],
    goals: list[str],
    key: str,
    configured: Configured,
) -> None:
    search = Settings(name="random", **{"rungs": "asha", **settings})
    with pytest.raises(ConfigError, match=f"^{key}: "):
        rungs_of(search, configured(*words), [Goal(tag, highest=False) for tag in goals])


def test_a_search_that_only_its_first_rung_would_see_is_reported(
    configured: Configured, capsys: pytest.CaptureFixture[str]
) -> None:
    search = Settings(name="random", rungs="asha", runs=2, reduction=3)
    assert rungs_of(search, configured("epochs=9"), [Goal("loss/val", highest=False)])
    assert "search.reduction=3: " in capsys.readouterr().err
