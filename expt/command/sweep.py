"""A sweep by the pool: what Hydra's launcher `pool` does when Hydra hands it points of a grid."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from filelock import FileLock, Timeout
from hydra.core.utils import JobReturn, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console

from expt.command import experiment, hydra_folder, overrides
from expt.command.arguments import continue_command
from expt.command.composed_run import ComposedRun
from expt.command.own_conf import refuse_no_names
from expt.command.point_composer import PointComposer
from expt.command.preflight import Samples, preflight
from expt.command.sweep_display import SweepDisplay, show_dry_run
from expt.command.sweep_observer import SweepObserver
from expt.command.sweep_points import Grid
from expt.command.sweep_runs import Runs, is_new, see_completed
from expt.command.sweep_values import refuse_empty, refuse_wrong_values
from expt.errors import INTERRUPTED_BEFORE, ConfigError, ExptError, Interrupted
from expt.launch import forkserver
from expt.launch.job import QUEUED, Job, Observer, Options, check_options
from expt.launch.pool import Pool
from expt.machine import Machine, detect
from expt.runs import paths
from expt.runs.result import COMPLETED, INTERRUPTED, PAUSED, results

if TYPE_CHECKING:
    from expt.command.main import Task


class Runner(Protocol):
    """Runs jobs to their ends: expt.launch.pool on this machine, expt.launch.submitit_jobs
    elsewhere.
    """

    def run(self, source: Iterator[Job | None]) -> None:
        """Run every job that `source` yields; None is "nothing now".

        Raises KeyboardInterrupt, with everything stopped and recorded.
        """

    def finish(self, why: str) -> None:
        """Start no further job, and let those that run save and end."""


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
        check_options(options)
        self._context, self._config = context, config
        refuse_no_names(overrides.of_named_grid(config), experiment.folders_of(config.hydra))
        self.composer = PointComposer(context, config)
        self.is_group = functools.partial(self.composer.is_group, config)
        self._task = cast("Task", task_function)  # Hydra hands on what expt.command.main gave it
        self.is_dry_run, self.is_preflight = (
            bool(options.get("dry_run")),
            bool(config.get("preflight")),
        )
        if self.is_preflight and runner is not None:
            raise ConfigError(
                "preflight=true: tries runs out on this machine alone; leave hydra/launcher out"
            )
        self._launcher_options = options
        self.folder = Path(str(config.hydra.sweep.dir))
        self._lock = FileLock(paths.RunPaths(self.folder).lock, timeout=0)
        self._is_grid = config.hydra.runtime.choices.get("hydra/sweeper") == "basic"
        self._record = self.folder / paths.SWEEP_RECORD
        self._record_before = self._record.read_bytes() if self._record.is_file() else None
        self._task.at_end.callback(self._leave)
        self.machine = machine()
        self._runner = runner or self._pool
        self._grid: Grid | None = None
        self._num_known = 0

    def launch(self, points: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Run every point of the grid that is not complete already.

        Raises ConfigError where another command is at work in the folder, Interrupted on Ctrl-C.
        """
        self.begin()
        if not points:
            refuse_empty(
                [*overrides.of_named_grid(self._config), *overrides.typed_in(self._config.hydra)],
                self.composer.loader,
            )
        try:
            composed = self._composed(points, first_number)
        except KeyboardInterrupt:
            raise Interrupted(INTERRUPTED_BEFORE) from None
        total = len(points)
        if self.is_preflight:
            return self.try_out(list(composed))
        if self.is_dry_run:
            returned = show_dry_run(composed, total)
            self._grid = None
            return returned

        def rounds(runs: Runs, display: SweepDisplay, _: Runner) -> Iterator[Iterator[Job]]:
            yield self._source(composed, runs, display)
            may_be_fewer = see_completed(composed, runs, display, self.open().completed)
            self._task.outcome.may_be_fewer |= may_be_fewer

        return self.carry_out(rounds, SweepDisplay(Console(), total=total, folder=self.folder))

    def try_out(
        self, runs: Sequence[ComposedRun], samples: Samples | None = None
    ) -> list[JobReturn]:
        """Try each kind of these runs, and train none."""
        preflight([*dict.fromkeys(run.job for run in runs)], self.machine, self._options(), samples)
        self._grid = None
        return [run.finish() for run in runs]

    def begin(self) -> None:
        """Let what follows be one of several runs.

        Raises ConfigError where there may be but one.
        """
        if not self._task.may_sweep:
            raise ConfigError(
                "this makes several runs; use expt.sweep, which returns a list of results"
            )
        setup_globals()
        overrides.register_resolvers()  # the line above has made Hydra's own anew

    def carry_out(
        self,
        rounds: Callable[[Runs, SweepDisplay, Runner], Iterable[Iterator[Job | None]]],
        display: SweepDisplay,
        spared: tuple[type[ExptError], ...] = (),
    ) -> list[JobReturn]:
        """Run the jobs of one round after another; what is `spared` is no failure of the sweep.

        Raises Interrupted on Ctrl-C.
        """
        runs: Runs = {}
        observer = SweepObserver(self._context, self._task, runs, display)
        runner = self._runner(observer)
        try:
            with display:
                for source in rounds(runs, display, runner):
                    runner.run(source)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; to go on: {continue_command(self.folder)}") from None
        finally:
            self._task.outcome.sweep_folder = self.folder
            self._task.outcome.add_jobs(runs, spared)
            seen = self._num_known + sum(map(len, runs.values()))
            self._task.outcome.num_unseen += max(0, display.total - seen)
            for job in runs:
                if job.status in (QUEUED, INTERRUPTED):
                    hydra_folder.leave_no_trace_of_a_point(job.paths)
        self._refuse_if_all_were(list(runs))
        started = sorted(itertools.chain(*runs.values()), key=lambda run: run.number)
        return [run.finish() for run in started]

    def _composed(
        self, points: Sequence[Sequence[str]], first_number: int
    ) -> Iterator[ComposedRun]:
        """The points as runs, each composed when it is asked for; of the first batch the values are
        checked before.
        """
        is_first_batch = self._grid is None
        composed = self.open().compose(self.composer, self._config, points, first_number)
        if not (is_first_batch and points):
            return composed
        first = next(composed)
        self.send_along(first)
        refuse_wrong_values(points, first.hydra_config, self.machine, self.is_group)
        return itertools.chain([first], composed)

    def send_along(self, run: ComposedRun) -> None:
        """Send the sweep to the dashboards of its first run.

        Raises ConfigError as expt.dashboards.sending does.
        """
        if run.job.request is not None and not (self.is_dry_run or self.is_preflight):
            self._task.sending.follow(run.job.request.config, self.folder)

    def _pool(self, observer: Observer) -> Runner:
        forkserver.warm(forkserver.SWEEP_MODULES)
        return Pool(self.machine, self._options(), observer, waits_for_folders=True)

    def _options(self) -> Options:
        return Options(
            **{key: value for key, value in self._launcher_options.items() if key != "dry_run"}
        )

    def known(self, run_paths: paths.RunPaths, status: str, *, counts: bool = True) -> None:
        """Take in a run of an earlier command that is not to be run again; whether it `counts` as
        one asked for.
        """
        self._num_known += counts
        if status in (COMPLETED, PAUSED):
            self._task.outcome.add(run_paths, status)

    def note(self, line: str) -> None:
        """Let the command say it at its end."""
        self._task.outcome.notes.append(line)

    def _refuse_if_all_were(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError, and leave no trace, where a new sweep's folder holds nothing but
        refused runs.
        """
        refused = [job for job in jobs if job.refused and job.paths.holds_refusal_alone()]
        if len(refused) < len(jobs) or {path.folder for path, _ in results(self.folder)} != {
            job.paths.folder for job in refused
        }:
            return
        self._task.outcome.sweep_folder = None
        for job in refused:
            job.paths.remove_refused()
            job.paths.lock.unlink(missing_ok=True)
            job.paths.folder.rmdir()
        raise ConfigError(list(dict.fromkeys(str(job.error) for job in refused)))

    def open(self) -> Grid:
        """The runs of the sweep's folder, from now on this command's.

        Raises ConfigError where it is another's.
        """
        if self._grid is not None:
            return self._grid
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(
                f"hydra.sweep.dir={self.folder}: another command is at work there; wait for it"
            ) from None
        self._task.began = True
        self._grid = Grid(self.folder, self.machine, fetch=not self.is_dry_run)
        return self._grid

    def _leave(self) -> None:
        """Let others into the sweep's folder; it goes if it holds nothing but what Hydra and the
        lock put there.
        """
        with contextlib.suppress(OSError):
            self._put_back()
        own = {self._record, paths.RunPaths(self.folder).lock}
        with contextlib.suppress(
            Timeout, OSError
        ):  # another command is at work there, or the disk is read-only
            if self.folder.is_dir() and {*self.folder.iterdir()} <= own:
                self._lock.acquire()
                for path in own:
                    path.unlink(missing_ok=True)
                paths.remove_empty(self.folder)
        self._lock.release(force=True)

    def _put_back(self) -> None:
        """Let the folder say of its sweep what it did, where this command has run none; of a grid
        Hydra wrote it.
        """
        before, is_ours = self._record_before, self._lock.is_locked
        if is_ours and not (self.is_dry_run or self.is_preflight):
            return
        if before is None and is_ours:
            self._record.unlink(missing_ok=True)
        elif (
            before is not None
            and (is_ours or self._is_grid)
            and self._record.read_bytes() != before
        ):
            self._record.write_bytes(
                before
            )  # of a search the other command there may have written it meanwhile

    def _source(
        self, composed: Iterator[ComposedRun], runs: Runs, display: SweepDisplay
    ) -> Iterator[Job]:
        for run in composed:
            if is_new(run, runs, display):
                yield run.job
