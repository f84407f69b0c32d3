"""A sweep: the grid of its runs, its folder, and the machine or cluster that runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from expt import machine
from expt.command.compose import Composer
from expt.command.grammar import key_of, last_of_each, parse_one, words_of
from expt.command.hydra_part import folder_of, launcher_options, resolving
from expt.command.preflight import preflight
from expt.command.run import Command, remove_unused
from expt.command.sweep_display import SweepDisplay, show_dry_run
from expt.command.sweep_folder import SweepFolder, SweepRun
from expt.config.constraints import quoted
from expt.config.groups import GROUPS
from expt.config.identity import REPEATED, shown, typed_hyperparameters
from expt.config.keys import value_at, without_effect
from expt.config.parse import parse, wrong_values
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
    from expt.launch.submitit_jobs import Queue

Runner: TypeAlias = "Pool | Queue"
"""The runner of jobs: the pool here, or a cluster's queue."""
MAX_VALUES = 200
"""Values of each key that are checked before the first run; it takes 0.5 ms each."""


class Grid:
    """All combinations of the values of a sweep's axes; the last axis varies first."""

    def __init__(self, words: Sequence[str], composer: Composer) -> None:
        """Read the axes that `last_of_each` returns of `words`."""
        self._composer, overrides = composer, last_of_each(words)
        self._axes = {at: each for at, each in enumerate(overrides) if each.is_sweep_override()}
        """The axes by their places among the words of a run."""
        self._lists = [
            words_of(each, composer.options) if at in self._axes else [str(each.input_line)]
            for at, each in enumerate(overrides)
        ]
        """The words that runs have in each place."""
        self.keys = [key_of(each) for each in self._axes.values()]

    @property
    def repetitions(self) -> int:
        """How many seeds and folds it has for each setting."""
        axes = zip(self._axes, self.keys, strict=True)
        return math.prod(len({*self._lists[at]}) for at, key in axes if key in REPEATED)

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
        keys = {at: str(axis.key_or_group) for at, axis in self._axes.items()}
        groups = {key for key in keys.values() if self._composer.is_group(key)}
        sets_any = bool(groups - GROUPS.keys())  # an experiment, or a custom group
        values = dict[str, list[object]]()
        for at, key in keys.items():
            above, dot, _ = key.partition(".")
            if len(self._lists[at]) == 1:
                continue
            if key in groups:
                for word in self._lists[at]:
                    self._composer.compose(self._run_with(word, at))
            elif not (dot and (above in groups or sets_any)):
                values[key] = self._values(at, key, machine)
        first = [words[0] for words in self._lists]
        self._composer.compose(first)
        try:
            settings = self._composer.settings(first, sweep=True)
        except ConfigError:  # said when the run's turn comes
            return
        if wrong := wrong_values(settings, values, machine):
            raise ConfigError(wrong)
        if sets_any:
            return
        with contextlib.suppress(ConfigError):  # said when the run's turn comes
            typed = (key_of(parse_one(word)) for word in first)
            for line in without_effect(parse(settings, machine), typed, self.keys):
                warn(line)

    def _run_with(self, word: str, at: int, other: int = 0) -> list[str]:
        """Return the words of the run with this one, and the first, or `other`, of all others."""
        return [word if n == at else words[other] for n, words in enumerate(self._lists)]

    def _values(self, at: int, key: str, machine: Machine) -> list[object]:
        """Return the values of an axis without interpolations, which are looked at one by one."""
        found = list[object]()
        for word in self._lists[at][:MAX_VALUES]:
            value = parse_one(word).value()
            if "${" not in str(value):
                found.append(value)
            elif wrong := self._wrong_in_all(word, at, key, machine):
                raise ConfigError(wrong)
        return found

    def _wrong_in_all(self, word: str, at: int, key: str, machine: Machine) -> Sequence[str]:
        """Return the problems with an interpolation that gives no value, or a wrong one.

        There are none if it gives one with the first or with the last of all other axes.
        """
        wrong: Sequence[str] = ()
        for other in (0, -1):
            try:
                words = self._run_with(word, at, other)
                settings = self._composer.settings(words, sweep=True, folder=Path())
                wrong = wrong_values(settings, {key: [value_at(settings, key.split("."))]}, machine)
            except ConfigError as error:
                wrong = error.problems
            if not wrong:
                break
        return wrong


class Sweep:
    """The sweep of one command."""

    def __init__(self, command: Command, composed: DictConfig, composer: Composer) -> None:
        """Prepare for the sweep that `composed`, the configuration of one of its runs, is of."""
        self.config, self.composer, self._command = composed, composer, command
        self.console, self.outcome = command.console, command.outcome
        self.folder = folder_of(composed, "sweep")
        command.at_end.callback(_remove_if_empty, self.folder)
        options = launcher_options(composed)
        self.is_dry_run = bool(options.pop("dry_run", False))
        self.is_preflight = composed.get("preflight") is True
        launcher = str(composed.hydra.runtime.choices.get("hydra/launcher"))
        if self.is_preflight and launcher != "pool":
            raise ConfigError(f"preflight=true: is for this machine; leave out {launcher}")
        self._launcher = _Here(options) if launcher == "pool" else _Cluster(options, composed)
        self.machine = self._launcher.machine
        self._opened: SweepFolder | None = None

    def open(self) -> SweepFolder:
        """Return the runs of the folder, from now on this command's.

        Raises ConfigError where it is another's.
        """
        if self._opened is None:
            self._command.at_end.enter_context(_held(self.folder))
            self._opened = SweepFolder(self.folder, self.composer, self.machine)
        return self._opened

    def run_grid(self, grid: Grid) -> None:
        """Run every run of the grid that is not complete already.

        Raises ConfigError where another command is at work in the folder, Interrupted on Ctrl-C.
        """
        grid.check(self.machine)
        folder, asked = self.open(), list[SweepRun]()

        def requested() -> Iterator[SweepRun]:
            for number, words in enumerate(grid):
                asked.append(folder.run(words, number, grid.keys))
                yield asked[-1]

        runs = requested()
        if self.is_preflight:
            return self.try_out(runs)
        if self.is_dry_run:
            return show_dry_run(runs)
        left_out = {*read_grid(self.folder).get("left_out", ())}
        record = GridRecord(repetitions=grid.repetitions, left_out=[*left_out])
        write_grid(self.folder, record)
        observer = SweepObserver(self.console, total=len(grid), folder=self.folder)
        try:
            with self.running(observer) as runner:
                runner.run(self.jobs(runs, observer))
                until = time.monotonic() + 2.0  # it has stopped early, and others may be complete
                for run in itertools.takewhile(lambda _: time.monotonic() < until, runs):
                    if run.job.status == COMPLETED:
                        observer.take(run)
        finally:
            if grid.keys and len(asked) == len(grid):
                left_out.update(folder.corrected(asked, grid.keys))
            record["left_out"] = sorted(left_out - {run.job.paths.folder.name for run in asked})
            write_grid(self.folder, record)

    def try_out(self, runs: Iterable[SweepRun], total: int | None = None) -> None:
        """Try each kind of these runs, and train none; see `preflight`."""
        jobs = [*dict.fromkeys(run.job for run in runs)]
        assert isinstance(self._launcher, _Here)
        preflight(jobs, self.machine, self._launcher.options, total)

    @contextlib.contextmanager
    def running(
        self, observer: SweepObserver, spared: tuple[type[ExptError], ...] = ()
    ) -> Iterator[Runner]:
        """Yield the runner of the sweep's jobs, and keep the outcomes of those that it has run.

        Errors that are `spared` are not failures of the sweep. Raises Interrupted on Ctrl-C.
        """
        self._command.began = True
        runner = self._launcher.runner(observer)
        paths.write_atomically(self.folder / paths.SWEEP_RECORD, OmegaConf.to_yaml(self.config))
        try:
            with observer:
                yield runner
        except KeyboardInterrupt:
            again = f"hydra.sweep.dir={quoted(self.folder)}"
            if not self._command.from_python:  # whose argv is its own
                again = sweep_command(self.folder, provenance.command())
            raise Interrupted(f"interrupted; to continue: {again}") from None
        finally:
            self.outcome.sweep_folder = self.folder
            self.outcome.notes += [f"moved        {n} from {x}" for x, n in observer.moved.items()]
            self.outcome.add_jobs(observer.runs, spared)
            self.outcome.num_unfinished += observer.num_unfinished
            for job in observer.runs:
                if job.status in (QUEUED, INTERRUPTED):
                    remove_unused(job.paths)
        self._refuse_if_all_were([*observer.runs])

    def jobs(self, runs: Iterable[SweepRun], observer: SweepObserver) -> Iterator[Job]:
        """Yield the job of each run, once, and send the sweep to the run's dashboards.

        Raises ConfigError as expt.dashboards.sending does.
        """
        for run in runs:
            if run.job.request:
                self._command.sending.follow(run.job.request.config, self.folder)
            if job := observer.take(run):
                yield job

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


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """While entered, no other command can use the folder of a sweep.

    At the end nothing of the sweep's own is left there if it has no run.
    """
    paths.refuse_mixed(folder, "hydra.sweep.dir")
    paths.refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    of_sweep = RunPaths(folder)
    lock = FileLock(of_sweep.lock, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise paths.in_use(f"hydra.sweep.dir={folder}") from None
    try:
        yield
    finally:
        records = [folder / name for name in (paths.SWEEP_RECORD, paths.GRID_RECORD)]
        with contextlib.suppress(OSError):  # it is gone
            if {*folder.iterdir()} <= {*records, of_sweep.lock}:
                for path in records:
                    path.unlink(missing_ok=True)
                of_sweep.remove_lock()
        lock.release(force=True)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it holds something, or is gone
        paths.remove_empty(folder)


class _Here:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.machine, self.options = machine.detect(), PoolOptions(**options)

    def runner(self, observer: Observer) -> Pool:
        forkserver.warm(forkserver.SWEEP_MODULES)
        return Pool(self.machine, self.options, observer, waits_for_folders=True)


class _Cluster:
    def __init__(self, options: Mapping[str, Any], composed: DictConfig) -> None:
        """Take the keys of the launcher. Raises ConfigError where they give no number of tasks."""
        self._options, self._composed = options, composed
        nodes, given, gpus = (options[x] for x in ("nodes", "tasks_per_node", "gpus_per_node"))
        is_one = (nodes or 1) == 1
        if not (is_one or given or gpus):
            fix = "needs gpus_per_node, or tasks_per_node on the CPU"
            raise ConfigError(f"hydra.launcher.nodes={nodes}: {fix}")
        self._tasks = int(given or (1 if is_one else gpus))  # of a node, one for each worker
        here, workers = machine.detect(), self._tasks * (nodes or 1)
        self.machine = dataclasses.replace(
            here,
            gpus=tuple(map(str, range(gpus or 0))),
            hidden="",
            misnamed=False,
            cpus=options.get("cpus_per_task") or here.cpus,
            workers=workers if workers > 1 else None,
            local_workers=self._tasks if workers > 1 else None,
        )
        """A machine of it, to check settings before a job is queued."""

    def runner(self, observer: Observer) -> Queue:
        from expt.launch.submitit_jobs import Queue, executor_of  # late: needs submitit

        with resolving(self._composed):
            folder = str(self._composed.hydra.launcher.submitit_folder)
        executor = executor_of({**self._options, "submitit_folder": folder}, self._tasks)
        return Queue(executor, observer, self._options.get("exclude"))


class SweepObserver(SweepDisplay):
    """Keeps the records and the terminal up to date with the events of a sweep's runs."""

    def job_next(self, job: Job) -> None:
        """Prepare the files of the run's folder, which takes a moment."""
        _ = self.runs[job][0].hydra_files

    def job_starting(self, job: Job) -> None:
        """Write `.hydra`."""
        self.runs[job][0].save_hydra_files()
        super().job_starting(job)

    def job_ended(self, job: Job) -> None:
        """Record it."""
        run = self.runs[job][0]
        try:
            with contextlib.suppress(FolderInUse):  # the other command records it
                _record_end(job, run.about)
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
