"""Who pauses when, who goes on, and who never will: held against the papers, written out."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PAUSED, RUNNING
from expt.search.rungs import Kind, Rungs, Trial, rungs_of

Cost = Callable[[int, int], float]
"""Of a run after an epoch."""


class Search:
    """A search of so many runs, some at a time, whose costs are known beforehand, and what else
    becomes of them.
    """

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
            rungs,
            cost,
            epochs,
            runs,
            at_a_time,
        )
        self._ends, self._exceeds = ends or {}, exceeds or {}
        self.trials: dict[int, Trial] = {}
        self.until: dict[int, int] = {}
        """Of those that train, where they will stop."""
        self.decisions: list[tuple[str, int]] = []
        self._random = random.Random(seed)

    def decide(self) -> bool:
        """Let one more train; returns whether there was one."""
        number = self.rungs.promotable(list(self.trials.values()))
        if number is not None:
            self.decisions.append(("promote", number))
        elif len(self.trials) < self.runs:
            number = len(self.trials)
            self.decisions.append(("new", number))
            self.trials[number] = Trial(number=number, status=RUNNING, costs={})
        else:
            return False
        trial = self.trials[number]
        self.trials[number] = dataclasses.replace(trial, status=RUNNING)
        self.until[number] = self.rungs.next_stop(number, trial.epochs) or self.epochs
        return True

    def advance(self) -> None:
        """Let one of those that train come to its stop, or fail."""
        number = self._random.choice(sorted(self.until))
        epoch, trial, ends = (
            self.until.pop(number),
            self.trials[number],
            self._ends.get(number, self.epochs),
        )
        epoch = min(epoch, ends)
        values = {each: self.cost(number, each) for each in range(trial.epochs + 1, epoch + 1)}
        if WORSE in values.values():
            self.trials[number] = dataclasses.replace(trial, status=FAILED)
            return
        status = PAUSED if epoch < ends else COMPLETED
        self.trials[number] = dataclasses.replace(
            trial,
            status=status,
            costs={**trial.costs, **values},
            is_allowed=epoch < self._exceeds.get(number, epoch + 1),
        )

    def run(self) -> Iterator[Search]:
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
    """Algorithm 2 of Li et al. 2020 with one worker: rungs are lists, and promotions are
    remembered.
    """
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
    cost, rungs = noisy(seed), rungs_of("asha", epochs=27, min_epochs=1, reduction=3)
    assert list(rungs.of(0)) == [1, 3, 9]
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
def test_rungs_are_geometric_and_none_is_just_before_the_end(
    epochs: int, first: int, reduction: int, stops: list[int]
) -> None:
    rungs = rungs_of("asha", epochs=epochs, min_epochs=first, reduction=reduction)
    assert list(rungs.of(5)) == stops
    assert [rungs.next_stop(5, done) for done in (0, stops[0], stops[-1])] == [
        stops[0],
        stops[1] if len(stops) > 1 else None,
        None,
    ]


def test_brackets_of_hyperband_are_mixed_in_its_proportions() -> None:
    rungs = rungs_of("hyperband", epochs=9, min_epochs=1, reduction=3)
    stops = [tuple(rungs.of(number)) for number in range(17)]
    assert {stop: stops.count(stop) for stop in stops} == {(1, 3): 9, (3,): 5, (): 3}
    assert set(stops[:4]) == {(1, 3), (3,), ()}, "the first few are not of one bracket"
    assert stops == [tuple(rungs.of(number)) for number in range(17, 34)]
    search = Search(rungs, noisy(1), epochs=9, runs=34)
    list(search.run())
    done = [number for number, trial in search.trials.items() if trial.status == COMPLETED]
    assert {tuple(rungs.of(number)) for number in done} == {(1, 3), (3,), ()}
    for bracket in ((1, 3), (3,)):
        mine = [
            trial for trial in search.trials.values() if tuple(rungs.of(trial.number)) == bracket
        ]
        gone_on = [trial for trial in mine if trial.epochs > bracket[0]]
        assert len(mine) // 3 <= len(gone_on) < len(mine)


def wild(seed: int) -> Cost:
    """Many ties, and some values that are no numbers."""
    plain = noisy(seed, failures=0.2)

    def cost(number: int, epoch: int) -> float:
        found, chance = (
            plain(number, epoch),
            random.Random(f"wild {seed}/{number}/{epoch}").random(),
        )
        return found if found == WORSE else math.nan if chance < 0.1 else round(found * 4)

    return cost


def some(seed: int, share: float) -> dict[int, int]:
    """Of 30 runs, and for each an epoch of nine."""
    chance = random.Random(seed)
    return {number: chance.randrange(1, 9) for number in range(30) if chance.random() < share}


@pytest.mark.parametrize("kind", ["asha", "hyperband", "median"])
@pytest.mark.parametrize("at_a_time", [1, 4])
def test_who_is_hopeless_never_goes_on_and_in_the_end_all_who_wait_are(
    kind: Kind, at_a_time: int
) -> None:
    early = failed = 0
    for seed in range(8):
        rungs = rungs_of(kind, epochs=9, min_epochs=1, reduction=3)
        search = Search(
            rungs, noisy(seed, failures=0.3), epochs=9, runs=30, at_a_time=at_a_time, seed=seed
        )
        given_up: set[int] = set()
        for now in search.run():
            assert not now.until.keys() & given_up
            found = {*rungs.hopeless(list(now.trials.values()), range(30))}
            assert given_up <= found, "once it is, it stays so"
            given_up = found
            early += len(given_up) if len(now.trials) < 30 else 0
        assert given_up == {
            trial.number for trial in search.trials.values() if trial.status == PAUSED
        }
        failed += sum(trial.status == FAILED for trial in search.trials.values())
    assert failed
    assert early or kind == "median", "some are known before all have begun"


@pytest.mark.parametrize("kind", ["asha", "hyperband", "median"])
@pytest.mark.parametrize("at_a_time", [1, 4])
def test_who_is_hopeless_stays_so_whatever_becomes_of_the_others(
    kind: Kind, at_a_time: int
) -> None:
    """They fail, end by themselves, exceed a limit late, are as good as each other, or measure nan."""
    early = 0
    for seed in range(40):
        rungs = rungs_of(kind, epochs=9, min_epochs=1, reduction=2 + seed % 2)
        runs, fates = 3 + seed % 28, {"ends": some(seed, 0.15), "exceeds": some(seed + 1000, 0.3)}
        search = Search(
            rungs, wild(seed), epochs=9, runs=runs, at_a_time=at_a_time, seed=seed, **fates
        )
        given_up: set[int] = set()
        for now in search.run():
            assert not now.until.keys() & given_up
            found = {*rungs.hopeless(list(now.trials.values()), range(runs))}
            assert given_up <= found, "once it is, it stays so"
            given_up = found
            early += len(given_up) if len(now.trials) < runs else 0
        assert given_up == {
            trial.number for trial in search.trials.values() if trial.status == PAUSED
        }
    assert early


def paused(number: int, **costs: float) -> Trial:
    return Trial(
        number=number, status=PAUSED, costs={int(key[1:]): cost for key, cost in costs.items()}
    )


def test_failed_and_diverged_runs_and_those_beyond_a_limit_count_as_worst() -> None:
    rungs = rungs_of("asha", epochs=9, min_epochs=1, reduction=3)
    good = paused(0, e1=0.5)
    failed = Trial(number=1, status=FAILED, costs={})
    nan = paused(2, e1=math.nan)
    assert rungs.promotable([good, failed]) is None, "two are not three"
    assert rungs.promotable([good, failed, nan]) == 0
    beyond = dataclasses.replace(paused(3, e1=0.1), is_allowed=False)
    assert rungs.promotable([good, failed, beyond]) == 0
    assert rungs.hopeless([good, failed, nan, beyond], range(99)) == [2, 3]
    worst = [nan, beyond, failed, dataclasses.replace(failed, number=4)]
    assert (
        rungs.promotable(
            [*worst, dataclasses.replace(nan, number=5), dataclasses.replace(nan, number=6)]
        )
        is None
    )
    went_on = Trial(number=1, status=FAILED, costs={1: 0.1, 2: 0.1})  # failed between two rungs
    assert rungs.promotable([good, went_on, paused(2, e1=0.9)]) is None, (
        "the best has gone on, and failed"
    )
    higher = [paused(number, e1=0.1, e3=number / 10) for number in (7, 8)]
    assert rungs.promotable([went_on, *higher]) == 7, (
        "it counts at the rung that it did not come to"
    )


@pytest.mark.parametrize("status", [PAUSED, RUNNING, INTERRUPTED, FAILED, COMPLETED])
def test_a_run_that_exceeds_a_limit_later_keeps_its_place_at_the_rungs_that_it_had_passed(
    status: str,
) -> None:
    rungs = rungs_of("asha", epochs=9, min_epochs=1, reduction=3)
    late = dataclasses.replace(paused(0, e1=0.1, e2=0.1, e3=0.1), is_allowed=False, status=status)
    if status == COMPLETED:
        late = dataclasses.replace(late, costs={**late.costs, 9: 0.1})
    others = [paused(number, e1=0.4 + number / 10) for number in (1, 2)]
    assert rungs.promotable([late, *others]) is None, "the first place at rung 1 is taken"
    assert rungs.hopeless([late, *others], range(3)) == ([0, 1, 2] if status == PAUSED else [1, 2])
    higher = [paused(number, e1=0.2, e3=0.9) for number in (3, 4)]
    expected = 3 if status == PAUSED else None
    assert rungs.promotable([late, *higher]) == expected, (
        "it is the worst where it waits, and no more"
    )


def test_a_run_that_ends_by_itself_and_exceeds_a_limit_is_the_worst_of_the_rung_that_it_was_on_its_way_to() -> (
    None
):
    rungs = rungs_of("asha", epochs=9, min_epochs=1, reduction=3)
    for end in (2, 3):
        costs = dict.fromkeys(range(1, end + 1), 0.1)
        ended = Trial(number=0, status=COMPLETED, costs=costs, is_allowed=False)
        assert rungs.promotable([ended, paused(1, e1=0.5), paused(2, e1=0.6)]) is None
        assert (
            rungs.promotable([ended, *(paused(number, e1=0.2, e3=0.9) for number in (1, 2))]) == 1
        )


def test_an_unknown_past_leaves_no_place_to_others_though_a_limit_is_exceeded() -> None:
    rungs = rungs_of("asha", epochs=9, min_epochs=1, reduction=3)
    past = Trial(number=0, status=COMPLETED, costs={}, is_allowed=False, is_past_rungs=True)
    assert rungs.promotable([past, paused(1, e1=0.5), paused(2, e1=0.6)]) is None


def test_a_run_that_ended_by_itself_keeps_its_place_and_what_is_under_way_is_waited_for() -> None:
    rungs = rungs_of("asha", epochs=9, min_epochs=1, reduction=3)
    stopped_early = Trial(number=0, status=COMPLETED, costs={1: 0.1, 2: 0.3})
    assert rungs.promotable([stopped_early, paused(1, e1=0.5), paused(2, e1=0.6)]) is None
    others = [paused(number, e1=0.5 + number / 10) for number in range(1, 6)]
    assert rungs.promotable([stopped_early, *others]) == 1
    for status in (RUNNING, INTERRUPTED, "lost"):
        lost = Trial(number=9, status=status, costs={1: 0.2})
        assert rungs.promotable([paused(0, e1=0.9), paused(1, e1=0.8), lost]) is None


def test_equals_go_on_in_the_order_of_their_numbers_from_the_highest_rung() -> None:
    rungs = rungs_of("asha", epochs=27, min_epochs=1, reduction=3)
    low = [paused(number, e1=0.5) for number in (5, 3, 4)]
    assert rungs.promotable(low) == 3
    high = [paused(number, e1=0.1, e3=0.9) for number in (8, 6, 7)]
    assert rungs.promotable([*low, *high]) == 6


@pytest.mark.parametrize("kind", ["asha", "hyperband", "median"])
def test_who_has_paused_where_there_is_no_rung_now_goes_on(kind: Kind) -> None:
    rungs = rungs_of(kind, epochs=20, min_epochs=2, reduction=3)
    early = paused(0, e1=0.9)
    assert rungs.promotable([early]) == 0
    assert rungs.next_stop(0, 1) == 2
    assert rungs.hopeless([early], range(1)) == []
    between = [
        paused(number, e1=0.1, e2=number / 10, e3=0.1) for number in (18, 1, 36)
    ]  # of one bracket
    if kind == "asha":
        assert rungs.promotable(between) == 1, "by what it was at the rung"
        assert rungs.promotable([*between, early]) == 1


def test_the_median_is_that_of_completed_runs_at_the_same_epoch() -> None:
    rungs = rungs_of("median", epochs=6, min_epochs=2, reduction=3)
    assert list(rungs.of(0)) == [2, 4]
    done = [
        Trial(number=number, status=COMPLETED, costs={2: cost, 6: 0.0})
        for number, cost in enumerate((0.4, 0.5, 0.9))
    ]
    assert rungs.promotable([*done[:2], paused(3, e2=99.0)]) == 3, "too few to compare with"
    assert statistics.median(trial.costs[2] for trial in done) == 0.5
    assert rungs.promotable([*done, paused(3, e2=0.51)]) is None
    assert rungs.promotable([*done, paused(3, e2=0.51), paused(4, e2=0.5)]) == 4
    assert rungs.promotable([*done, paused(3, e2=math.nan)]) is None
    assert rungs.hopeless([*done, paused(3, e2=0.51)], range(4)) == [3]
    assert rungs.hopeless([*done, paused(3, e2=0.51)], range(5)) == [], (
        "the fifth may complete, and be worse"
    )
    assert rungs.hopeless([*done, paused(3, e2=0.95)], range(5)) == [3]


def test_the_rungs_of_forks_are_counted_from_their_parents_epoch_on() -> None:
    def rungs(kind: Kind, begins_at: int) -> list[int]:
        return [
            *rungs_of(
                kind, epochs=9 + begins_at, min_epochs=1, reduction=3, begins_at=begins_at
            ).of(0)
        ]

    assert rungs("asha", 0) == [1, 3]
    assert rungs("asha", 4) == [5, 7]
    assert rungs("median", 4) == [*range(5, 13)]
