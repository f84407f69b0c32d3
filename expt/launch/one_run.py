"""One run in its folder, from a checked configuration to its end: who starts its workers, and who watches."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from expt import machine
from expt.errors import Diverged, ExptError, Interrupted, RunFailed
from expt.runs import provenance
from expt.runs.attempt import recorded
from expt.runs.folder_lock import at_work
from expt.runs.paths import RunPaths
from expt.runs.request import Asked
from expt.runs.view.progress import RunDisplay, print_summary, shown_path

if TYPE_CHECKING:
    from expt.launch.job import Job


ABOUT_DP = (
    "note: strategy=dp is for comparison, and slower than ddp: one process, with Python's one lock, drives all GPUs, "
    "copies the model to each of them in every step, and gathers the outputs on the first"
)


def run(asked: Asked) -> None:
    """Train what was asked for, in its folder. Raises ConfigError, RunFailed or Interrupted."""
    console = Console()
    if asked.config.strategy == "dp":
        console.print(ABOUT_DP, highlight=False, soft_wrap=True)
    with at_work(asked.paths):
        if asked.config.debug:
            _run_in_process(asked)
        else:
            _run_workers(asked, console)
    print_summary(console, asked.paths)


class _Watcher:
    """Shows the pool's only run."""

    def __init__(self, display: RunDisplay, on_start: Callable[[], None] | None) -> None:
        self._display, self._on_start = display, on_start

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        self._display.waiting(devices)

    def job_starting(self, job: Job) -> None:
        pass

    def job_retrying(self, job: Job, error: ExptError) -> None:
        pass

    def job_ended(self, job: Job) -> None:
        pass

    def tick(self, active: Sequence[Job]) -> None:
        if active and self._on_start:
            self._on_start()
            self._on_start = None
        self._display.update()


def _run_workers(asked: Asked, console: Console) -> None:
    # late: it imports torch, which the forkserver is importing meanwhile
    from expt.launch.job import Job, Options
    from expt.launch.pool import Pool

    config, run_paths = asked.config, asked.paths
    job = Job(run_paths.folder.name, run_paths, config, about=dict(asked.about), typed=asked.started)
    job.env = dict(asked.env)
    job.attempt, job.again = asked.next_attempt(), asked.begun
    with RunDisplay(run_paths, console, epochs=config.epochs, print_every=config.print_every) as display:
        try:
            Pool(machine.detect(), Options(), _Watcher(display, asked.on_start)).run(iter([job]))
        except KeyboardInterrupt:
            if not run_paths.result.exists():
                raise Interrupted("interrupted before the run began; type the command again") from None
            raise Interrupted(f"interrupted; to go on: {_go_on(run_paths)}") from None
    if job.error:
        if run_paths.last.exists() and isinstance(job.error, RunFailed) and not isinstance(job.error, Diverged):
            job.error.args = (f"{job.error}\nto go on from its last checkpoint: {_go_on(run_paths)}",)
        raise job.error


def _go_on(run_paths: RunPaths) -> str:
    """The command that goes on with a run."""
    folder = shlex.quote(f"hydra.run.dir={shown_path(run_paths.folder)}")
    return f"{provenance.program()} {folder} resume=auto"


def _run_in_process(asked: Asked) -> None:
    """The single worker of `debug=true`: here, where pdb works."""
    from expt.data.files import prepare
    from expt.runs import attempt
    from expt.training import collectives
    from expt.worker.main import run_as

    prepare(asked.config.dataset)
    alone = collectives.worker_from(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, gpus=asked.config.gpu_indices
    )
    begun = attempt.Launch(config=asked.config, paths=asked.paths, started=asked.started, about=asked.about)
    with recorded(begun, asked.on_start) as source:
        run_as(alone, asked.config, asked.paths, asked.started, source)
