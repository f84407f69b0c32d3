"""A sweep by the pool: what Hydra's launcher `pool` does when Hydra hands it points of a grid."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock, Timeout
from hydra.core.utils import JobReturn, env_override, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from expt import forkserver, paths, provenance, record, report
from expt.errors import ConfigError, ExptError, Interrupted
from expt.failed_events import add_failure
from expt.grid import ComposedRun, Grid, save_hydra, use_config
from expt.identity import hyperparameters, identity
from expt.machine import Machine, detect
from expt.overrides import hydra_quoted
from expt.pool import Job, Observer, Options, Pool
from expt.sweep_display import SweepDisplay

if TYPE_CHECKING:
    from expt.session import Task


class Runner(Protocol):
    """Runs jobs to their ends: expt.pool on this machine, expt.cluster elsewhere."""

    def run(self, source: Iterator[Job]) -> None:
        """Run every job that `source` yields. Raises KeyboardInterrupt, with everything stopped and recorded."""


class Multirun:
    """One command's sweep; Hydra's sweepers may hand it over in several batches."""

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        options: Mapping[str, Any],
        *,
        machine: Callable[[], Machine] = detect,
        runner: Callable[[Observer], Runner] | None = None,
    ) -> None:
        self._context, self._task_function, self._config = context, task_function, config
        self._composer = _Composer(context)
        self._task: Task = task_function.task  # type: ignore[attr-defined]  # see expt.session
        self._dry_run = bool(options.get("dry_run"))
        self.folder = Path(str(config.hydra.sweep.dir))
        self._lock = FileLock(paths.RunPaths(self.folder).lock, timeout=0)
        self._task.at_end.callback(self._leave)
        self._machine = machine()
        self._runner = runner or self._pool(options)
        self._grid: Grid | None = None

    def launch(self, points: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Run every point of the grid that is not complete already.

        Raises ConfigError where another command is at work in the folder, Interrupted on Ctrl-C.
        """
        if not self._task.may_sweep:
            raise ConfigError("this makes several runs; use expt.sweep, which returns a list of results")
        self._composer.launching = True
        try:
            return self._launch(points, first_number)
        finally:
            self._composer.launching = False

    def _launch(self, points: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        setup_globals()
        paths.register_resolvers()  # the line above has made Hydra's own anew
        self._open()
        assert self._grid is not None
        composed = self._grid.compose(self._context, self._config, points, first_number)
        if self._dry_run:
            returned = _show(list(composed))
            self._grid = None
            return returned
        runs: dict[Job, list[ComposedRun]] = {}
        display = SweepDisplay(Console(), total=len(points), folder=self.folder)
        watcher = _Watcher(self._context, self._task_function, runs, display)
        try:
            with display:
                self._runner(watcher).run(self._source(composed, runs, display))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; to go on: {continue_command(self.folder)}") from None
        finally:
            self._tell(runs)
            self._task.num_unseen += len(points) - sum(map(len, runs.values()))
        self._refuse_if_all_were(list(runs))
        started = sorted(itertools.chain(*runs.values()), key=lambda run: int(run.hydra_config.hydra.job.num))
        return [run.finish() for run in started]

    def _pool(self, options: Mapping[str, Any]) -> Callable[[Observer], Runner]:
        pool_options = Options(**{key: value for key, value in options.items() if key != "dry_run"})

        def pool(observer: Observer) -> Pool:
            forkserver.warm(forkserver.SWEEP_MODULES)
            return Pool(self._machine, pool_options, observer)

        return pool

    def _tell(self, jobs: Iterable[Job]) -> None:
        """Let the command know what became of its runs."""
        self._task.sweep_folder = self.folder
        for job in jobs:
            if job.status == record.COMPLETED:
                self._task.completed.append(job.paths)
            elif job.status == record.FAILED:
                self._task.failed.append(job.paths)
            else:
                self._task.not_completed.append(job.paths)

    def _refuse_if_all_were(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError, and leave no trace, where a new sweep's folder holds nothing but refused runs."""
        refused = [job for job in jobs if job.refused]
        if len(refused) < len(jobs) or {path.folder for path, _ in record.results(self.folder)} != {
            job.paths.folder for job in refused
        }:
            return
        self._task.sweep_folder = None
        for job in refused:
            for path in job.paths.folder.iterdir():
                path.unlink()
            job.paths.folder.rmdir()
        raise ConfigError(list(dict.fromkeys(str(job.error) for job in refused)))

    def _open(self) -> None:
        if self._grid is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(f"hydra.sweep.dir={self.folder}: another command is at work there; wait for it") from None
        self._task.began = True
        self._grid = Grid(self.folder, self._machine)

    def _leave(self) -> None:
        """Let others into the sweep's folder; it goes if it holds nothing but what Hydra and the lock put there."""
        own = {self.folder / paths.SWEEP_RECORD, paths.RunPaths(self.folder).lock}
        with contextlib.suppress(Timeout, OSError):  # another command is at work there, or the disk is read-only
            if self.folder.is_dir() and {*self.folder.iterdir()} <= own:
                self._lock.acquire()
                for path in own:
                    path.unlink(missing_ok=True)
                self.folder.rmdir()
        self._lock.release(force=True)

    def _source(
        self, composed: Iterator[ComposedRun], runs: dict[Job, list[ComposedRun]], display: SweepDisplay
    ) -> Iterator[Job]:
        for run in composed:
            known = run.job in runs
            runs.setdefault(run.job, []).append(run)
            if known:
                display.repeated(run.job)
                continue
            if run.job.status == record.COMPLETED:
                display.skipped(run.job)
            yield run.job


class _Watcher:
    """Tells Hydra's callbacks and the terminal of what happens in the pool."""

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        runs: Mapping[Job, Sequence[ComposedRun]],
        display: SweepDisplay,
    ) -> None:
        self._callbacks, self._task_function, self._runs, self._display = (
            context.callbacks,
            task_function,
            runs,
            display,
        )

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        self._display.waiting(job, devices)

    def job_starting(self, job: Job) -> None:
        run = self._runs[job][0]
        job.attempt, job.again = job.paths.next_attempt(), True
        use_config(run)
        save_hydra(run)
        job.env = {str(key): str(value) for key, value in run.hydra_config.hydra.job.env_set.items()}
        if job.retries:
            return  # for Hydra, the attempts of a run are one job
        with env_override(job.env):
            self._callbacks.on_job_start(config=run.hydra_config, task_function=self._task_function)

    def job_retrying(self, job: Job, error: ExptError) -> None:
        self._display.retrying(job, error)

    def job_ended(self, job: Job) -> None:
        run = self._runs[job][0]
        try:
            _record_end(job)
        except OSError as error:  # a full disk, maybe: the others go on
            warning = f"warning: {job.paths.folder}: {error.strerror}; what became of the run is not recorded"
            print(warning, file=sys.stderr, flush=True)
        use_config(run)
        self._callbacks.on_job_end(config=run.hydra_config, job_return=run.finish())
        self._display.ended(job)

    def tick(self, active: Sequence[Job]) -> None:
        self._display.update(active)


def _record_end(job: Job) -> None:
    if job.refused:  # the sweep's record names it too
        record.create_result(job.paths, again=True, **job.about, **provenance.describe())
        record.update_result(job.paths, status=job.status, error=str(job.error))
    if job.status == record.FAILED:
        settings = job.about["config"] if job.config else job.about["overrides"]
        add_failure(job.paths.folder, hyperparameters(settings))


def continue_command(folder: Path) -> str:
    """What to type to go on with the sweep of `folder`: the same command, there."""
    words = [word for word in sys.argv[1:] if not word.startswith("hydra.sweep.dir=")]
    # Hydra wants all settings side by side.
    place = max((index for index, word in enumerate(words, 1) if "=" in word and word[0] != "-"), default=len(words))
    words.insert(place, f"hydra.sweep.dir={hydra_quoted(folder)}")
    return shlex.join(["python", "-m", "expt", *words])


class _Composer:
    """Composes a sweep's points for Hydra, whose sweeper wants all of a batch composed, only to check them, at first.

    Composing takes as long as a short run: until the launch, only what no other point has shown to be right.
    """

    def __init__(self, context: HydraContext) -> None:
        self._loader = context.config_loader
        self._compose = self._loader.load_sweep_config
        self._loader.load_sweep_config = self._load  # type: ignore[method-assign]
        self._kept: dict[tuple[str, ...], DictConfig] = {}
        self._checked: set[str] = set()
        self.launching = False

    def _load(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        if self.launching:
            return self._kept.pop(tuple(sweep_overrides), None) or self._compose(master_config, sweep_overrides)
        new = set(map(self._what_to_check, sweep_overrides)) - self._checked
        if not new:
            return master_config
        self._checked |= new
        self._kept[tuple(sweep_overrides)] = composed = self._compose(master_config, sweep_overrides)
        return composed

    def _what_to_check(self, override: str) -> str:
        """Of a group every choice, of another key its name: its value is checked when the run's turn comes."""
        key = override.partition("=")[0]
        return override if self._loader.get_group_options(key.lstrip("+~").partition("@")[0]) else key


def _show(runs: Sequence[ComposedRun]) -> list[JobReturn]:
    """The dry run: what would be started, and what it would need."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("#", "run", "identity", "needs", "would"):
        table.add_column(column)
    # Larger runs start first, see expt.schedule.
    for place, run in enumerate(sorted(runs, key=lambda run: -_size(run.job)), start=1):
        job = run.job
        if job.config is None:
            row = (job.name, "", "", f"be refused: {record.in_one_line(str(job.error))}")
        else:
            needs = f"{job.config.num_gpus} GPU" if job.config.num_gpus else f"{job.config.world_size} cores"
            would = "be skipped, it is complete" if job.status == record.COMPLETED else "start"
            row = (job.name, identity(job.config), needs, would)
        table.add_row(str(place), *row)
    report.wide_console().print(table)
    return [run.finish() for run in runs]


def _size(job: Job) -> int:
    return 0 if job.config is None else job.config.num_gpus or job.config.world_size
