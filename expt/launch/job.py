"""A run in the pool, and the observer of runs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expt import progress
from expt.config.rules import refuse_missing_folders
from expt.data.kinds import Check
from expt.errors import (
    ConfigError,
    DataError,
    Diverged,
    ExptError,
    Interrupted,
    Killed,
    OutOfMemory,
    WorkersLost,
    warn,
)
from expt.runs.failure import in_one_line, mistake_in
from expt.runs.paths import RunPaths
from expt.runs.request import Evaluation, RunRequest
from expt.runs.result import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    PRUNED,
    Objective,
    Record,
    read_result,
    whole_epochs,
)

QUEUED = "queued"


class DataCheck:
    """A check of data in a thread while a run trains on it; it ends with the command."""

    _one_at_a_time = threading.Lock()  # the next one on the same files finds the notes

    def __init__(self, check: Check) -> None:
        self.error: DataError | None = None
        self.is_heeded = False
        """True if the run was asked to stop for it."""
        self._check, self._thread = check, threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Begin the check, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        try:
            with self._one_at_a_time:
                self._check(1)
        except DataError as error:
            self.error = error
        except OSError as error:  # a file was removed meanwhile, say
            self.error = DataError(f"{error.filename or 'dataset'}: {error.strerror or error}")

    def wait(self) -> None:
        """Wait until the check has ended."""
        self.begin()
        self._thread.join()


@dataclass(eq=False)
class Job:
    """A run in the pool: its request, and its state so far.

    Only the pool changes it.
    """

    paths: RunPaths
    request: RunRequest | None
    """None where it could not be made, and `error` says why."""
    status: str = QUEUED
    error: ExptError | None = None
    objective: Objective | None = None
    """Its objective, if an earlier command has completed it."""
    devices: tuple[str, ...] = ()
    is_trial: bool = False
    """True in a search: a trial that was killed or had no memory gets another try first."""
    retries: int = 0
    """How often it has been started again."""
    started_at: float = 0.0
    """The time of its start by time.monotonic, which is not a time of day."""
    ended_at: float = 0.0
    bytes_at_start: int = 0
    """The size of its metrics.jsonl when its workers were last started."""
    check: DataCheck | None = None
    """The check of its data that is left to do while it runs."""
    _mistake: str = ""
    """The traceback of the mistake in code by which its last attempt failed, if it was one."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.paths.folder.name

    @property
    def asked(self) -> RunRequest:
        """The request of a job that was not refused."""
        assert self.request is not None
        return self.request

    @property
    def refused(self) -> bool:
        """True if it has failed before it could start."""
        return self.status == FAILED and not self.started_at

    @property
    def trains(self) -> bool:
        """True if it has written numbers since its workers were last started."""
        return self.paths.num_bytes() > self.bytes_at_start

    def note_failure(self, error: ExptError, retries: int) -> bool:
        """Note how its attempt has failed; return whether it gets another, which may end otherwise.

        `retries` are those that the pool gives to each.
        """
        # A line of code that raises the same twice in a row does so once more.
        before, self._mistake = self._mistake, mistake_in(str(error))
        repeats = bool(before) and before == self._mistake
        if repeats or isinstance(error, ConfigError | Interrupted | Diverged):
            return False
        restarts = max(retries, self.asked.config.max_restarts)
        was_lost = isinstance(error, WorkersLost) and not self.paths.metrics.exists()
        # Another program may have had the memory
        may_pass = self.is_trial and isinstance(error, Killed | OutOfMemory | WorkersLost)
        if was_lost or may_pass:
            restarts = max(restarts, 1)
        return self.retries < restarts

    def try_again(self) -> None:
        """Queue the run, which has failed, for another start."""
        self.retries += 1
        self._queue(typed_at=None)

    def continue_until(self, until_epoch: int | None) -> None:
        """Queue the run, which was pruned, until its end or another pause.

        The caller gives the job to the pool once more.
        """
        self.error = None
        self._queue(until_epoch=until_epoch)

    def _queue(self, **changes: Any) -> None:
        self.request = dataclasses.replace(self.asked, may_have_run=True, **changes)
        self.status = QUEUED

    def end(self, error: ExptError | None, now: float) -> None:
        """Record that it has completed or was pruned, or failed by `error`."""
        self.error, self.ended_at = error, now
        if error is not None:
            self.status = INTERRUPTED if isinstance(error, Interrupted) else FAILED
            return
        is_pruned = read_result(self.paths).get("status") == PRUNED
        self.status = PRUNED if is_pruned else COMPLETED

    def pause_after(self, epoch: int | None) -> None:
        """Pause the run, which has not started, after an epoch; None lets it end."""
        if self.request is not None:
            self.request = dataclasses.replace(self.request, until_epoch=epoch)


@progress.phase("reading the dataset's files")
def prepare(request: RunRequest) -> tuple[str, Check | None]:
    """Prepare the data of a request; return a line about it, and the check that is left.

    The line is about the parts of files that a run takes; it is empty if the request is no run.
    Raises ConfigError for data that can't be trained on.
    """
    dataset, task = request.config.dataset, request.config.task
    learns = not isinstance(request.instead, Evaluation)
    if learns:
        refuse_missing_folders(request.config)  # before all is decoded
    check = dataset.prepare(task, learns=learns)
    about = "" if request.instead else dataset.described(task)
    return f"data         {about}" if about else "", check


class Observer:
    """Callbacks for the progress of jobs, called by the loop that watches them.

    By itself it only warns of a restart.
    """

    def data_found(self, about: str) -> None:
        """React to the line on the data that a job takes; called once for each job."""

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        """React to a job whose `devices` another command holds; called once until it has some."""

    def job_locked_out(self, job: Job) -> None:
        """React to a job in whose folder another command is at work; called once for each job."""

    def job_next(self, job: Job) -> None:
        """Prepare, in memory, the job that is likely to start next; called many times."""

    def job_starting(self, job: Job) -> None:
        """React to a job whose workers are about to start, maybe once more."""

    def job_retrying(self, job: Job, error: ExptError) -> None:
        """Warn of a job that has failed, and waits to be started once more."""
        # workers that were lost at once get one unasked
        of = max(job.retries, job.asked.config.max_restarts)
        warn(
            f"{job.paths.folder}: {in_one_line(str(error), with_log=False)}; restart {job.retries}"
            f" of {of}"
        )

    def job_moved(self, job: Job, why: str) -> None:
        """Warn of a job that GPUs have failed before its first step, and that waits for others."""
        warn(f"{job.paths.folder}: {why}; the run waits for another GPU")

    def job_ended(self, job: Job) -> None:
        """React to a job that has completed, was pruned, has failed, or was interrupted."""

    def tick(self, active: Sequence[Job]) -> None:
        """Show the jobs under way; called many times a second."""


def has_reached(record: Record, until_epoch: int | None) -> bool:
    """Return whether the run has completed, or was pruned after that epoch or later."""
    if record.get("status") == PRUNED and until_epoch is not None:
        return whole_epochs(record) >= until_epoch
    return record.get("status") == COMPLETED
