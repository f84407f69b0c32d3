"""One run: from its configuration to its end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt import machine
from expt.command import terminal
from expt.command.grammar import about_run
from expt.config import kept_code
from expt.config.identity import Identity
from expt.config.schema import RunConfig
from expt.dashboards.sending import Sending
from expt.data.fingerprint import identity_of
from expt.errors import ConfigError, ExptError, Interrupted, SweepFailed
from expt.launch.job import Job
from expt.runs.paths import RunPaths, is_held, remove_empty
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, FAILED, PRUNED, objective_value, read_result
from expt.runs.view.text import Console

if TYPE_CHECKING:
    from expt.launch.local import Launcher
    from expt.launch.torchrun import ExternalWorker


@dataclass
class Outcome:
    """The runs of one command, by their outcomes."""

    ended: dict[RunPaths, str] = field(default_factory=dict)
    """The completed, the pruned and the failed, in the order of the grid."""
    num_unfinished: int = 0
    """Interrupted, or never started."""
    errors: dict[RunPaths, ExptError] = field(default_factory=dict)
    """The errors of the failed runs of a sweep."""
    notes: list[str] = field(default_factory=list)
    """Lines to print at the end."""
    sweep_folder: Path | None = None
    """The folder of a sweep that has begun."""

    def add(self, run_paths: RunPaths, status: str, error: ExptError | None = None) -> None:
        """Take in a run of this status, which `error` has ended."""
        self.ended.pop(run_paths, None)  # it was pruned by an earlier command
        if status in (COMPLETED, PRUNED, FAILED):
            self.ended[run_paths] = status
        if status == FAILED and error is not None:
            self.errors[run_paths] = error

    def add_jobs(self, jobs: Collection[Job], spared: tuple[type[ExptError], ...] = ()) -> None:
        """Take in the outcomes of a sweep's runs.

        An error that is `spared` is not a failure if any run completed or was pruned.
        """
        good = {COMPLETED, PRUNED}
        has_any = bool(good & {*self.ended.values(), *(job.status for job in jobs)})
        for job in jobs:
            if not (has_any and isinstance(job.error, spared)):
                self.add(job.paths, job.status, job.error)

    def raise_if_failed(self) -> None:
        """Raise SweepFailed where a run of the sweep has failed."""
        folders = {paths: paths.folder.absolute() for paths in self.ended}
        completed = [folders[x] for x, status in self.ended.items() if status == COMPLETED]
        if failed := [paths for paths, status in self.ended.items() if status == FAILED]:
            left = self.num_unfinished
            rest = f", {left} were stopped or not started" if left else ""
            text = f"{len(failed)} of {len(folders) + left} runs failed{rest}"
            why = {folders[x]: str(self.errors.get(x, "it failed")) for x in failed}
            raise SweepFailed(text, completed, why, [*folders.values()])


@dataclass
class Command:
    """The state that the runs of one command share."""

    how: Launcher | ExternalWorker
    typed_at: float
    console: Console
    from_python: bool = False
    """True for a call of expt.run or expt.sweep, whose process belongs to the caller."""
    outcome: Outcome = field(default_factory=Outcome)
    sending: Sending = field(default_factory=Sending)
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    began: bool = False
    """True once a run or a sweep has its folder."""


def train(
    this: Command,
    words: Sequence[str],
    config: RunConfig,
    paths: RunPaths,
    *,
    settings: Mapping[str, Any] = {},
    hydra: Mapping[str, str] = {},
    env: Mapping[str, str] = {},
    identity: Identity | None = None,
    rerun_of: Path | None = None,
) -> float | None:
    """Train the run of the command in its folder; return the value of its objective.

    See RunRequest for the arguments; an `identity` that is known spares a look at the files.
    """
    this.began, about = True, about_run(paths.folder.name, words, config)
    if rerun_of is not None:
        about["rerun_of"] = str(rerun_of)
    with removed_if_refused(paths):
        identity = identity or identity_of(config, paths)
    request = RunRequest(
        config=config,
        settings=settings,
        identity=identity,
        paths=paths,
        about=about,
        hydra=hydra,
        env=env,
        typed_at=this.typed_at,
    )
    try:
        with removed_if_refused(paths):
            if config.preflight:
                _try_out(request)
                return None
            this.sending.follow(config, paths.folder)
            this.how.carry_out(request, this.console)
    finally:
        if not this.from_python:
            terminal.put_runs([(paths.folder, read_result(paths))])
    record = read_result(paths)
    this.outcome.add(paths, PRUNED if record.get("status") == PRUNED else COMPLETED)
    return objective_value(record)


def _try_out(request: RunRequest) -> None:
    """Time a few steps in place of the run, which leaves no folder."""
    from expt.command.preflight import preflight  # late: tables
    from expt.launch.pool import PoolOptions

    preflight([Job(request.paths, request)], machine.detect(), PoolOptions())
    remove_unused(request.paths)


@contextlib.contextmanager
def removed_if_refused(paths: RunPaths) -> Iterator[None]:
    """Remove the files of a run if the body is refused or interrupted before it begins."""
    is_there = paths.hydra.exists()  # of an earlier command
    try:
        yield
    except (ConfigError, Interrupted, OSError):
        if not is_there:
            remove_unused(paths)
        raise


def remove_unused(paths: RunPaths) -> None:
    """Remove the files of a run that did not begin, and its folder if that is empty then."""
    if not {*paths.found()} <= {paths.hydra, paths.code}:
        return
    with contextlib.suppress(OSError):  # there is none, or a disk that is read-only now
        if not is_held(paths):
            shutil.rmtree(paths.hydra, ignore_errors=True)
            kept_code.remove(paths.code)
            paths.remove_lock()
            remove_empty(paths.folder)
