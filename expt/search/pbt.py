"""Population based training (Jaderberg et al. 2017): what each member does next, a pure function of
what is known.

Every `interval` epochs a member pauses, and is compared with what all others had come to until then
(truncation selection): one of the worst gives its place to a fork of one of the best, whose
settings are changed a little (exploit and explore); every other goes on as it is. Nobody waits for
another."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from expt.runs.result import FAILED, PAUSED, RUNNING
from expt.search.space import Parameter, Space, Value, Values, as_key

DRAWS = 50
"""How often values are drawn until they are new."""
MOST_BAD = 5
"""Forks that may come to nothing one after another, for the place of one that did: maybe its every
neighbour does.
"""
SMALLER, LARGER = 0.8, 1.2
"""By one of these a number is multiplied."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One run of the population, or one that has given up its place."""

    number: int
    values: Values
    status: str
    """As in result.json."""
    costs: Mapping[int, float] = field(default_factory=dict)
    """After each epoch that it has trained itself; lower is better."""
    replaces: int | None = None
    parent: int | None = None
    """Whose fork it is."""
    began_at: int = 0
    """After which epoch of that."""
    can_be_forked: bool = True
    """Whether it still has what a fork begins with."""
    is_orphan: bool = False
    """Whether it could not begin, since its parent had no longer what a fork begins with."""
    is_bad: bool = False
    """Whether it has failed by its values, as by diverging: the next fork draws others."""

    @property
    def epochs(self) -> int:
        """How far it has come."""
        return max(self.costs, default=self.began_at)

    def cost_until(self, epoch: int) -> float | None:
        """The last until then, what is no number is worse than any; None where it had none yet."""
        last = max((each for each in self.costs if each <= epoch), default=None)
        return None if last is None else _worst_if_nan(self.costs[last])


@dataclass(frozen=True)
class Begin:
    """A further member of a population that is not complete."""

    values: Values


@dataclass(frozen=True)
class GoOn:
    """A member that has paused trains on, until after an epoch, or to its end."""

    number: int
    until: int | None


@dataclass(frozen=True)
class Replace:
    """A fork of the member `parent` takes the place of `number`."""

    number: int
    parent: int
    epoch: int
    """After which it parts from it: the last that is known of it.

    One that trains on may have come further.
    """
    values: Values
    until: int | None


Choice: TypeAlias = Begin | GoOn | Replace


@dataclass(frozen=True, kw_only=True)
class Population:
    """How a population is trained."""

    space: Space
    size: int
    epochs: int
    interval: int = 1
    quantile: float = 0.25
    """The share of the members that give up their places, and of those whose forks take them."""
    resample: float = 0.25
    """How likely a value is drawn anew from the space, and not changed a little."""
    seed: int = 0

    def next_number(self, members: Sequence[Member], others: Collection[int] = ()) -> int:
        """That of the next new member: of a first one that is gone its own, else one that is higher
        than all.

        None of the members, nor of the runs in their folder that are none, has it.
        """
        have = {member.number for member in members}
        highest = max(have.union(others), default=-1)
        if sum(member.replaces is None for member in members) < self.size:
            first = itertools.islice(
                (number for number in itertools.count() if number not in others), self.size
            )
            return next(
                (number for number in first if number not in have and number < highest), highest + 1
            )
        return highest + 1

    def choose(
        self,
        members: Sequence[Member],
        others: Collection[int] = (),
        repeated: Collection[Member] = (),
    ) -> Choice | None:
        """What is to be done next; None where that waits for members under way, or all have come to
        their end.

        Those `repeated` turned out to be others under other values, which are not chosen again.

        The one that is the furthest behind comes first, and those that give up their places before
        the others. So with one at a time all come to an epoch before any goes on, and the
        checkpoints of the best are those of this epoch."""
        number = self.next_number(members, others)
        if sum(member.replaces is None for member in members) < self.size and (
            drawn := self._drawn([*members, *repeated], number)
        ):
            return Begin(drawn)
        current = self.current(members)
        paused = [member for member in current if member.status == PAUSED]
        if not paused:
            return None
        epoch = min(member.epochs for member in paused)
        here = sorted(
            (member for member in paused if member.epochs == epoch),
            key=lambda member: member.number,
        )
        best, worst = self._extremes(members, epoch)
        failed = [
            member for member in current if member.status == FAILED and member.epochs <= epoch
        ]
        # Not other forks that have come to nothing: they would fail for ever.
        given_up = [
            one
            for one in failed
            if one.costs or one.replaces is None or one.is_orphan or _may_retry(one, members)
        ]
        able = [member for member in best if member.can_be_forked and member.costs]
        parents = [member for member in able if member.status in (PAUSED, RUNNING)]
        for member in [*given_up, *(member for member in here if member in worst)]:
            for parent in self._random(number).sample(parents, len(parents)):
                begun = parent.epochs
                if values := self._explored([*members, *repeated], parent, begun, number):
                    return Replace(
                        member.number, parent.number, begun, values, self.next_stop(begun)
                    )
        return GoOn(here[0].number, self.next_stop(epoch))

    def current(self, members: Iterable[Member]) -> list[Member]:
        """Those that nobody has replaced."""
        members = list(members)
        gone = {member.replaces for member in members}
        return [member for member in members if member.number not in gone]

    def next_stop(self, epochs_done: int) -> int | None:
        """The epoch after which a member pauses next; None where it goes to its end."""
        stop = (epochs_done // self.interval + 1) * self.interval
        return stop if stop < self.epochs else None

    def _extremes(self, members: Sequence[Member], epoch: int) -> tuple[list[Member], list[Member]]:
        """Who holds the best places and the worst, by what each had come to until this epoch, by
        their numbers.

        The worst are worse than all of the best. Of a place that was given up since it counts what
        was reached there."""
        before = {member.number: member for member in members}
        found = list[tuple[float, Member]]()
        holders = self.current(members)
        for holder in holders:
            member: Member | None = holder
            cost = _cost(holder, epoch)
            while cost is None and member is not None:
                member = None if member.replaces is None else before.get(member.replaces)
                cost = None if member is None else _cost(member, epoch)
            if cost is not None:
                found.append((cost, holder))
        ranked = sorted(found, key=lambda pair: (pair[0], pair[1].number))
        count = min(
            int(len(holders) * self.quantile), len(ranked) // 2
        )  # some may have come to nothing yet
        if not count:
            return [], []
        bound = ranked[count - 1][0]
        best, worst = ranked[:count], [pair for pair in ranked[-count:] if pair[0] > bound]
        by_number = [
            sorted((holder for _, holder in some), key=lambda one: one.number)
            for some in (best, worst)
        ]
        return by_number[0], by_number[1]

    def _drawn(self, members: Iterable[Member], number: int) -> Values | None:
        """A point of the space at random, which no member before has; None where there seems to be
        no further one.
        """
        before = (member for member in members if member.number < number)
        chance, known = self._random(number), {as_key(member.values) for member in before}
        for _ in range(DRAWS):
            found = self.space.point([each.at(chance.random()) for each in self.space.parameters])
            if as_key(found) not in known:
                return found
        return None

    def _explored(
        self, members: Iterable[Member], parent: Member, epoch: int, number: int
    ) -> Values | None:
        """Other values than the parent's, and than those of its other forks here; None where there
        seem to be none.
        """
        chance = self._random(number, "explore")
        here = [
            member
            for member in members
            if (member.parent, member.began_at) == (parent.number, epoch)
        ]
        known = {as_key(member.values) for member in (parent, *here)}
        for _ in range(DRAWS):
            if as_key(found := self.explored(parent.values, chance)) not in known:
                return found
        return None

    def explored(self, values: Mapping[str, Value], chance: random.Random) -> Values:
        """Each of the values changed a little, or drawn anew, within the space."""
        found = list[Value]()
        for each in self.space.parameters:
            anew, up, drawn = (
                chance.random() < self.resample,
                chance.random() < 0.5,
                each.at(chance.random()),
            )
            value = values[each.name] if each.is_active(values) else drawn
            found.append(drawn if anew else _changed(each, value, up=up))
        return self.space.point(found)

    def _random(self, number: int, what: str = "") -> random.Random:
        return random.Random(f"{self.seed} {number} {what}")


def _may_retry(member: Member, members: Iterable[Member]) -> bool:
    """Whether the place of a fork that has come to nothing by its values is given to another."""
    before = {each.number: each for each in members}
    each: Member | None = member
    for _ in range(MOST_BAD):
        if each is None or not each.is_bad or each.costs or each.replaces is None:
            return member.is_bad
        each = before.get(each.replaces)
    return False


def _cost(member: Member, epoch: int) -> float | None:
    return math.inf if member.status == FAILED else member.cost_until(epoch)


def _changed(parameter: Parameter, value: Value, *, up: bool) -> Value:
    """A number times 0.8 or 1.2, by one step at least; of choices the one beside it."""
    if parameter.kind == "categorical":
        place = parameter.choices.index(str(value)) + (1 if up else -1)
        return parameter.choices[min(max(place, 0), len(parameter.choices) - 1)]
    number = float(value)
    changed = number * (LARGER if up else SMALLER)
    if parameter.kind == "int" or parameter.step is not None:
        step = parameter.step or 1
        steps = round((changed - number) / step) or (1 if up else -1)
        changed = number + steps * step
    changed = min(parameter.high, max(parameter.low, changed))
    return int(changed) if parameter.kind == "int" else parameter.rounded(changed)


def _worst_if_nan(cost: float) -> float:
    return math.inf if math.isnan(cost) else cost
