"""One run in its folder, on this machine: by workers that the pool starts, or with `debug=true` in
this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from expt import machine, signals
from expt.config import user_code
from expt.errors import (
    INTERRUPTED_BEFORE,
    ConfigError,
    Diverged,
    ExptError,
    FolderInUse,
    Interrupted,
    RunFailed,
)
from expt.launch.job import Job, Observer, Options
from expt.launch.pool import Pool
from expt.runs import continuing
from expt.runs.attempt import RAISED, Attempt
from expt.runs.paths import at_work
from expt.runs.request import Evaluation, RunRequest
from expt.runs.result import read_result
from expt.runs.view.progress import RunDisplay, watched
from expt.runs.view.summary import print_summary
from expt.runs.view.text import resume_command, shown_path

ABOUT_DP = (
    "note: strategy=dp is for comparison, and slower than ddp: one process, with Python's one lock,"
    " drives all GPUs, copies the model to each of them in every step, and gathers the outputs on"
    " the first"
)


def run(
    request: RunRequest,
    on_start: Callable[[], None] | None = None,
    console: Console | None = None,
) -> None:
    """Train what is asked for, in its folder. Raises ConfigError, RunFailed or Interrupted.

    Where it is refused before it has come to anything, nothing of it is left in a new folder: the
    mended command may name it again. What was there before stays, whatever it is."""
    console, is_new = console or Console(), request.paths.is_new()
    if request.config.strategy == "dp":
        console.print(ABOUT_DP, highlight=False, soft_wrap=True)
    try:
        if request.config.debug:
            with at_work(request.paths):
                _run_in_process(request, on_start, console)
        else:
            _run_workers(request, on_start, console)
    except ConfigError as error:
        if is_new and not isinstance(error, FolderInUse) and not request.paths.has_trained():
            request.paths.remove_refused()
        raise
    print_summary(console, request.paths)


class _Shown(Observer):
    """Shows the pool's only run."""

    def __init__(self, display: RunDisplay, on_start: Callable[[], None] | None) -> None:
        self._display, self._on_start = display, on_start

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        self._display.waiting(devices)

    def tick(self, active: Sequence[Job]) -> None:
        if not active:  # refused, or at its end
            return
        if self._on_start:
            self._on_start()
            self._on_start = None
        self._display.update()


def _run_workers(
    request: RunRequest, on_start: Callable[[], None] | None, console: Console
) -> None:
    config, paths = request.config, request.paths
    job = Job(paths, request)
    with RunDisplay(
        paths, console, epochs=config.epochs, print_every=config.print_every
    ) as display:
        try:
            Pool(machine.detect(), Options(), _Shown(display, on_start)).run(iter([job]))
        except KeyboardInterrupt:
            if not paths.result.exists():
                raise Interrupted(INTERRUPTED_BEFORE) from None
            raise Interrupted(f"interrupted; to go on: {resume_command(paths)}") from None
    if job.error:
        if paths.last.exists() or paths.forked.exists():
            job.error.args = (f"{job.error}{way_on(request, job.error)}",)
        raise job.error


def way_on(request: RunRequest, error: ExptError) -> str:
    """What to say after the `error` of a run that has a checkpoint; nothing where it would fail
    again.

    In its folder no run goes on by other source of its own classes than it began with.
    """
    paths, command, changed = request.paths, resume_command(request.paths), ""
    if isinstance(error, RunFailed) and not isinstance(error, Diverged):
        if request.content.code and RAISED in str(error):  # not killed, say, or out of memory
            changed = f"\nafter a change of your own code: {_by_other_code(request)}"
        return f"\nto continue from its last checkpoint: {command}{changed}"
    if isinstance(error, ConfigError) and read_result(paths).get("error") == str(error):
        # A sample that nobody had read before, and not a refusal, after which the record is what it
        # was.
        if request.content.code:
            changed = f"; after a change of your own code {_by_other_code(request)}"
        return f"; then continue by {command}{changed}"
    return ""


def _by_other_code(request: RunRequest) -> str:
    trained = continuing.is_trained(request.config, request.paths)
    folder = Path(shown_path(request.paths.folder))
    return continuing.after_other_code(folder, trained=trained)


def _run_in_process(
    request: RunRequest, on_start: Callable[[], None] | None, console: Console
) -> None:
    """The single worker of `debug=true`: here, where pdb works."""
    from expt.training import collectives  # late: it imports torch
    from expt.worker.main import run_as

    config, paths = request.config, request.paths
    signals.raise_dropped()
    config.dataset.prepare(config.task, learns=not isinstance(request.instead, Evaluation))
    user_code.import_anew(
        user_code.targets(config)
    )  # it may have been edited since the run before this, in a notebook
    gpus = () if machine.is_simulated() else config.gpu_indices
    alone = collectives.worker_from(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, gpus=gpus
    )
    attempt = Attempt(request=request, started_at=time.monotonic())
    with attempt.recorded(on_start) as source:
        display = RunDisplay(
            paths, console, epochs=config.epochs, print_every=config.print_every, live=False
        )
        with watched(display):
            run_as(
                alone, config, paths, attempt.waited_since, source, until_epoch=request.until_epoch
            )
