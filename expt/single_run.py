"""One run in its folder, from a checked configuration to its end: who starts its workers, and who watches."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from expt import machine, provenance, record
from expt.display import REFRESH_S, RunDisplay, print_summary, shown_path
from expt.errors import Diverged, ExptError, Interrupted, RunFailed
from expt.paths import RunPaths
from expt.schema import RunConfig

if TYPE_CHECKING:
    from expt.pool import Job

ABOUT_DP = (
    "note: strategy=dp is for comparison, and slower than ddp: one process, with Python's one lock, drives all GPUs, "
    "copies the model to each of them in every step, and gathers the outputs on the first"
)
FOLDER_KEY, SOURCE_KEY = "expt/run_folder", "expt/resume_from"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run that a person has asked for."""

    config: RunConfig
    paths: RunPaths
    started: float
    """When it was typed [seconds since the epoch]."""
    about: Mapping[str, Any]
    """For result.json: the run's name, identity and overrides."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables for its workers."""
    on_start: Callable[[], None] | None = None
    """Called once, when the run has been accepted and begins."""


def run(asked: Asked) -> None:
    """Train what was asked for, in its folder. Raises ConfigError, RunFailed or Interrupted."""
    console = Console()
    if asked.config.strategy == "dp" and is_first():
        console.print(ABOUT_DP, highlight=False, soft_wrap=True)
    with record.at_work(asked.paths) if is_first() else contextlib.nullcontext():
        if machine.is_external_worker():
            _run_as_external_worker(asked, console)
        elif asked.config.debug:
            _run_in_process(asked)
        else:
            _run_workers(asked, console)
    if is_first():
        print_summary(console, asked.paths)


def is_first() -> bool:
    """Whether this process speaks for the run: the driver, or rank 0 where there is none."""
    return not machine.is_external_worker() or os.environ["RANK"] == "0"


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
    from expt.pool import Job, Options, Pool

    config, run_paths = asked.config, asked.paths
    job = Job(run_paths.folder.name, run_paths, config, about=dict(asked.about), typed=asked.started)
    job.env = dict(asked.env)
    job.attempt = run_paths.next_attempt() if config.resume == "auto" else 0
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
    from expt import distributed, entry
    from expt.data.files import prepare

    prepare(asked.config.dataset)
    alone = distributed.worker_from(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, num_gpus=asked.config.num_gpus
    )
    with _recorded(asked) as source:
        entry.run_as(alone, asked.config, asked.paths, asked.started, source)


def _run_as_external_worker(asked: Asked, console: Console) -> None:
    """One of the workers that torchrun has started: rank 0 says where the run folder is, and keeps its record."""
    from expt import distributed, entry
    from expt.data.files import prepare

    config, run_paths, started = asked.config, asked.paths, asked.started
    prepare(config.dataset)  # under a file lock, so that one worker of each machine does it
    if not is_first():
        told = distributed.external_store().get(SOURCE_KEY).decode()
        _interrupted_if(entry.main(config, run_paths, started, Path(told) if told else None), run_paths)
        return
    display = RunDisplay(run_paths, console, epochs=config.epochs, print_every=config.print_every)
    with _recorded(asked) as source, _watched(display):
        distributed.external_store().set(FOLDER_KEY, str(run_paths.folder.resolve()))
        distributed.external_store().set(SOURCE_KEY, str(source or ""))
        _interrupted_if(entry.main(config, run_paths, started, source), run_paths)


def _interrupted_if(status: str, run_paths: RunPaths) -> None:
    if status == record.INTERRUPTED:
        go_on = shlex.quote(f"hydra.run.dir={run_paths.folder}")
        raise Interrupted(f"interrupted; to go on: the same command with {go_on} resume=auto")


@contextlib.contextmanager
def _watched(display: RunDisplay) -> Iterator[None]:
    """Keep the display up to date from a thread, where this process is busy training."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(REFRESH_S):
            display.update()

    thread = threading.Thread(target=watch, name="display", daemon=True)
    with display:
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextlib.contextmanager
def _recorded(asked: Asked) -> Iterator[Path | None]:
    """Keep result.json true about a run that trains in this process; gives the checkpoint that it goes on from."""
    from expt import launch

    source = launch.begin_record(
        launch.Launch(config=asked.config, paths=asked.paths, started=asked.started, about=asked.about)
    )
    if asked.on_start:
        asked.on_start()
    try:
        yield source
    except BaseException as error:
        launch.end_record(asked.paths, error)
        raise
