"""What a search does next, decided from its history alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from expt.config.search import Search
from expt.errors import warn
from expt.runs import forkable
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, INTERRUPTED, PAUSED, RUNNING, Record, read_result
from expt.runs.spending import device_s
from expt.search.folder import forget_training, of_another, read
from expt.search.history import Point, Reader, best, in_order
from expt.search.pausing import Pausing
from expt.search.population import NewRun, PopulationTraining
from expt.search.sampler import suggest
from expt.search.space import Space, Values


class Searching:
    """A search in one folder: what is known of it, and which point comes next."""

    def __init__(
        self,
        folder: Path,
        space: Space,
        settings: Search,
        reader: Reader,
        pausing: Pausing | PopulationTraining | None = None,
    ) -> None:
        self.space, self.settings, self.goals, self.pausing = space, settings, reader.goals, pausing
        self._reader = reader
        self._population = pausing if isinstance(pausing, PopulationTraining) else None
        self._new: dict[int, NewRun] = {}
        self.found = found = read(folder, reader)
        """What lay in the folder when the search began."""
        self._points, self._taken, self._num_repeated = found.points, {*found.numbers}, 0
        if self._population:
            self._population.taken = self._taken
        warm = (of_another(reader, Path(source), found.points) for source in settings.warm_start)
        self._others = list(itertools.chain(*warm))
        self._leader = self.best

    @property
    def count(self) -> int:
        """How many points the search has, those that turned out to be others under other names too."""
        return self._num_repeated + sum(point.number is not None for point in self._points.values())

    @property
    def total(self) -> int:
        """How many points there are to be, as far as is known; a population has others for each
        place given up.
        """
        forks = sum(point.replaces is not None for point in self._points.values())
        return forks + max(self.settings.runs, self.count - forks)

    @property
    def own(self) -> list[Point]:
        """The points in this search's folder, in their order."""
        return in_order(self._points.values())

    @property
    def points(self) -> list[Point]:
        """All that a sampler can learn from, in its order."""
        return [*self._others, *self.own]

    @property
    def is_complete(self) -> bool:
        """Whether there are as many points as were asked for; of a population, whether none is to
        begin now.
        """
        if self._population:
            return not self._population.wants_more(self.own)
        return self.count >= self.settings.runs

    @property
    def unfinished(self) -> list[Point]:
        """Points that were begun and have come to no end: the command was killed, maybe, or had
        rungs.
        """
        ended = (COMPLETED, PAUSED) if self.pausing else (COMPLETED,)
        replaced = {point.replaces for point in self.own}
        own = [
            point for point in self.own if point.number is not None and point.number not in replaced
        ]
        return [point for point in own if point.status not in ended and not point.is_bad]

    @property
    def stopped(self) -> list[RunPaths]:
        """The runs that were begun and would go on in another command."""
        return [
            RunPaths(point.folder)
            for point in self.unfinished
            if point.folder and _has_begun(point)
        ]

    @property
    def num_begun(self) -> int:
        """How many points have begun: others were chosen, and stopped before they had come to a
        record.
        """
        return self.count - sum(not _has_begun(point) for point in self.unfinished)

    @property
    def num_left(self) -> int:
        """How many runs are to begin, or to be brought to their end; not those that wait at a rung."""
        known = self.space.without([point.values for point in self.points])
        new = max(0, self.settings.runs - self.count)
        return len(self.unfinished) + (new if known is None else min(new, len(known)))

    @property
    def spent_s(self) -> float:
        """What the devices of its runs have been busy for."""
        return sum(self.found.spent_elsewhere_s.values()) + sum(
            point.device_s for point in self._points.values()
        )

    @property
    def best(self) -> Point | None:
        """The best so far in this folder."""
        going_on = [
            replace(each, status=PAUSED)
            for each in self.own
            if each.status == RUNNING and each.objectives
        ]
        return best([*self.own, *going_on], self.goals)

    def is_new_best(self, paths: RunPaths) -> bool:
        """Whether the run that has just ended has become the best so far, or the best has become
        better by it.
        """
        self.look(paths)
        before, self._leader = self._leader, self.best
        if self._leader is None or self._leader.folder != paths.folder:
            return False
        return before is None or (before.folder, before.objectives) != (
            paths.folder,
            self._leader.objectives,
        )

    def next(self) -> tuple[int, Values] | None:
        """The next point and its number; None where there is none left."""
        if self._population:
            number = self._population.next_number(self.own)
            self._new[number] = new = self._population.new(self.own, number)
            return number, new.values
        (number,) = self._free_numbers(1)
        of_others = sum(other < number for other in self.found.numbers_of_others)
        before = [point for point in self.points if point.number is None or point.number < number]
        later = [point for point in self.own if point.number is not None and point.number > number]
        values = suggest(self.space, before, number - of_others, self.settings, self.goals, later)
        return None if values is None else (number, values)

    def has(self, paths: RunPaths) -> bool:
        """Whether a run is one of its points, with a number: whatever else gives that run is a
        point named twice.
        """
        point = self._points.get(paths.folder)
        return point is not None and point.number is not None

    def is_missing(self, number: int) -> bool:
        """Whether no run has the number, though one has a higher one: its run is gone, or damaged,
        or had another's.
        """
        return number not in self._taken and number < max(self._taken, default=-1)

    @property
    def forks_gone(self) -> list[int]:
        """The numbers of forks of a population that are gone, where there is something left to do."""
        if not self._population or (self.is_complete and not self._population.next(self.own)):
            return []
        return self._population.gone(self.own)

    def _free_numbers(self, count: int) -> list[int]:
        """The lowest that no run of the folder has, and no point had in this command."""
        return list(
            itertools.islice(
                (number for number in itertools.count() if number not in self._taken), count
            )
        )

    def new(self, number: int) -> NewRun:
        """What is asked for beside the values of the point that `next` has given that number."""
        return self._new.get(number, NewRun({}))

    def promote(self) -> tuple[Point, int | None] | None:
        """The paused run that goes on now, counted as under way, and the epoch after which it
        pauses again.
        """
        while found := self.pausing.next(self.own) if self.pausing else None:
            record = read_result(RunPaths(folder)) if (folder := found[0].folder) else {}
            if folder is None or record:
                if (
                    folder
                    and record.get("resumable") is False
                    and not self._can_begin_again(folder, record)
                ):
                    continue
                self._points[folder] = replace(found[0], status=RUNNING)
                return found
            del self._points[folder]  # a person has removed it since
        return None

    def _can_begin_again(self, folder: Path, record: Record) -> bool:
        """Say so of a paused run whose checkpoints were removed; one that cannot goes on no more in
        this command.
        """
        if forkable.has_beginning(record, RunPaths(folder)):
            warn(
                f"{folder}: goes on after all, and from its beginning, as its checkpoints were"
                " removed"
            )
            return True
        began = f"the one that it is a fork of ({record['forked_from']['given']})"
        left = f"{began} is gone too; this cannot be mended, and it is left as it is"
        warn(f"{folder}: was to go on, but its checkpoints were removed, and {left}")
        self.drop(folder)
        return False

    def stop_of(self, point: Point) -> int | None:
        """The epoch after which a run that was begun pauses; None where it goes to its end."""
        if self.pausing is None or point.number is None or point.folder is None:
            return None
        return self.pausing.stop_of(point.number, read_result(RunPaths(point.folder)))

    def first_stop(self, number: int) -> int | None:
        """The epoch after which a new run of that number pauses; None where it goes to its end."""
        return self.pausing.first_stop(number) if self.pausing else None

    def clear(self, planned: int | None = None) -> None:
        """Remove the checkpoints of which none goes on, in a search of as many points as are
        `planned`.
        """
        if self.pausing:
            to_come = max(0, (self.settings.runs if planned is None else planned) - self.count)
            own = {point.number for point in self.own if point.number is not None}
            self.pausing.clear(self.own, own.union(self._free_numbers(to_come)))

    def begin_again(self, point: Point) -> None:
        """Let a run that has lost what it had measured be trained from its beginning."""
        if point.folder is not None and point.folder in self.found.damaged:
            forget_training(RunPaths(point.folder))

    def begin(self, number: int, values: Values, paths: RunPaths | None) -> None:
        """Count a point as under way; without `paths` it is another under another name."""
        self._taken.add(number)
        new, known = self.new(number), self._points.get(paths.folder) if paths else None
        if self._population and paths is not None:
            self._population.keep(self.own, new)
        if paths is None or (known and known.number is not None):
            self._num_repeated += 1
            if self._population:
                self._population.repeat(number, values, new)
        else:
            status = RUNNING if known is None else known.status
            objectives = () if known is None else known.objectives
            self._points[paths.folder] = Point(
                values=values,
                status=status,
                number=number,
                objectives=objectives,
                replaces=new.replaces,
                parent=new.parent,
                began_at=new.began_at,
                folder=paths.folder,
            )

    def drop(self, folder: Path) -> None:
        """Let a run that has paused not go on in this command."""
        point = self._points.get(folder)
        if point is not None and point.status == PAUSED:
            self._points[folder] = replace(point, status=INTERRUPTED)

    def count_spent(self, paths: RunPaths) -> None:
        """Let what a run has cost so far count, which is still under way: it waits for another
        turn.
        """
        known, spent_s = self._points.get(paths.folder), device_s(read_result(paths))
        if known is not None:
            self._points[paths.folder] = replace(known, device_s=spent_s)
        else:
            self.found.spent_elsewhere_s[paths.folder] = spent_s

    def look(self, paths: RunPaths) -> Point | None:
        """Read again what has become of a run."""
        before, point = self._points.get(paths.folder), self._reader.point(paths)
        if point is None:
            self.count_spent(paths)
            return before
        self.found.spent_elsewhere_s.pop(paths.folder, None)
        if before is not None and before.number is not None:
            point = replace(
                point,
                number=before.number,
                is_past_rungs=before.is_past_rungs and point.is_measured,
            )
        self._points[paths.folder] = point
        return point


def _has_begun(point: Point) -> bool:
    return point.folder is not None and RunPaths(point.folder).result.exists()
