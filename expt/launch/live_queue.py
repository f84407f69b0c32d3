"""A queue of cluster jobs that can be told, while it waits for them, to submit more, and to pause
and drop some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from expt.errors import ExptError, Interrupted
from expt.launch.job import DROPPED, QUEUED, Job, request_of
from expt.launch.submitit_jobs import Queue
from expt.runs.attempt import record_end, record_pause
from expt.runs.result import INTERRUPTED, PAUSED, RUNNING, read_result


class LiveQueue(Queue):
    """Each method is called from within the loop, by the observer's `tick`; they are those of
    LivePool.

    To pause a job is to cancel it, before which its run saves; to let it go on is to submit it once
    more."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._all: dict[Job, None] = {}
        self._held: dict[Job, None] = {}
        self._stopping: dict[Job, bool] = {}  # cancelled ones, and whether they are held then
        self._dropped: set[Job] = set()  # cancelled ones that do not go on
        self.is_paused = False
        """Whether no further job is to be submitted, of those that come later either."""
        self.is_dropped: Callable[[Job], bool] = lambda _: False
        """Whether a job that comes is not to be submitted."""
        self.is_held: Callable[[Job], bool | None] = lambda _: None
        """Whether one is to wait until `let_go_on`; None where `is_paused` says so."""

    @property
    def jobs(self) -> list[Job]:
        """All that have come, in their order."""
        return list(self._all)

    @property
    def held(self) -> list[Job]:
        """Those that have paused, or are not to be submitted, until `let_go_on`."""
        return [*self._held, *(job for job, held in self._stopping.items() if held)]

    @property
    def rests(self) -> bool:
        """Whether nothing is under way, or in the cluster's queue, and a person has paused it."""
        return (self.is_paused or bool(self._held)) and not self._active

    def add(self, job: Job) -> None:
        """Submit a further job."""
        self._submit([job])

    def pause(self, jobs: Iterable[Job]) -> None:
        """Let running ones save and end, and waiting ones leave the cluster's queue, until
        `let_go_on`.
        """
        for job in jobs:
            if job in self._active:
                self._cancel(job)
                self._stopping[job] = True

    def let_go_on(self, jobs: Iterable[Job]) -> None:
        """Submit those once more that `pause` holds."""
        ready = [job for job in jobs if job in self._held]
        for job in jobs:
            if job in self._stopping:
                self._stopping[job] = False
            self._held.pop(job, None)
        self._go_on(ready)

    def drop(self, jobs: Iterable[Job]) -> None:
        """End them: what they have come to is kept."""
        for job in jobs:
            if job in self._active:
                self._cancel(job)
                self._stopping.pop(job, None)
                self._dropped.add(job)
            else:
                held = job in self._held
                self._held.pop(job, None)
                self._tell_dropped(job, record=held)

    def _submit(self, jobs: list[Job]) -> None:
        """For those that come: one that was told to go on since is asked about no more."""
        self._all |= dict.fromkeys(jobs)
        dropped = [job for job in jobs if not job.error and self.is_dropped(job)]
        held = [
            job for job in jobs if not job.error and job not in dropped and self._is_to_wait(job)
        ]
        self._held |= dict.fromkeys(held)
        super()._submit([job for job in jobs if job not in held and job not in dropped])
        for job in dropped:
            self._tell_dropped(job, record=True)

    def _go_on(self, jobs: list[Job]) -> None:
        if self._finishing:
            self._held |= dict.fromkeys(jobs)
        else:
            super()._submit(jobs)

    def _is_to_wait(self, job: Job) -> bool:
        held = self.is_held(job)
        return bool(self._finishing) or (self.is_paused if held is None else held)

    def _is_busy(self) -> bool:
        return super()._is_busy() or (bool(self._held) and self._finishing is None)

    def _conclude(self, job: Job, submitted: Any) -> None:
        error = self._outcome(job, submitted)
        if error is None or not (job in self._stopping or job in self._dropped):
            self._end(job, error)  # also one that has come to its end before it was cancelled
        elif job in self._dropped:
            self._end(job, self._recorded(job))
        else:
            self._set_aside(job)

    def _set_aside(self, job: Job) -> None:
        held = self._stopping.pop(job)
        if read_result(job.paths).get("status") in (RUNNING, INTERRUPTED):
            record_pause(job.paths, self._worked_until(job))
        self._leave(job)
        job.go_on(request_of(job).until_epoch)
        self._observer.job_held(job)
        if held:
            self._held[job] = None
        else:
            self._go_on([job])

    def _tell_dropped(self, job: Job, *, record: bool) -> None:
        if job.status not in (QUEUED, PAUSED):
            return
        job.status, job.error = INTERRUPTED, self._recorded(job) if record else Interrupted(DROPPED)
        self._observer.job_dropped(job)

    def _end(self, job: Job, error: ExptError | None) -> None:
        self._stopping.pop(job, None)
        self._dropped.discard(job)
        super()._end(job, error)

    def _recorded(self, job: Job) -> Interrupted:
        """That it was dropped, also in its record, if it has one."""
        error = Interrupted(DROPPED)
        if job.paths.result.exists():
            record_end(job.paths, error, self._worked_until(job))
        return error
