"""A run, or evaluations, that a command starts on this machine, with a display of the progress."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.status import Status

from expt import machine, signals
from expt.config import own_code
from expt.errors import (
    INTERRUPTED_BEFORE,
    INTERRUPTED_UNWRITTEN,
    ConfigError,
    ExptError,
    FolderInUse,
    Interrupted,
)
from expt.gpus import is_simulated
from expt.launch.job import Job, Observer, prepare
from expt.launch.pool import Pool, PoolOptions
from expt.runs.attempt import Attempt
from expt.runs.paths import RunPaths, at_work
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED
from expt.runs.view.progress import Printed, RunDisplay, show_printed, watched
from expt.runs.view.summary import how_to_continue, print_summary
from expt.runs.view.text import Console, cells, resume_command, say


class Launcher:
    """The launcher of runs on this machine; with `debug=true` this process is the worker."""

    def follow(self, typed_at: float) -> RunPaths | None:
        """Train as rank 0 decides, and return the run's folder; None if this process decides.

        To be called before any other part of a run.
        """
        return None

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """Decide for all workers in the body; they hear if the configuration is refused."""
        return contextlib.nullcontext()

    def earlier_folder(self) -> Path | None:
        """Return the folder in which this job's run began, if its workers were started again."""
        return None

    def carry_out(self, request: RunRequest, console: Console | None = None) -> None:
        """Carry out the request in its folder. Raises ConfigError, RunFailed or Interrupted.

        A new folder of a run that is refused is removed: the fixed command may name it again.
        """
        config, paths, console = request.config, request.paths, console or Console()
        is_new, run = paths.is_new(), _run_in_process if config.debug else _run_in_pool
        shown = RunDisplay(
            paths,
            console,
            epochs=config.epochs,
            print_every=config.print_every,
            live=not config.debug,
        )
        try:
            run(request, shown, console)
        except KeyboardInterrupt:
            again = f"interrupted; to continue: {resume_command(paths)}"
            raise Interrupted(again if paths.result.exists() else INTERRUPTED_BEFORE) from None
        except ConfigError as error:
            if is_new and not isinstance(error, FolderInUse) and not paths.has_trained():
                paths.remove_refused()
            raise
        print_summary(console, paths)


def _run_in_pool(request: RunRequest, display: RunDisplay, console: Console) -> None:
    """Run the workers; add to a failure how to continue after it."""
    paths, job = request.paths, Job(request.paths, request)
    with display:
        Pool(machine.detect(), PoolOptions(), _RunObserver(display, console)).run(iter([job]))
    if job.error:
        if paths.last.exists() or paths.forked.exists():
            job.error.args = (f"{job.error}{how_to_continue(request, job.error)}",)
        raise job.error


class _RunObserver(Observer):
    def __init__(self, display: RunDisplay, console: Console) -> None:
        self._display, self._console = display, console

    def data_found(self, about: str) -> None:
        say(self._console, about)

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        self._display.waiting(devices)

    def tick(self, active: Sequence[Job]) -> None:
        if active:  # else it was refused, or is at its end
            self._display.update()


def _run_in_process(request: RunRequest, display: RunDisplay, console: Console) -> None:
    """Run the single worker of `debug=true` here, where pdb works."""
    from expt.training import collectives  # late: it imports torch
    from expt.worker.main import run_as, torch_kept

    signals.raise_dropped()
    gpus = () if is_simulated() else request.config.gpu_indices
    alone = collectives.worker_from(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, gpus=gpus
    )
    here = machine.detect()
    used = tuple(here.gpus[index] for index in request.config.gpu_indices)
    attempt = Attempt(request=request, devices=used)
    # In a notebook code may have been edited since the run before this.
    with at_work(request.paths), own_code.as_on_disk():
        about, _ = prepare(request)
        if about:
            say(console, about)
        recorded = attempt.recorded()
        with torch_kept(alone.device), recorded as source, watched(display):
            run_as(alone, request, source)


def evaluate_all(requests: Sequence[RunRequest], console: Console) -> list[ExptError]:
    """Run the evaluations and return the failures.

    Nothing is left of refused and interrupted ones. Raises Interrupted, and ConfigError where the
    only one is refused.
    """
    jobs = [Job(request.paths, request) for request in requests]
    try:
        with console.status("starting") as status:
            observer = _EvaluationObserver(console, status)
            Pool(machine.detect(), PoolOptions(), observer).run(iter(jobs))
    except KeyboardInterrupt:
        raise Interrupted(INTERRUPTED_UNWRITTEN) from None
    finally:
        for job in jobs:
            if job.status != COMPLETED and isinstance(job.error, ConfigError | Interrupted | None):
                shutil.rmtree(job.paths.folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # others are left in the folder around it
                    job.paths.folder.parent.rmdir()
    if len(jobs) == 1 and jobs[0].error:
        raise jobs[0].error
    return [job.error for job in jobs if job.error]


class _EvaluationObserver(Observer):
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
