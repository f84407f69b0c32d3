"""A pool that can be told, while it runs, to take further jobs, to pause and drop some, and to use
other GPUs.

A run in whose folder another command is at work waits until that has ended, or its last worker: a
search would choose without it otherwise, and go on to other points than one that was never killed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from expt.config.schema import RunConfig
from expt.errors import ConfigError, Diverged, ExptError, FolderInUse, Interrupted
from expt.launch.job import DROPPED, QUEUED, Job, request_of, workers_of
from expt.launch.packing import demand_of
from expt.launch.pool import Pool
from expt.runs.attempt import record_end, record_pause
from expt.runs.folder_lock import PATIENCE_S, is_held
from expt.runs.result import INTERRUPTED, PAUSED, RUNNING, read_result


class LivePool(Pool):
    """Each method is called from within the loop, by the observer's `tick`."""

    _patience_s = 0.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._held: dict[int, Job] = {}  # wait until a person lets them go on
        self._last: RunConfig | None = None  # the configuration of the job that was queued last
        self.is_paused = False
        """Whether no further run is to start, of those that come later either."""
        self.is_dropped: Callable[[Job], bool] = lambda _: False
        """Whether a job that comes is not to start."""
        self.is_held: Callable[[Job], bool | None] = lambda _: None
        """Whether one is to wait until `let_go_on`; None where `is_paused` says so."""
        self._stopping: dict[
            int, bool
        ] = {}  # active ones that were asked to pause, and whether they are held then
        self._in_use: dict[
            int, float
        ] = {}  # since when those wait in whose folders other commands are at work

    @property
    def jobs(self) -> list[Job]:
        """All that have come, in their order."""
        return list(self._jobs.values())

    @property
    def active(self) -> list[Job]:
        """Those under way."""
        return list(self._active.values())

    @property
    def held(self) -> list[Job]:
        """Those that have paused, or are not to start, until `let_go_on`."""
        return [
            *self._held.values(),
            *(self._jobs[number] for number, held in self._stopping.items() if held),
        ]

    @property
    def rests(self) -> bool:
        """Whether nothing is under way, or waits for its turn, and a person has paused it."""
        return (self.is_paused or bool(self._held)) and not (self._active or self._waiting())

    def add(self, job: Job) -> None:
        """Take a further job."""
        self._add(job)

    def pause(self, jobs: Iterable[Job]) -> None:
        """Let running ones save and end, and waiting ones wait, until `let_go_on`."""
        for job in jobs:
            number = self._numbers[job]
            if number in self._active:
                self._stop(number, held=True)
            elif self._withdraw(number):
                self._held[number] = job

    def let_go_on(self, jobs: Iterable[Job]) -> None:
        """Let those that `pause` holds wait for their turn."""
        for job in jobs:
            number = self._numbers[job]
            if number in self._stopping:
                self._stopping[number] = False
            elif self._held.pop(number, None):
                self._queue(number, job)

    def drop(self, jobs: Iterable[Job]) -> None:
        """End them: what they have come to is kept."""
        for job in jobs:
            number, error = self._numbers[job], Interrupted(DROPPED)
            self._stopping.pop(number, None)
            if number in self._active:
                workers_of(job).stop()
                job.paths.remove_unfinished()
                record_end(job.paths, error)
                self._end(number, error)
                continue
            if self._held.pop(number, None) or self._withdraw(number):
                self._drop_waiting(job)
            elif job.status == PAUSED:  # by itself, at a rung, where its record leaves it
                self._tell_dropped(job)

    def _drop_waiting(self, job: Job) -> None:
        if (
            job.paths.result.exists()
        ):  # it has paused as it was told to, or an earlier command has begun it
            record_end(job.paths, Interrupted(DROPPED))
        self._tell_dropped(job)

    def _tell_dropped(self, job: Job) -> None:
        job.status, job.error = INTERRUPTED, Interrupted(DROPPED)
        self._observer.job_dropped(job)

    def use_gpus(self, gpus: Collection[str]) -> list[Job]:
        """Use these alone from now on; returns the running jobs that pause for it, and wait for
        their turn again.
        """
        self._gpus.use(gpus)
        moved = [
            (number, job) for number, job in self._active.items() if not {*job.devices} <= {*gpus}
        ]
        for number, _ in moved:
            self._stop(number, held=False)
        return [job for _, job in moved]

    def _stop(self, number: int, *, held: bool) -> None:
        if number not in self._stopping:
            workers_of(self._active[number]).ask_to_stop()
        self._stopping[number] = held or self._stopping.get(number, False)

    def _withdraw(self, number: int) -> bool:
        was_in_use = self._in_use.pop(number, None) is not None
        return was_in_use or self._gpus.withdraw(number) or self._cores.withdraw(number)

    def has_room(self) -> bool:
        """Whether a further job, as large as the last, could start now: none waits, and devices are
        free for it.
        """
        most = self._options.max_concurrent
        if self._waiting() or self._closed or self._finishing or self.is_paused:
            return False
        if most is not None and len(self._active) >= most:
            return False
        if self._last is None:
            return bool((self._gpus if self._machine.gpus else self._cores).num_free)
        packing = self._gpus if self._last.num_gpus else self._cores
        return packing.num_free >= demand_of(0, self._last, self._machine).count

    def _add(self, job: Job) -> None:
        if job.status == QUEUED and not job.error and self.is_dropped(job):
            self._jobs[self._numbers.setdefault(job, len(self._numbers))] = job
            self._drop_waiting(job)
            return
        super()._add(job)
        if job.status == QUEUED and self._is_to_wait(job):
            self.pause([job])

    def _is_to_wait(self, job: Job) -> bool:
        """Asked of one that comes, and never of one that was told to go on since, or has begun."""
        held = self.is_held(job)
        return self.is_paused if held is None else held

    def _queue(self, number: int, job: Job) -> None:
        self._last = request_of(job).config
        super()._queue(number, job)

    def _is_busy(self) -> bool:
        return super()._is_busy() or (bool(self._held) and self._may_start)

    @property
    def _may_start(self) -> bool:
        return self._asked_at is None and not self._closed

    def _waiting(self) -> bool:
        return super()._waiting() or (bool(self._in_use) and self._may_start)

    def _start_ready(self) -> None:
        for number, since in list(self._in_use.items()) if self._may_start else ():
            job = self._jobs[number]
            if not is_held(job.paths):
                del self._in_use[number]
                self._queue(number, job)
            elif self._clock() >= since + PATIENCE_S:  # nobody who was killed, and is about to end
                self._observer.job_locked_out(job)
                self._in_use[number] = math.inf  # once
        super()._start_ready()

    def _set_aside(self, number: int, error: ExptError) -> bool:
        """Whether the job has ended because it was asked to pause: a worker that has only just
        begun dies of that.
        """
        if (
            number not in self._stopping
            or self._asked_at
            or isinstance(error, ConfigError | Diverged)
        ):
            return False
        job, held = self._active[number], self._stopping.pop(number)
        if read_result(job.paths).get("status") in (RUNNING, INTERRUPTED):
            record_pause(job.paths)
        job.go_on(request_of(job).until_epoch)
        self._observer.job_held(job)
        self._release(number)
        self._leave_folder(number)
        if held:
            self._held[number] = job
        else:
            self._queue(number, job)
        return True

    def _end(self, number: int, error: ExptError | None) -> None:
        if isinstance(error, FolderInUse):
            self._release(number)
            self._in_use[number] = self._clock()
            return
        self._stopping.pop(number, None)  # it has come to its end before it heard of the pause
        super()._end(number, error)
