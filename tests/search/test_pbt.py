"""Who goes on, who gives up its place to whom, and with which settings: by what is known alone."""

from __future__ import annotations

import dataclasses
import math
import random
from unittest.mock import ANY

import pytest

from expt.runs.result import COMPLETED, FAILED, PAUSED, RUNNING
from expt.search.pbt import MOST_BAD, Begin, Choice, GoOn, Member, Population, Replace
from expt.search.space import Parameter, Space, Values

LR = Parameter(name="optimizer.lr", kind="float", low=1e-4, high=1.0, log=True)
SIZE = Parameter(name="batch_size", kind="int", low=16, high=64, step=16)
CLIP = Parameter(
    name="gradient_clip", kind="categorical", choices=("null", "1", "5"), meant=(None, 1, 5)
)
SPACE = Space((LR, SIZE, CLIP))
POPULATION = Population(space=SPACE, size=4, epochs=6, interval=2)


def _member(
    number: int, *costs: float, status: str = PAUSED, replaces: int | None = None, first: int = 1
) -> Member:
    values: Values = {"optimizer.lr": 0.1, "batch_size": 32, "gradient_clip": "1"}
    by_epoch = {first + index: cost for index, cost in enumerate(costs)}
    return Member(number=number, values=values, status=status, costs=by_epoch, replaces=replaces)


def test_a_population_is_filled_first_with_points_that_differ() -> None:
    first = POPULATION.choose([])
    second = POPULATION.choose([_member(0, status=RUNNING)])
    assert isinstance(first, Begin)
    assert isinstance(second, Begin)
    assert first != second
    assert first == POPULATION.choose([]), "the same again"
    assert first != dataclasses.replace(POPULATION, seed=1).choose([])
    assert {1e-4 <= float(choice.values["optimizer.lr"]) <= 1.0 for choice in (first, second)} == {
        True
    }


def test_a_first_member_that_is_gone_is_made_again_under_its_number_and_a_fork_is_not() -> None:
    drawn: list[Member] = []
    for number in range(4):
        choice = POPULATION.choose(drawn)
        assert isinstance(choice, Begin)
        drawn.append(Member(number=number, values=choice.values, status=COMPLETED, costs={6: 1.0}))
    fork = dataclasses.replace(drawn[3], number=4, replaces=1)
    later = dataclasses.replace(fork, number=5, replaces=2)
    for gone in (0, 1, 2):
        left = [*(member for member in drawn if member.number != gone), fork, later]
        assert POPULATION.next_number(left) == gone
        assert POPULATION.choose(left) == Begin(drawn[gone].values)
    assert POPULATION.next_number([*drawn, later]) == 6
    others = [
        dataclasses.replace(member, number=member.number + 3)
        for member in drawn
        if member.number != 1
    ]
    assert POPULATION.next_number(others, others=range(3)) == 4, (
        "numbers of other runs are none that are gone"
    )
    assert POPULATION.next_number(others[:1], others=range(3)) == 4


def test_the_worst_gives_its_place_to_a_fork_of_the_best_before_any_goes_on() -> None:
    members = [_member(0, 5, 4), _member(1, 1, 9), _member(2, 3, 2), _member(3, 8, 3)]
    choice = POPULATION.choose(members)
    assert isinstance(choice, Replace)
    assert (choice.number, choice.parent, choice.epoch, choice.until) == (1, 2, 2, 4)
    assert choice.values != members[2].values
    members.append(_member(4, status=RUNNING, replaces=1))
    assert [POPULATION.choose(members)] == [GoOn(0, 4)]


def test_no_two_are_alike_and_a_small_space_has_an_end() -> None:
    small = Population(space=Space((CLIP,)), size=4, epochs=6, quantile=0.5, resample=1.0)
    members: list[Member] = []
    while isinstance(choice := small.choose(members), Begin):
        member = Member(
            number=len(members), values=choice.values, status=PAUSED, costs={1: float(len(members))}
        )
        members.append(member)
    assert {str(member.values["gradient_clip"]) for member in members} == {"null", "1", "5"}
    forks = list[Replace]()
    members += [_member(n, 9 + n) for n in range(3, 40)]
    while isinstance(choice := small.choose(members), Replace):
        forks.append(choice)
        of = {"replaces": choice.number, "parent": choice.parent, "began_at": choice.epoch}
        members.append(Member(number=len(members), values=choice.values, status=RUNNING, **of))  # type: ignore[arg-type]
    ways = {(fork.parent, fork.values["gradient_clip"]) for fork in forks}
    assert len(ways) == len(forks) > 2


def _trained(choice: Choice | None, members: list[Member], population: Population) -> Member | None:
    """What the choice comes to: the cost is how far the rate lies from 0.1."""
    if choice is None:
        return None
    if isinstance(choice, GoOn):
        member, until = next(one for one in members if one.number == choice.number), choice.until
        begun, values, replaces, number = (
            member.epochs,
            member.values,
            member.replaces,
            member.number,
        )
    else:
        begun, values, number = 0, choice.values, len(members)
        replaces, until = None, population.next_stop(0)
        if isinstance(choice, Replace):
            begun, until, replaces = choice.epoch, choice.until, choice.number
    last = until or population.epochs
    cost = abs(math.log10(float(values["optimizer.lr"]) / 0.1))
    costs = dict.fromkeys(range(begun + 1, last + 1), cost)
    if isinstance(choice, GoOn):
        costs = {**member.costs, **costs}
    status = PAUSED if until else COMPLETED
    return Member(number=number, values=values, status=status, costs=costs, replaces=replaces)


def test_one_after_another_all_places_come_to_their_end_and_ever_better() -> None:
    population = Population(space=SPACE, size=8, epochs=12, interval=2)
    members: list[Member] = []
    while (found := _trained(population.choose(members), members, population)) is not None:
        members = [*(one for one in members if one.number != found.number), found]
        members.sort(key=lambda one: one.number)
    current = population.current(members)
    assert len(current) == 8
    assert {one.status for one in current} == {COMPLETED}
    assert len(members) > 8 + 4
    first, last = (_mean_cost(some) for some in (members[:8], current))
    assert last < first / 2


def _mean_cost(members: list[Member]) -> float:
    return sum(one.costs[one.epochs] for one in members) / len(members)


@pytest.mark.parametrize("places", [2, 3, 8])
def test_with_several_at_a_time_nobody_waits_and_places_are_given_up_as_often(places: int) -> None:
    """Members of unequal speed, of which so many are under way: those ahead have gone on, others
    are behind.
    """
    population = Population(space=SPACE, size=8, epochs=12, interval=2)
    alone = len(_trained_together(population, 1))
    members = _trained_together(population, places)
    current = population.current(members)
    assert {one.status for one in current} == {COMPLETED}
    assert len(current) == 8
    assert len(members) - 8 > (alone - 8) / 2
    assert _mean_cost(current) < _mean_cost(members[:8]) / 2


def _trained_together(population: Population, places: int) -> list[Member]:
    """All members at the end, by what is known whenever one of so many places becomes free."""
    members, under_way = dict[int, Member](), list[tuple[float, Member]]()
    now = 0.0
    while True:
        while len(under_way) < places:
            known = [members[number] for number in sorted(members)]
            if (found := _trained(choice := population.choose(known), known, population)) is None:
                break
            before = members.get(found.number)
            begun = choice.epoch if isinstance(choice, Replace) else before.epochs if before else 0
            costs = before.costs if before else {}
            members[found.number] = dataclasses.replace(found, status=RUNNING, costs=costs)
            under_way.append((now + (found.epochs - begun) * (1 + found.number % 5), found))
        if not under_way:
            return [members[number] for number in sorted(members)]
        under_way.sort(key=lambda pair: (pair[0], pair[1].number))
        now, ended = under_way.pop(0)
        members[ended.number] = ended


def test_who_comes_first_is_compared_with_what_others_had_come_to_until_then() -> None:
    behind = [_member(n, 1.0, 1.0 + n, status=RUNNING) for n in range(3)]
    assert POPULATION.choose([*behind, _member(3, *[9.0] * 4)]) == Replace(
        3, 0, 2, {"optimizer.lr": ANY, "batch_size": ANY, "gradient_clip": ANY}, 4
    ), "by the last epochs that they are known to have reached"
    ahead = [
        _member(n, 1.0, 1.0 + n, 0.0, 0.0, status=COMPLETED if n == 0 else RUNNING)
        for n in range(3)
    ]
    assert POPULATION.choose([*ahead, _member(3, 9.0, 9.0)]) == GoOn(3, 4), (
        "who is the best has come to its end"
    )
    ahead[0] = dataclasses.replace(ahead[0], status=RUNNING)
    choice = POPULATION.choose([*ahead, _member(3, 9.0, 9.0)])
    assert isinstance(choice, Replace)
    assert (choice.parent, choice.epoch, choice.until) == (0, 4, None)


def test_of_a_place_that_was_given_up_counts_what_was_reached_there() -> None:
    fork = dataclasses.replace(
        _member(4, 0.0, 0.0, first=3, replaces=3, status=RUNNING), parent=0, began_at=2
    )
    members = [*(_member(n, 1.0, 1.0 + n) for n in range(3)), _member(3, 1.0, 9.0), fork]
    assert POPULATION.choose(members) == GoOn(0, 4), (
        "the worst of this epoch has given up its place already"
    )
    ended = [_member(n, *[1.0] * 6, status=COMPLETED) for n in range(3)]
    paused = dataclasses.replace(fork, status=PAUSED, costs={}, began_at=4)
    assert POPULATION.choose([*ended, members[3], paused]) == GoOn(4, None), (
        "by a person, before an epoch of its own"
    )


@pytest.mark.parametrize(
    ("members", "choice"),
    [
        ([_member(n, 1.0, 1.0) for n in range(4)], GoOn(0, 4)),  # none is worse than another
        ([_member(n, 1.0, n, status=RUNNING) for n in range(4)], None),
        (
            [*(_member(n, *[1.0] * 4) for n in range(3)), _member(3, 1, 1)],
            GoOn(3, 4),
        ),  # who is behind comes first
        ([_member(n, *[1.0] * 4) for n in range(4)], GoOn(0, None)),  # to its end
        ([_member(n, *[1.0] * 6, status=COMPLETED) for n in range(4)], None),
        (
            [
                *(_member(n, 1.0, 1.0) for n in range(2)),
                *(_member(n, status=RUNNING) for n in (2, 3)),
            ],
            GoOn(0, 4),
        ),
    ],
)
def test_who_goes_on(members: list[Member], choice: Choice | None) -> None:
    assert POPULATION.choose(members) == choice


@pytest.mark.parametrize(
    "bad", [_member(3, 1.0, math.nan), _member(3, 1.0, status=FAILED), _member(3, status=FAILED)]
)
def test_who_diverged_or_failed_is_replaced(bad: Member) -> None:
    choice = POPULATION.choose(
        [*(_member(n, 1.0, n) for n in range(4) if n != 3), bad, _member(4, 1, 7, replaces=9)]
    )
    assert isinstance(choice, Replace)
    assert (choice.number, choice.parent) == (3, 0)


def test_the_place_of_a_fork_that_comes_to_nothing_by_its_values_is_given_to_others_and_not_for_ever() -> (
    None
):
    members = [_member(n, 1.0, 1.0 + n) for n in range(4)]
    while isinstance(choice := POPULATION.choose(members), Replace):
        assert (choice.number, choice.parent, choice.epoch) == (len(members) - 1, 0, 2)
        fork = Member(
            number=len(members), values=choice.values, status=FAILED, replaces=choice.number
        )
        members.append(dataclasses.replace(fork, parent=0, began_at=2, is_bad=True))
    forks = members[4:]
    assert choice == GoOn(0, 4)
    assert len(forks) == len({str(fork.values) for fork in forks}) == MOST_BAD
    by_code = dataclasses.replace(forks[0], is_bad=False)
    assert POPULATION.choose([*members[:4], by_code]) == GoOn(0, 4)


def test_values_are_changed_within_the_space() -> None:
    values: Values = {"optimizer.lr": 0.9, "batch_size": 64, "gradient_clip": "null"}
    little = dataclasses.replace(POPULATION, resample=0.0)
    found = [little.explored(values, random.Random(number)) for number in range(20)]
    assert {one["optimizer.lr"] for one in found} == {0.72, 1.0}
    assert {one["batch_size"] for one in found} == {48, 64}
    assert {one["gradient_clip"] for one in found} == {"null", "1"}
    anew = dataclasses.replace(POPULATION, resample=1.0)
    assert (
        len({anew.explored(values, random.Random(number))["optimizer.lr"] for number in range(20)})
        == 20
    )


def test_values_that_turned_out_to_be_anothers_run_are_not_drawn_again() -> None:
    space = Space((CLIP,))
    population = dataclasses.replace(POPULATION, space=space, size=3)
    first = Member(number=0, values={"gradient_clip": "1"}, status=PAUSED, costs={2: 1.0})
    again = dataclasses.replace(first, number=1, values={"gradient_clip": "5"}, status=COMPLETED)
    other = population.choose([first], {1}, [again])
    assert other == Begin({"gradient_clip": "null"})
    last = dataclasses.replace(first, number=2, values={"gradient_clip": "null"})
    assert population.choose([first, last], {1}, [again]) == GoOn(0, 4), "there is no further one"
    worse = dataclasses.replace(last, costs={2: 9.0})
    forks = [dataclasses.replace(again, number=n, parent=0, began_at=2, values={"gradient_clip": clip})
             for n, clip in ((3, "null"), (4, "5"))]  # fmt: skip
    half = dataclasses.replace(population, quantile=0.5, size=2)
    assert isinstance(half.choose([first, worse], (), forks[:1]), Replace)
    assert half.choose([first, worse], (), forks) == GoOn(0, 4)
