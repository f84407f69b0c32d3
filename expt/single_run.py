"""One run in its folder, from a checked configuration to its end: who starts its workers, and who watches."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from expt import machine, provenance, record
from expt.display import RunDisplay, print_summary, shown_path
from expt.errors import Diverged, ExptError, Interrupted, RunFailed
from expt.paths import RunPaths
from expt.schema import RunConfig

if TYPE_CHECKING:
    from expt.launch import Launch
    from expt.pool import Job

ABOUT_DP = (
    "note: strategy=dp is for comparison, and slower than ddp: one process, with Python's one lock, drives all GPUs, "
    "copies the model to each of them in every step, and gathers the outputs on the first"
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run that a person has asked for."""

    config: RunConfig
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What `config` was parsed from; another machine parses it anew."""
    paths: RunPaths
    started: float
    """When it was typed [seconds since the epoch]."""
    about: Mapping[str, Any]
    """For result.json: the run's name, identity and overrides."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables for its workers."""
    begun: bool = False
    """Whether it may have been under way before, in a job that was started again; then it goes on."""
    on_start: Callable[[], None] | None = None
    """Called once, when the run has been accepted and begins."""

    def next_attempt(self) -> int:
        """The number of the attempt, 0 where it is the first."""
        if self.begun or self.config.resume == "auto":
            return max(self.paths.next_attempt(), int(self.begun))
        return 0


def run(asked: Asked) -> None:
    """Train what was asked for, in its folder. Raises ConfigError, RunFailed or Interrupted."""
    console = Console()
    if asked.config.strategy == "dp":
        console.print(ABOUT_DP, highlight=False, soft_wrap=True)
    with record.at_work(asked.paths):
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
    from expt.pool import Job, Options, Pool

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
    from expt import distributed, entry, launch
    from expt.data.files import prepare

    prepare(asked.config.dataset)
    alone = distributed.worker_from(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, gpus=asked.config.gpu_indices
    )
    begun = launch.Launch(config=asked.config, paths=asked.paths, started=asked.started, about=asked.about)
    with recorded(begun, asked.on_start) as source:
        entry.run_as(alone, asked.config, asked.paths, asked.started, source)


@contextlib.contextmanager
def recorded(begun: Launch, on_start: Callable[[], None] | None) -> Iterator[Path | None]:
    """Keep result.json true about a run that trains in this process; gives the checkpoint that it goes on from."""
    from expt import launch

    source = launch.begin_record(begun)
    if on_start:
        on_start()
    try:
        yield source
    except BaseException as error:
        launch.end_record(begun.paths, error)
        raise
