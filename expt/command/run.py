"""One run: from its configuration to its end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from expt import machine
from expt.command import compose, terminal
from expt.command.grammar import about_run
from expt.command.hydra_part import environment_of, folder_of, hydra_files
from expt.config.groups import GROUPS
from expt.config.keys import without_effect
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.dashboards.sender import Sending
from expt.data.fingerprint import identity_of
from expt.errors import ConfigError, ExptError, Interrupted, SweepFailed, warn
from expt.launch.job import Job
from expt.runs.overrides import key_of
from expt.runs.paths import RunPaths, is_held, refuse_mixed, remove_empty
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, FAILED, PRUNED, objective_value, read_result
from expt.runs.view.text import Console

if TYPE_CHECKING:
    from expt.launch.one_run import Launcher
    from expt.launch.torchrun import ExternalWorker


@dataclass
class Outcome:
    """The runs of one command, by their outcomes."""

    ended: dict[RunPaths, str] = field(default_factory=dict)
    """The completed, the pruned and the failed, in the order of the grid."""
    num_unfinished: int = 0
    """Interrupted, or never started."""
    errors: dict[Path, ExptError] = field(default_factory=dict)
    """The error of each failed run of a sweep, by its folder."""
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
            self.errors[run_paths.folder] = error

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
        failed = [paths for paths, status in self.ended.items() if status == FAILED]
        why = {folders[x]: str(self.errors.get(x.folder, "it failed")) for x in failed}
        if why:
            left = self.num_unfinished
            rest = f", {left} were stopped or not started" if left else ""
            completed = [each for paths, each in folders.items() if self.ended[paths] == COMPLETED]
            text = f"{len(why)} of {len(folders) + left} runs failed{rest}"
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

    def request(
        self,
        words: Sequence[str],
        config: RunConfig,
        paths: RunPaths,
        *,
        settings: Mapping[str, Any] = {},
        hydra: Mapping[str, str] = {},
        env: Mapping[str, str] = {},
    ) -> RunRequest:
        """Return the request for the run of this command; see RunRequest for the arguments."""
        self.began = True
        with _removed_if_refused(paths):
            identity = identity_of(config, paths)
        return RunRequest(
            config=config,
            settings=settings,
            identity=identity,
            paths=paths,
            about=about_run(paths.folder.name, words, config),
            hydra=hydra,
            env=env,
            typed_at=self.typed_at,
        )


def run_one(this: Command, composed: DictConfig, words: Sequence[str]) -> float | None:
    """Train the run of a configuration, which `words` ask for; return its objective's value."""
    refuse_overruled(composed, words)
    settings = compose.settings_of(composed)
    config = parse(settings, machine.detect())
    for line in without_effect(config, map(key_of, words)):
        warn(line)
    paths = RunPaths(folder_of(composed, "run"))
    if not paths.result.exists():
        refuse_mixed(paths.folder, "hydra.run.dir")
    compose.place(composed, paths.folder)
    typed = [word for word in words if word != "resume=auto"]
    files, env = hydra_files(composed, typed), environment_of(composed)
    request = this.request(words, config, paths, settings=settings, hydra=files, env=env)
    return train(this, request)


def train(this: Command, request: RunRequest) -> float | None:
    """Train one run in its folder; return the value of its objective."""
    config, paths = request.config, request.paths
    try:
        with _removed_if_refused(paths):
            if config.preflight:
                from expt.command.preflight import preflight  # late: tables
                from expt.launch.pool import PoolOptions

                preflight([Job(paths, request)], machine.detect(), PoolOptions())
                remove_unused(paths)
                return None
            this.sending.follow(config, paths.folder)
            this.how.carry_out(request, this.console)
    finally:
        if not this.from_python:
            terminal.put_runs([(paths.folder, read_result(paths))])
    record = read_result(paths)
    this.outcome.add(paths, PRUNED if record.get("status") == PRUNED else COMPLETED)
    return objective_value(record)


@contextlib.contextmanager
def _removed_if_refused(paths: RunPaths) -> Iterator[None]:
    """Remove the run's folder if the body is refused or interrupted and has left nothing in it."""
    is_there = paths.hydra.exists()  # of an earlier command
    try:
        yield
    except (ConfigError, Interrupted):
        if not is_there:
            remove_unused(paths)
        raise


def remove_unused(run_paths: RunPaths) -> None:
    """Remove the folder of a run that did not begin, unless it holds something."""
    unused = {run_paths.hydra, run_paths.lock, run_paths.code}
    with contextlib.suppress(OSError):  # a disk that is read-only now
        folder = run_paths.folder
        if folder.is_dir() and {*folder.iterdir()} <= unused and not is_held(run_paths):
            for path in (run_paths.hydra, run_paths.code):
                shutil.rmtree(path, ignore_errors=True)
            run_paths.lock.unlink(missing_ok=True)
            remove_empty(folder)


def refuse_overruled(composed: DictConfig, words: Sequence[str]) -> None:
    """Raise ConfigError for a typed choice whose place an experiment gives to a custom class."""
    typed = {key_of(word): word for word in words}
    for group, members in GROUPS.items():
        choice = typed.get(group, "").partition("=")[2]
        node = composed.get(group)
        is_class = isinstance(node, DictConfig) and "_target_" in node
        if choice in members and is_class and f"{group}._target_" not in typed:
            raise ConfigError(
                f"{group}={choice}: a YAML file sets {group} to {node._target_}; leave one out"
            )
