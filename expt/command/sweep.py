"""A sweep: its folder, its launcher, and the runs of a grid or of a search."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from expt import machine
from expt.command.compose import Composer
from expt.command.grammar import key_of, last_of_each, parse_one
from expt.command.hydra_part import folder_of, launcher_options, resolving
from expt.command.preflight import preflight
from expt.command.run import remove_unused
from expt.command.sweep_display import SweepDisplay, show_dry_run
from expt.command.sweep_folder import SweepFolder, SweepRun
from expt.config.constraints import quoted
from expt.config.groups import GROUPS
from expt.config.identity import REPEATED, shown, typed_hyperparameters
from expt.config.keys import value_at, without_effect
from expt.config.parse import parse as parsed
from expt.config.parse import wrong_values
from expt.dashboards.events import add_failure
from expt.errors import ConfigError, ExptError, FolderInUse, Interrupted, warn
from expt.launch import forkserver
from expt.launch.job import QUEUED, Job, Observer
from expt.launch.pool import Pool, PoolOptions
from expt.machine import Machine
from expt.runs import paths, provenance
from expt.runs.attempt import record_refusal
from expt.runs.found import GridRecord, read_grid, results, write_grid
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, Record
from expt.runs.view.text import sweep_command

if TYPE_CHECKING:
    from expt.command.run import Command
    from expt.launch.submitit_jobs import Queue

Runner: TypeAlias = "Pool | Queue"
"""The runner of jobs: the pool here, or a cluster's queue."""
Rounds: TypeAlias = Callable[["SweepObserver", Runner], Iterable[Iterator[Job | None]]]


class Sweep:
    """The sweep of one command."""

    def __init__(self, command: Command, composed: DictConfig, composer: Composer) -> None:
        """Prepare for the sweep that `composed`, the configuration of one of its runs, is of."""
        self.config, self.composer, self._command = composed, composer, command
        self.folder = folder_of(composed, "sweep")
        self._lock = FileLock(RunPaths(self.folder).lock, timeout=0)
        command.at_end.callback(self._leave)
        options = launcher_options(composed)
        self.is_dry_run = bool(options.pop("dry_run", False))
        self.is_preflight = composed.get("preflight") is True
        launcher = str(composed.hydra.runtime.choices.get("hydra/launcher"))
        self._options, self._is_here = options, launcher == "pool"
        if self.is_preflight and not self._is_here:
            raise ConfigError(f"preflight=true: is for this machine; leave out {launcher}")
        self.machine = machine.detect() if self._is_here else _node(options)
        self._opened: SweepFolder | None = None
        self.console, self.outcome = command.console, command.outcome

    def open(self) -> SweepFolder:
        """Return the runs of the folder, from now on this command's.

        Raises ConfigError where it is another's.
        """
        if self._opened is None:
            paths.refuse_mixed(self.folder, "hydra.sweep.dir")
            paths.refuse_foreign(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                raise paths.in_use(f"hydra.sweep.dir={self.folder}") from None
            self._opened = SweepFolder(self.folder, self.composer, self.machine)
        return self._opened

    def run_grid(self, grid: Grid) -> None:
        """Run every run of the grid that is not complete already.

        Raises ConfigError where another command is at work in the folder, Interrupted on Ctrl-C.
        """
        grid.check(self.machine)
        folder = self.open()
        asked = dict[int, SweepRun]()
        runs = (
            asked.setdefault(at, folder.run(words, at, grid.keys)) for at, words in enumerate(grid)
        )
        if self.is_preflight:
            return self.try_out(runs)
        if self.is_dry_run:
            return show_dry_run(runs)
        observer = SweepObserver(self.console, total=len(grid), folder=self.folder)

        def rounds(*_: object) -> Iterator[Iterator[Job]]:
            write_grid(self.folder, record)
            yield self._jobs(runs, observer)
            until = time.monotonic() + 2.0  # it has stopped early, and others may be complete
            for run in itertools.takewhile(lambda _: time.monotonic() < until, runs):
                if run.job.status == COMPLETED:
                    observer.take(run)

        left_out = {*read_grid(self.folder).get("left_out", ())}
        record = GridRecord(repetitions=grid.repetitions, left_out=[*left_out])
        try:
            self.carry_out(rounds, observer)
        finally:
            named = {run.job.paths.folder.name for run in asked.values()}
            if grid.keys and len(asked) == len(grid):
                left_out.update(folder.corrected([*asked.values()], grid.keys))
            record["left_out"] = sorted(left_out - named)
            write_grid(self.folder, record)

    def run_batch(
        self,
        batch: Sequence[Sequence[str]],
        first: int,
        keys: Sequence[str],
        observer: SweepObserver,
    ) -> list[Job]:
        """Run the batch of one of Hydra's sweepers, named by `keys`; return the job of each."""
        folder = self.open()
        found = [folder.run(words, number, keys) for number, words in enumerate(batch, first)]
        self.carry_out(lambda *_: [self._jobs(found, observer)], observer)
        return [run.job for run in found]

    def try_out(self, runs: Iterable[SweepRun], total: int | None = None) -> None:
        """Try each kind of these runs, and train none; see `preflight`."""
        jobs = [*dict.fromkeys(run.job for run in runs)]
        preflight(jobs, self.machine, PoolOptions(**self._options), total)

    def carry_out(
        self, rounds: Rounds, observer: SweepObserver, spared: tuple[type[ExptError], ...] = ()
    ) -> None:
        """Run the jobs of one round after another. Raises Interrupted on Ctrl-C.

        Errors that are `spared` are not failures of the sweep.
        """
        runs, self._command.began = observer.runs, True
        runner = self._runner(observer)
        record = OmegaConf.to_yaml(self.config)  # the settings, as Hydra writes them
        paths.write_atomically(self.folder / paths.SWEEP_RECORD, record)
        try:
            with observer:
                for source in rounds(observer, runner):
                    runner.run(source)
        except KeyboardInterrupt:
            again = f"hydra.sweep.dir={quoted(self.folder)}"
            if not self._command.from_python:  # whose argv is its own
                again = sweep_command(self.folder, provenance.command())
            raise Interrupted(f"interrupted; to continue: {again}") from None
        finally:
            self.outcome.sweep_folder = self.folder
            self.outcome.notes += [f"moved        {n} from {x}" for x, n in observer.moved.items()]
            self.outcome.add_jobs(runs, spared)
            self.outcome.num_unfinished += observer.num_unfinished
            for job in runs:
                if job.status in (QUEUED, INTERRUPTED):
                    remove_unused(job.paths)
        self._refuse_if_all_were(list(runs))

    def send_along(self, run: SweepRun) -> None:
        """Send the sweep to the dashboards of this run.

        Raises ConfigError as expt.dashboards.sending does.
        """
        if run.job.request and not (self.is_dry_run or self.is_preflight):
            self._command.sending.follow(run.job.request.config, self.folder)

    def _jobs(self, found: Iterable[SweepRun], observer: SweepObserver) -> Iterator[Job]:
        for run in found:
            self.send_along(run)
            if job := observer.take(run):
                yield job

    def _runner(self, observer: Observer) -> Runner:
        if not self._is_here:
            from expt.launch.submitit_jobs import Queue, executor_of  # late: needs submitit

            with resolving(self.config):
                folder = str(self.config.hydra.launcher.submitit_folder)
            options = {**self._options, "submitit_folder": folder}
            executor = executor_of(options, _tasks_per_node(options))
            return Queue(executor, observer, options.get("exclude"))
        forkserver.warm(forkserver.SWEEP_MODULES)
        how = PoolOptions(**self._options)
        return Pool(self.machine, how, observer, waits_for_folders=True)

    def _refuse_if_all_were(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError, and leave no trace, if a new sweep's folder has only refused runs."""
        refused = [job for job in jobs if job.refused and job.paths.holds_only_refusal()]
        there = {run.folder for run in results(self.folder)}
        if not jobs or len(refused) < len(jobs) or there != {job.paths.folder for job in refused}:
            return
        self.outcome.sweep_folder = None
        for job in refused:
            job.paths.remove_refused()
            remove_unused(job.paths)
        raise ConfigError(list(dict.fromkeys(str(job.error) for job in refused)))

    def _leave(self) -> None:
        own = [self.folder / name for name in (paths.SWEEP_RECORD, paths.GRID_RECORD)]
        of_run = RunPaths(self.folder)
        with contextlib.suppress(OSError):  # it holds something, or is gone
            if self._lock.is_locked and {*self.folder.iterdir()} <= {*own, of_run.lock}:
                for path in own:
                    path.unlink(missing_ok=True)
                of_run.remove_lock()
            paths.remove_empty(self.folder)
        self._lock.release(force=True)


class SweepObserver(SweepDisplay):
    """Keeps the records and the terminal up to date with the events of a sweep's runs."""

    @functools.cached_property
    def runs(self) -> dict[Job, list[SweepRun]]:
        """The requested runs of each job: a grid may name one twice."""
        return {}

    def take(self, run: SweepRun) -> Job | None:
        """Take a run in; returns its job, where it is not that of another one too."""
        is_new = run.job not in self.runs
        self.runs.setdefault(run.job, []).append(run)
        if not is_new:
            self.repeated(run.job)
        elif run.job.status == COMPLETED:
            self.skipped(run.job)
        return run.job if is_new else None

    def job_next(self, job: Job) -> None:
        """Prepare the files of the run's folder, which takes a moment."""
        _ = self.runs[job][0].hydra_files

    def job_starting(self, job: Job) -> None:
        """Write `.hydra`."""
        self.runs[job][0].save_hydra_files()
        super().job_starting(job)

    def job_ended(self, job: Job) -> None:
        """Record it."""
        try:
            with contextlib.suppress(FolderInUse):  # the other command records it
                _record_end(job, self.runs[job][0].about)
        except OSError as error:  # a full disk, maybe: the others continue
            warn(f"{job.paths.folder}: {error.strerror}; what became of the run is not recorded")
        super().job_ended(job)


def _record_end(job: Job, about: Record) -> None:
    config = job.request.config if job.request else None
    if job.refused and job.error and not job.paths.attempts():  # else its earlier record is kept
        record_refusal(job.paths, about, job.request, job.error)
    if job.status == FAILED and job.paths.result.exists():
        settings = shown(config) if config else about["overrides"]
        typed = typed_hyperparameters(settings, about["overrides"])
        add_failure(job.paths.folder, typed)


def _tasks_per_node(options: Mapping[str, Any]) -> int:
    """Return how many tasks Slurm starts on a node: one, or on several nodes one per worker."""
    given, gpus = options["tasks_per_node"], options["gpus_per_node"]
    nodes = options["nodes"] or 1
    if nodes > 1 and not given and not gpus:
        raise ConfigError(
            f"hydra.launcher.nodes={nodes}: needs gpus_per_node, or tasks_per_node on the CPU"
        )
    return int(given or (gpus if nodes > 1 else 1))


def _node(options: Mapping[str, Any]) -> Machine:
    """Return the machine of a job of the cluster, to check settings before it is queued."""
    here, tasks = machine.detect(), _tasks_per_node(options)
    workers = tasks * (options["nodes"] or 1)
    return dataclasses.replace(
        here,
        gpus=tuple(map(str, range(options["gpus_per_node"] or 0))),
        hidden="",
        misnamed=False,
        cpus=options.get("cpus_per_task") or here.cpus,
        workers=workers if workers > 1 else None,
        local_workers=tasks if workers > 1 else None,
    )


MAX_VALUES = 200
"""Values of each key that are checked before the first run; it takes 0.5 ms each."""


class Grid:
    """All combinations of the values of a sweep's axes; the last axis varies first."""

    def __init__(self, words: Sequence[str], composer: Composer) -> None:
        """Read the axes that `last_of_each` returns of `words`."""
        self._composer = composer
        overrides = last_of_each(words)
        self._lists = [
            composer.values(each) if each.is_sweep_override() else [str(each.input_line)]
            for each in overrides
        ]
        pairs = zip(overrides, self._lists, strict=True)
        self._axes = [(each, values) for each, values in pairs if each.is_sweep_override()]
        self.keys = [key_of(each) for each, _ in self._axes]

    @property
    def repetitions(self) -> int:
        """How many seeds and folds it has for each setting."""
        axes = zip(self.keys, self._axes, strict=True)
        return math.prod(len(values) for key, (_, values) in axes if key in REPEATED)

    def __len__(self) -> int:
        """Return the number of combinations."""
        return math.prod(map(len, self._lists))

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the words of each run."""
        return map(list, itertools.product(*self._lists))

    def check(self, machine: Machine) -> None:
        """Compose every choice, and look at every value, with the first of all other axes.

        Raises ConfigError for values that no run of the grid can have; that two of them do not fit
        is said when their run's turn comes.
        """
        first, chosen = [values[0] for values in self._lists], dict[str, list[object]]()
        axes = (each.key_or_group for each, _ in self._axes)
        several = {key for key in axes if self._composer.is_group(key)}
        sets_any = bool(several - GROUPS.keys())  # an experiment, or a custom group
        for at, values in enumerate(self._lists):
            override = parse_one(values[0])
            above, dot, _ = override.key_or_group.partition(".")
            if len(values) > 1 and self._composer.is_group(override.key_or_group):
                for value in values:
                    self._composer.compose([*first[:at], value, *first[at + 1 :]])
            elif len(values) > 1 and not (dot and (above in several or sets_any)):
                found = {word: parse_one(word).value() for word in values[:MAX_VALUES]}
                given = [word for word, value in found.items() if "${" in str(value)]
                chosen[override.key_or_group] = [
                    value for word, value in found.items() if word not in given
                ]
                for word in given:
                    self._resolve(at, word, machine)
        self._composer.compose(first)
        try:
            settings = self._composer.settings(first, sweep=True)
        except ConfigError:  # said when the run's turn comes
            return
        if wrong := wrong_values(settings, chosen, machine):
            raise ConfigError(wrong)
        if not sets_any:
            with contextlib.suppress(ConfigError):
                typed = (key_of(parse_one(values[0])) for values in self._lists)
                for line in without_effect(parsed(settings, machine), typed, self.keys):
                    warn(line)

    def _resolve(self, at: int, word: str, machine: Machine) -> None:
        """Raise ConfigError for an interpolation that gives no value, or a wrong one.

        It is tried with the first and with the last of all other axes.
        """
        key, wrong = parse_one(word).key_or_group, list[str]()
        for end in (0, -1):
            tried = [word if at == n else several[end] for n, several in enumerate(self._lists)]
            try:
                settings = self._composer.settings(tried, sweep=True, folder=Path())
                value = value_at(settings, key.split("."))
                wrong = wrong_values(settings, {key: [value]}, machine)
            except ConfigError as error:
                wrong = [*error.problems]
            if not wrong:
                return
        raise ConfigError(wrong)
