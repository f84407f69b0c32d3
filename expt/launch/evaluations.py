"""Evaluations of trained runs, several at a time, by workers that the pool starts."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence

from rich.status import Status

from expt import machine
from expt.errors import INTERRUPTED_UNWRITTEN, ConfigError, ExptError, Interrupted
from expt.launch.job import Job, Observer
from expt.launch.pool import Pool, PoolOptions
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED
from expt.runs.view.progress import Printed, show_printed
from expt.runs.view.text import Console, cells


def evaluate_all(requests: Sequence[RunRequest], console: Console) -> list[ExptError]:
    """Run the evaluations and return the failures.

    Nothing is left of refused and interrupted ones. Raises Interrupted, and ConfigError where the
    only one is refused.
    """
    jobs = [Job(request.paths, request) for request in requests]
    try:
        with console.status("starting") as status:
            observer = _Shown(console, status)
            Pool(machine.detect(), PoolOptions(), observer).run(iter(jobs))
    except KeyboardInterrupt:
        raise Interrupted(INTERRUPTED_UNWRITTEN) from None
    finally:
        for job in jobs:
            if job.status != COMPLETED and (
                job.error is None or isinstance(job.error, ConfigError | Interrupted)
            ):
                shutil.rmtree(job.paths.folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # others are left in the folder around it
                    job.paths.folder.parent.rmdir()
    if len(jobs) == 1 and jobs[0].error:
        raise jobs[0].error
    return [job.error for job in jobs if job.error]


class _Shown(Observer):
    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._printed: dict[Job, Printed] = {}
        self._done = 0

    def job_starting(self, job: Job) -> None:
        self._printed[job] = Printed(job.paths)

    def job_ended(self, job: Job) -> None:
        self._done += 1
        self._show(job, last=True)

    def tick(self, active: Sequence[Job]) -> None:
        names = ", ".join(str(job.paths.folder.parents[1].name) for job in active)
        done = f", {self._done} done" if self._done else ""
        self._status.update(*cells(f"evaluating {names}{done}"))  # a str would be markup
        for job in active:
            self._show(job)

    def _show(self, job: Job, *, last: bool = False) -> None:
        if job in self._printed:
            lines = self._printed[job].new(last=last)
            show_printed(self._console, ((f"rank {rank}", line) for rank, line in lines))
