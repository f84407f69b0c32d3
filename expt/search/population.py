"""Population based training in run folders: who is a member, and what its next run is;
expt.search.pbt decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from expt.config.schema import RunConfig
from expt.config.search import Search
from expt.config.task_rules import measured_each_epoch
from expt.errors import ConfigError, FolderInUse, did_you_mean, warn
from expt.runs import checkpoint_file, forkable
from expt.runs.folder_lock import at_work
from expt.runs.parent import kept_by
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PAUSED, Record
from expt.runs.typed import quoted
from expt.search.alike import Changes, changes_length, keys_changed
from expt.search.goals import Goal
from expt.search.history import Point, best
from expt.search.pausing import remove_checkpoints
from expt.search.pbt import Choice, GoOn, Member, Population, Replace
from expt.search.space import Space, Values


class NewRun(NamedTuple):
    """A further member, or a fork that takes another's place."""

    values: Values
    words: Sequence[str] = ()
    """What is typed beside its values."""
    replaces: int | None = None
    parent: int | None = None
    began_at: int = 0
    """See Point."""


class PopulationTraining:
    """A population whose members are like `config`, with the methods of `Pausing`."""

    def __init__(
        self,
        settings: Search,
        config: RunConfig,
        goals: Sequence[Goal],
        space: Space,
        changes: Changes = MappingProxyType({}),
    ) -> None:
        """Raises ConfigError where members cannot be compared, or forks cannot have what is
        searched.
        """
        _check(settings, config, goals, space, changes)
        self._goal, self._keeps, self._epochs = goals[0], settings.keep_checkpoints, config.epochs
        self._population = Population(
            space=space,
            size=settings.runs,
            epochs=config.epochs,
            interval=settings.interval,
            quantile=settings.quantile,
            resample=settings.resample,
            seed=settings.seed,
        )
        self.taken: Collection[int] = ()
        """The numbers of all runs in the folder, whatever they are."""
        self._stops: dict[int, int | None] = {}
        self._found = set[tuple[int, int, int]]()  # choices whose parent was there
        self._repeated = list[Member]()  # other values that were a run which was there
        self._gone = set[int]()  # the numbers of those that can't be forked any more
        self._orphans: dict[int, bool] = {}  # of the forks that were refused

    def first_stop(self, number: int) -> int | None:
        """The epoch after which a new run of that number pauses; None where it goes to its end."""
        return self._stops.get(number, self._population.next_stop(0))

    def stop_of(self, number: int, record: Record) -> int | None:
        """Where a run that was begun, and has come to no end, stops: where it was to, when it was
        begun.
        """
        return record.get("until_epoch") if "attempts" in record else self.first_stop(number)

    def next(self, points: Sequence[Point]) -> tuple[Point, int | None] | None:
        """The member that goes on now, and the epoch after which it pauses again; None where none
        does.
        """
        choice = self._choice(points)
        if not isinstance(choice, GoOn):
            return None
        return next(point for point in points if point.number == choice.number), choice.until

    def next_number(self, points: Sequence[Point]) -> int:
        """That of the run which begins next, see Population."""
        return self._population.next_number(self._members(points), self._others(points))

    def gone(self, points: Sequence[Point]) -> list[int]:
        """The numbers of forks whose runs are gone, and that are not made again."""
        have = {point.number for point in points if point.number is not None}.union(self.taken)
        return [
            number
            for number in range(self._population.size, max(have, default=-1))
            if number not in have
        ]

    def wants_more(self, points: Sequence[Point]) -> bool:
        """Whether a new run is to begin now."""
        choice = self._choice(points)
        return choice is not None and not isinstance(choice, GoOn)

    def new(self, points: Sequence[Point], number: int) -> NewRun:
        """The run of that number, where one is to begin now."""
        choice = self._choice(points)
        assert choice is not None
        assert not isinstance(choice, GoOn)
        if not isinstance(choice, Replace):
            return NewRun(choice.values)
        parent = next(point for point in points if point.number == choice.parent)
        assert parent.folder is not None
        epoch = self._epoch_there(parent.folder, choice.epoch)
        self._stops[number] = self._population.next_stop(epoch)
        word = f"fork={quoted(f'{parent.folder}@epoch:{epoch}')}"
        return NewRun(choice.values, [word], choice.number, choice.parent, epoch)

    def repeat(self, number: int, values: Values, new: NewRun) -> None:
        """Choose these values no more: their run is that of others."""
        again = Member(
            number=number, values=values, status=COMPLETED, parent=new.parent, began_at=new.began_at
        )
        self._repeated.append(again)

    def _epoch_there(self, parent: Path, known: int) -> int:
        """That of the checkpoint to fork: the one that is known, or of a parent that has trained on
        its newest.
        """
        there = forkable.epochs_of(parent)
        return (
            known
            if known in there
            else max((each for each in there if each < self._epochs), default=known)
        )

    def keep(self, points: Sequence[Point], new: NewRun) -> None:
        """Let the parent of a fork keep the checkpoint that it is forked from."""
        for parent in points:
            if (
                parent.number is not None
                and parent.number == new.parent
                and parent.folder is not None
            ):
                forkable.keep(parent.folder, new.began_at)

    def clear(self, points: Sequence[Point], planned: Collection[int]) -> None:
        """Remove the checkpoints of members that have given up their places, whatever else is
        `planned`.

        What others were forked from is kept where the best, or what may become the best, is
        descended from it."""
        if self._keeps:
            return
        gone, kept = {point.replaces for point in points} - {None}, self._ancestry(points)
        for point in points:
            if point.folder is None or point.number is None:
                continue
            paths = RunPaths(point.folder)
            if None not in (epochs := kept.get(point.number, set())):
                names = {paths.forked_after(epoch) for epoch in epochs if epoch is not None}
                _remove(paths, {*paths.kept_for_forks} - names, has_ended=point.status == COMPLETED)
            if point.number in gone and point.status == PAUSED:
                remove_checkpoints(paths)

    def _ancestry(self, points: Sequence[Point]) -> dict[int, set[int | None]]:
        """After which epochs each point was forked on the way to the best; None where that is not
        known yet.
        """
        by_number = {point.number: point for point in points}
        leading = best(points, [self._goal])
        replaced = {point.replaces for point in points}
        found: dict[int, set[int | None]] = {}
        for point in points:
            may_lead = (
                point.status != COMPLETED and not point.is_bad and point.number not in replaced
            )
            if not (may_lead or (leading is not None and point.objectives == leading.objectives)):
                continue
            member: Point | None = point
            while member is not None and member.parent is not None:
                found.setdefault(member.parent, set()).add(member.began_at or None)
                member = by_number.get(member.parent)
        return found

    def _choice(self, points: Sequence[Point]) -> Choice | None:
        folders = {point.number: point.folder for point in points}
        while True:
            choice = self._population.choose(
                self._members(points), self._others(points), self._repeated
            )
            if not isinstance(choice, Replace):
                return choice
            key = choice.number, choice.parent, choice.epoch
            if key in self._found or self._is_there(choice.parent, folders):
                self._found.add(key)  # who asks once more, just after, gets the same answer
                return choice

    def _others(self, points: Sequence[Point]) -> set[int]:
        return {*self.taken} - {point.number for point in points}

    def _members(self, points: Sequence[Point]) -> list[Member]:
        folders = {point.number: point.folder for point in points}
        return [self._member(point, folders) for point in points if point.number is not None]

    def _is_there(self, number: int, folders: Mapping[int | None, Path | None]) -> bool:
        """Whether the member can be forked; one that can't is told of once, and chosen no more."""
        folder = folders.get(number)
        if number not in self._gone and (folder is None or not forkable.is_there(folder)):
            warn(
                f"{folder}: has no checkpoint to fork any more; search=pbt goes on without it as a"
                " parent"
            )
            self._gone.add(number)
        return number not in self._gone

    def _member(self, point: Point, folders: Mapping[int | None, Path | None]) -> Member:
        assert point.number is not None
        if point.is_refused and point.parent is not None and point.number not in self._orphans:
            self._orphans[point.number] = not self._is_there(point.parent, folders)
        return Member(
            number=point.number,
            values=point.values,
            status=point.status,
            costs={epoch: self._goal.cost(value) for epoch, value in point.rung_values.items()},
            replaces=point.replaces,
            parent=point.parent,
            began_at=point.began_at,
            can_be_forked=point.number not in self._gone,
            is_orphan=self._orphans.get(point.number, False),
            is_bad=point.is_bad or point.is_refused,
        )


def _remove(paths: RunPaths, checkpoints: Collection[Path], *, has_ended: bool) -> None:
    """With their parts; those of a run that goes on it removes itself as it writes others."""
    checkpoint_file.remove(checkpoints)
    if checkpoints and paths.parts and has_ended:
        with contextlib.suppress(FolderInUse), at_work(paths):
            checkpoint_file.remove_unnamed(paths.checkpoints)


def _check(
    settings: Search, config: RunConfig, goals: Sequence[Goal], space: Space, changes: Changes
) -> None:
    kept_of = {
        name: next(filter(None, map(kept_by, keys_changed(name, changes))), None)
        for name in dict.fromkeys(each.name for each in space.parameters)
    }
    problems = [
        f"{name}: a fork keeps {kept}, so search=pbt can't change it on the way; search settings of"
        " the training, as optimizer.lr, or use search=tpe"
        for name, kept in kept_of.items()
        if kept
    ]
    if (of_lengths := changes_length(space, changes)) is not None:
        problems.append(
            f"epochs: search=pbt compares runs of as many epochs{of_lengths}; give it one value"
        )
    if settings.rungs is not None:
        problems.append(
            f"search.rungs={settings.rungs}: search=pbt has pauses of its own; leave one of"
            " them out"
        )
    if settings.warm_start:
        problems.append(
            "search.warm_start: search=pbt begins with points at random; leave it out, or use"
            " search=tpe"
        )
    if len(goals) > 1:
        problems.append(
            f"objective: search=pbt has one goal alone; use search=nsga2 or tpe for {len(goals)}"
        )
    measured = measured_each_epoch(config)
    if goals[0].tag not in measured:
        problems.append(
            f"objective={goals[0].tag}: search=pbt needs what is measured after each epoch; use one"
            f" of {', '.join(measured)}.{did_you_mean(goals[0].tag, measured)}"
        )
    if settings.interval >= config.epochs:
        problems.append(
            f"search.interval={settings.interval}: a run has epochs={config.epochs}, and would"
            " never pause; give less, or more epochs"
        )
    if problems:
        raise ConfigError(problems)
