"""What a search does next, decided from its history alone; and the source that the pool asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from expt.config.search import Search
from expt.errors import ConfigError
from expt.launch.job import QUEUED, Job, request_of
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, INTERRUPTED, PAUSED, RUNNING, read_result
from expt.runs.spending import device_s
from expt.search.budget import Budget
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
        self._others = [point for source in settings.warm_start for point in _others(reader, Path(source))]
        self._points = {point.folder: point for point in reader.points(folder)}
        self.count = 1 + max((point.number for point in self.own if point.number is not None), default=-1)
        """How many points the search has chosen: the number of the next."""

    @property
    def own(self) -> list[Point]:
        """The points in this search's folder, in their order."""
        return in_order(self._points.values())

    @property
    def points(self) -> list[Point]:
        """All that is known, in the order in which a sampler learns of it."""
        return [*self._others, *self.own]

    @property
    def is_complete(self) -> bool:
        """Whether there are as many points as were asked for; of a population, whether none is to begin now."""
        if self._population:
            return not self._population.wants_more(self.own)
        return self.count >= self.settings.runs

    @property
    def unfinished(self) -> list[Point]:
        """Points that were begun and have come to no end: the command was killed, maybe, or had rungs."""
        ended = (COMPLETED, PAUSED) if self.pausing else (COMPLETED,)
        replaced = {point.replaces for point in self.own}
        own = [point for point in self.own if point.number is not None and point.number not in replaced]
        return [point for point in own if point.status not in ended and not point.is_bad]

    @property
    def spent_s(self) -> float:
        """What the devices of its runs have been busy for."""
        return sum(point.device_s for point in self._points.values())

    @property
    def best(self) -> Point | None:
        """The best so far in this folder."""
        going_on = [replace(each, status=PAUSED) for each in self.own if each.status == RUNNING and each.objectives]
        return best([*self.own, *going_on], self.goals)

    def next(self) -> tuple[int, Values] | None:
        """The next point and its number; None where there is none left."""
        number = self.count
        if self._population:
            self._new[number] = new = self._population.new(self.own, number)
            return number, new.values
        values = suggest(self.space, self.points, number, self.settings, self.goals)
        return None if values is None else (number, values)

    def new(self, number: int) -> NewRun:
        """What is asked for beside the values of the point that `next` has given that number."""
        return self._new.get(number, NewRun({}))

    def promote(self) -> tuple[Point, int | None] | None:
        """The paused run that goes on now, counted as under way, and the epoch after which it pauses again."""
        while found := self.pausing.next(self.own) if self.pausing else None:
            if (folder := found[0].folder) is None or read_result(RunPaths(folder)):
                self._points[folder] = replace(found[0], status=RUNNING)
                return found
            del self._points[folder]  # a person has removed it since
        return None

    def stop_of(self, point: Point) -> int | None:
        """The epoch after which a run that was begun pauses; None where it goes to its end."""
        if self.pausing is None or point.number is None or point.folder is None:
            return None
        return self.pausing.stop_of(point.number, read_result(RunPaths(point.folder)))

    def first_stop(self, number: int) -> int | None:
        """The epoch after which a new run of that number pauses; None where it goes to its end."""
        return self.pausing.first_stop(number) if self.pausing else None

    def clear(self, planned: int | None = None) -> None:
        """Remove the checkpoints of which none goes on, in a search of as many points as are `planned`."""
        if self.pausing:
            self.pausing.clear(self.own, self.settings.runs if planned is None else planned)

    def begin(self, number: int, values: Values, paths: RunPaths | None) -> None:
        """Count a point as under way; without `paths` it is another under another name."""
        self.count = number + 1
        if paths is None:
            return
        new = self.new(number)
        if self._population:
            self._population.keep(self.own, new)
        known = self._points.get(paths.folder)
        if known is None or known.number is None:
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
        """Let what a run has cost so far count, which is still under way: it waits for another turn."""
        known = self._points.get(paths.folder)
        if known is not None:
            self._points[paths.folder] = replace(known, device_s=device_s(read_result(paths)))

    def look(self, paths: RunPaths) -> Point | None:
        """Read again what has become of a run."""
        point = self._reader.point(paths)
        before = self._points.get(paths.folder)
        if point is None:
            return before
        if point.number is None and before is not None:
            point = _numbered(point, before.number)
        self._points[paths.folder] = point
        return point


def _others(reader: Reader, folder: Path) -> list[Point]:
    """The points of another sweep, whose numbers count for nothing here."""
    if not folder.is_dir():
        raise ConfigError(f"search.warm_start={folder}: there is no such folder; give that of a sweep")
    found = [_numbered(point, None) for point in reader.points(folder)]
    if not found:
        raise ConfigError(f"search.warm_start={folder}: holds no run with a point of this space")
    return found


def _numbered(point: Point, number: int | None) -> Point:
    return replace(point, number=number)


def _devices(job: Job) -> int:
    config = request_of(job).config
    return len(job.devices) or config.world_size * config.threads


class Source(Iterator[Job | None]):
    """The jobs of a search, each chosen when there is room for it; None means that nothing can be said yet.

    Without `has_room`, or with a `batch`, so many are chosen together, and the next when all of them have ended.
    """

    def __init__(
        self,
        searching: Searching,
        make: Callable[[int, Values], Job | None],
        again: Callable[[Point], Job | None],
        has_room: Callable[[], bool] | None,
        added: Iterable[Job] = (),
        *,
        batch: int | None = None,
        budget: Budget | None = None,
        finish: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`make` gives the job of a new point, `again` that of one that has come to no end; None for a known job.

        Those `added` to an earlier command come first. `finish` is told that the budget is used up: all is to end.
        """
        self._searching, self._make, self._again, self._has_room = searching, make, again, has_room
        self._batch, self._left_of_batch = batch, 0
        self._budget, self._finish = budget, finish
        self._added, self._unfinished = iter(added), searching.unfinished
        self._under_way: list[Job] = []
        self._jobs: dict[Path, Job] = {}  # by their folders
        self._counted: dict[Job, float] = {}  # of those that wait once more, up to which start their cost is known
        self.is_over = False
        """Whether there is no further job, now or later."""
        self.is_exhausted = False
        """Whether the space has no further point."""
        self.is_spent = False
        """Whether that is because the budget is used up."""

    def __next__(self) -> Job | None:
        self._look()
        if self._budget is not None and self._budget.left_s(self.spent_s) <= 0:
            self.is_over = self.is_spent = True
            self._finish(f"search.budget={self._budget.text} is used up")
            raise StopIteration
        if not self._may_ask():
            return None
        job = self._next()
        if job is not None:
            self._under_way.append(job)
            self._jobs[job.paths.folder] = job
        elif not self._under_way:
            if self.is_exhausted:
                self._searching.clear(self._searching.count)
            self.is_over = True
            raise StopIteration
        return job

    @property
    def spent_s(self) -> float:
        """What devices have been busy for, with the runs under way."""
        now = time.monotonic()
        live = [job for job in self._under_way if job.status == RUNNING]
        return self._searching.spent_s + sum(_devices(job) * (now - job.started_at) for job in live)

    def _may_ask(self) -> bool:
        """Whether another run could start now; of a batch, whether it is to be filled."""
        if self._batch is None:
            return self._has_room is None or self._has_room()
        if not self._under_way:
            self._left_of_batch = self._batch
        self._left_of_batch -= 1
        return self._left_of_batch >= 0

    def _next(self) -> Job | None:
        searching = self._searching
        if job := next(self._added, None):
            return job
        while self._unfinished:
            point = self._unfinished.pop(0)
            if job := self._again(point):
                job.pause_after(searching.stop_of(point))
                return job
        if promoted := searching.promote():
            return self._promoted(*promoted)
        while not searching.is_complete and not self.is_exhausted:
            found = searching.next()
            if found is None:
                self.is_exhausted = True
                break
            job = self._make(*found)
            searching.begin(*found, job.paths if job else None)
            if job:
                job.pause_after(searching.first_stop(found[0]))
                return job
        return None

    def _promoted(self, point: Point, until_epoch: int | None) -> Job | None:
        """The job of a paused run, of this command or an earlier one."""
        assert point.folder is not None
        job = self._jobs.get(point.folder) or self._again(point)
        if job:
            job.go_on(until_epoch)
        return job

    def _look(self) -> None:
        """Read what has become of those that have ended since."""
        ended = [job for job in self._under_way if job.status not in (QUEUED, RUNNING)]
        for job in ended:
            self._under_way.remove(job)
            self._searching.look(job.paths)
        for job in self._under_way:  # a person has paused it, or it is tried again
            if job.status == QUEUED and job.started_at > self._counted.get(job, 0.0):
                self._counted[job] = job.started_at
                self._searching.count_spent(job.paths)
        for folder, job in self._jobs.items():
            if job.status == INTERRUPTED:
                self._searching.drop(folder)
        if ended:
            self._searching.clear()
