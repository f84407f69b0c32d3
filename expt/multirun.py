"""A sweep by the pool: what Hydra's launcher `pool` does when Hydra hands it points of a grid."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.utils import JobReturn, env_override, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from expt import forkserver, machine, paths, provenance, record
from expt.errors import ConfigError, Interrupted
from expt.identity import identity
from expt.pool import Job, Options, Pool
from expt.sweep import ComposedRun, Grid, save_hydra, use_config
from expt.sweep_display import SweepDisplay


class Multirun:
    """One command's sweep; Hydra's sweepers may hand it over in several batches."""

    def __init__(
        self, context: HydraContext, task_function: TaskFunction, config: DictConfig, options: Mapping[str, Any]
    ) -> None:
        self._context, self._task_function, self._config = context, task_function, config
        self._dry_run = bool(options["dry_run"])
        self._options = Options(**{key: value for key, value in options.items() if key != "dry_run"})
        self.folder = Path(str(config.hydra.sweep.dir))
        self._machine = machine.detect()
        self._lock = FileLock(paths.RunPaths(self.folder).lock, timeout=0)
        self._grid: Grid | None = None

    def launch(self, points: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Run every point of the grid that is not complete already.

        Raises ConfigError where another command is at work in the folder, Interrupted on Ctrl-C.
        """
        setup_globals()
        paths.register_resolvers()  # the line above has made Hydra's own anew
        self._open()
        assert self._grid is not None
        composed = self._grid.compose(self._context, self._config, points, first_number)
        if self._dry_run:
            return _show(list(composed))
        runs: dict[Job, list[ComposedRun]] = {}
        forkserver.warm(("torch.utils.tensorboard",))
        display = SweepDisplay(Console(), total=len(points), folder=self.folder)
        watcher = _Watcher(self._context, self._task_function, runs, display)
        try:
            with display:
                Pool(self._machine, self._options, watcher).run(self._source(composed, runs, display))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; to go on: {continue_command(self.folder)}") from None
        finally:
            self._tell(runs)
        in_order = sorted(
            (run for group in runs.values() for run in group), key=lambda run: run.hydra_config.hydra.job.num
        )
        return [run.finish() for run in in_order]

    def _tell(self, jobs: Iterable[Job]) -> None:
        """Let the command know what became of its runs."""
        task = self._task_function.task  # type: ignore[attr-defined]  # see expt.session
        task.sweep_folder = self.folder
        for job in jobs:
            (task.completed if job.status == record.COMPLETED else task.failed).append(job.paths)

    def _open(self) -> None:
        if self._grid is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(f"hydra.sweep.dir={self.folder}: another command is at work there; wait for it") from None
        self._grid = Grid(self.folder, self._machine)

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

    def job_starting(self, job: Job) -> None:
        run = self._runs[job][0]
        use_config(run)
        save_hydra(run)
        job.env = {str(key): str(value) for key, value in run.hydra_config.hydra.job.env_set.items()}
        with env_override(job.env):
            self._callbacks.on_job_start(config=run.hydra_config, task_function=self._task_function)

    def job_ended(self, job: Job) -> None:
        run = self._runs[job][0]
        if not job.started:  # refused: the sweep's record names it too
            refused = {**job.about, **provenance.describe()}
            record.create_result(job.paths, again=True, **refused)
            record.update_result(job.paths, status=job.status, error=str(job.error))
        use_config(run)
        self._callbacks.on_job_end(config=run.hydra_config, job_return=run.finish())
        self._display.ended(job)

    def tick(self, active: Sequence[Job]) -> None:
        self._display.update(active)


def continue_command(folder: Path) -> str:
    """What to type to go on with the sweep of `folder`: the same command, there."""
    words = [word for word in provenance.command().split(" ") if not word.startswith("hydra.sweep.dir=")]
    return " ".join([*words, shlex.quote(f"hydra.sweep.dir={folder}")])


def _show(runs: Sequence[ComposedRun]) -> list[JobReturn]:
    """The dry run: what would be started, and what it would need."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("#", "run", "identity", "needs", "would"):
        table.add_column(column)
    # Larger runs start first, see expt.schedule.
    for place, run in enumerate(sorted(runs, key=lambda run: -_size(run.job)), start=1):
        job = run.job
        if job.config is None:
            row = (job.name, "", "", f"be refused: {job.error}")
        else:
            needs = f"{job.config.num_gpus} GPU" if job.config.num_gpus else f"{job.config.world_size} cores"
            would = "be skipped, it is complete" if job.status == record.COMPLETED else "start"
            row = (job.name, identity(job.config), needs, would)
        table.add_row(str(place), *row)
    Console().print(table)
    return [run.finish() for run in runs]


def _size(job: Job) -> int:
    return 0 if job.config is None else job.config.num_gpus or job.config.world_size
