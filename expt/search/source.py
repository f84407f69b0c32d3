"""The source that the pool asks for the next job of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from expt.errors import RunFailed
from expt.launch.job import QUEUED, Job, request_of
from expt.runs import spending
from expt.runs.paths import RunPaths
from expt.runs.result import INTERRUPTED, RUNNING, read_result
from expt.runs.view.summary import epochs_done
from expt.runs.worker_error import in_one_line
from expt.search.budget import Budget
from expt.search.history import Point
from expt.search.search import Searching
from expt.search.space import Values


def _devices(job: Job) -> int:
    config = request_of(job).config
    return len(job.devices) or config.world_size * config.threads


def running_s(job: Job, now: float) -> float:
    """What devices of this machine have been busy for with a job since it has started."""
    return _devices(job) * (now - job.started_at)


def running_elsewhere_s(job: Job, _: float) -> float:
    """The same of a job of a cluster, which may wait in its queue: by its record."""
    record = read_result(job.paths)
    if record.get("status") != RUNNING:
        return 0.0
    return spending.num_devices(record) * max(0.0, time.time() - record["started"])


class Source(Iterator[Job | None]):
    """The jobs of a search, each chosen when there is room for it; None means that nothing can be
    said yet.

    Without `has_room`, or with a `batch`, so many are chosen together, and the next when all of
    them have ended."""

    def __init__(
        self,
        searching: Searching,
        make: Callable[[int, Values], Job | None],
        again: Callable[[Point], Job | None],
        has_room: Callable[[], bool] | None,
        *,
        batch: int | None = None,
        budget: Budget | None = None,
        finish: Callable[[str], None] = lambda _: None,
        running_s: Callable[[Job, float], float] = running_s,
    ) -> None:
        """`make` gives the job of a new point, `again` that of one that has come to no end; None
        for a known job.

        `finish` is told that the budget is used up: all is to end. `running_s` is what devices have
        been busy for with a job since it has started."""
        self._searching, self._make, self._again, self._has_room = searching, make, again, has_room
        self._batch, self._left_of_batch = batch, 0
        self._budget, self._finish = budget, finish
        self._unfinished = searching.unfinished
        self._running_s = running_s
        self._under_way: list[Job] = []
        self._promoted_from: dict[
            Path, tuple[str, str]
        ] = {}  # in which state: who comes back as it was would for ever
        self._jobs: dict[Path, Job] = {}  # by their folders
        self._counted: dict[
            Job, float
        ] = {}  # of those that wait once more, up to which start their cost is known
        self.is_over = False
        """Whether there is no further job, now or later."""
        self.is_exhausted = False
        """Whether the space has no further point."""
        self.is_spent = False
        """Whether that is because the budget is used up."""

    def __next__(self) -> Job | None:
        if self.has_spent_all():
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

    def has_spent_all(self) -> bool:
        """Look what has ended since, and whether the budget is used up; then all is to end."""
        self._look()
        if self._budget is not None and self._budget.left_s(self.spent_s) <= 0:
            self.is_over = self.is_spent = True
            self._finish(f"search.budget={self._budget.text} is used up")
        return self.is_spent

    @property
    def spent_s(self) -> float:
        """What devices have been busy for, with the runs under way."""
        now = time.monotonic()
        live = [job for job in self._under_way if job.status == RUNNING]
        return self._searching.spent_s + sum(self._running_s(job, now) for job in live)

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
        while self._unfinished:
            point = self._unfinished.pop(0)
            if job := self._again(point):
                searching.begin_again(point)
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
        record = read_result(RunPaths(point.folder))
        state = str(record.get("status")), epochs_done(record)
        job = self._jobs.get(point.folder)
        if self._promoted_from.get(point.folder) == state:
            if job and job.error:  # a full disk, maybe, on which its record could not say so either
                why = in_one_line(str(job.error), with_log=False)
                raise RunFailed(
                    f"{point.folder}: could not go on: {why}; once that is mended, type the same"
                    " command"
                )
            raise RunFailed(
                f"{point.folder}: was to go on, and has come back {state[0]} after {state[1]}, as"
                " it was; remove the folder, and the same command makes the point again"
            )
        self._promoted_from[point.folder] = state
        job = job or self._again(point)
        if job:
            job.go_on(until_epoch)
        return job

    def _look(self) -> None:
        """Read what has become of those that have ended since."""
        ended = [job for job in self._under_way if job.status not in (QUEUED, RUNNING)]
        for job in ended:
            self._under_way.remove(job)
            self._searching.look(job.paths)
        for job in self._under_way:  # it is tried again
            if job.status == QUEUED and job.started_at > self._counted.get(job, 0.0):
                self._counted[job] = job.started_at
                self._searching.count_spent(job.paths)
        for folder, job in self._jobs.items():
            if job.status == INTERRUPTED:
                self._searching.drop(folder)
        if ended:
            self._searching.clear()
