"""From the words of a command to finished runs: Hydra composes, and calls for each run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from expt import machine, signals
from expt.command import experiment, hydra_adapter, overrides
from expt.command.arguments import (
    options_first,
    readable,
    refuse_lone,
    refuse_mistyped_folder,
    refuse_several_samplers,
    refuse_unnamed,
    refuse_used_folder,
    warn_of_repeated,
    with_earlier,
    with_latest,
    with_own_keys,
)
from expt.command.hydra_errors import COMPOSING, USE_SWEEP, as_config_error
from expt.command.hydra_folder import leave_no_trace, renew
from expt.command.outcome import Outcome
from expt.command.overrides import about_run, typed_in
from expt.command.own_class import folded, spelled_out
from expt.command.own_conf import (
    own_folders,
    refuse_hidden,
    refuse_no_names,
    refuse_wrong_plus,
    with_conf_here,
)
from expt.command.parents import with_parent
from expt.config.parse import parse, plain
from expt.config.schema import RunConfig
from expt.dashboards.sending import Sending
from expt.data.fingerprint import content_of
from expt.errors import INTERRUPTED_BEFORE, ConfigError, ExptError, Interrupted, RunFailed
from expt.launch.job import Job, Options
from expt.launch.launcher import Launcher, launcher
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, PAUSED, objective_of, read_result
from expt.runs.typed import quoted


@machine.not_world_writable()
@machine.seldom_collecting()
def command(arguments: Sequence[str], *, typed_at: float, may_sweep: bool = True) -> list[RunPaths]:
    """Do what `python -m expt ARGUMENTS` does; returns the folders of the runs that have completed
    or paused.

    Raises ExptError, with a text for a person, for whatever goes wrong.
    """
    how = launcher()
    if (followed := how.follow(typed_at)) is not None:
        return [followed]
    with how.deciding():
        return _command(arguments, Task(how, typed_at, may_sweep=may_sweep))


def _command(arguments: Sequence[str], task: Task) -> list[RunPaths]:
    outcome = task.outcome
    try:
        overrides.register_resolvers()
        words = readable(arguments)
        if task.how.starts_workers:  # else the workers may have been started again, in their folder
            refuse_used_folder(words)
            refuse_mistyped_folder(words)
        refuse_unnamed(arguments)
        refuse_no_names(arguments)
        refuse_wrong_plus(arguments)
        refuse_several_samplers(arguments)
        warn_of_repeated(arguments)
        words = with_parent(_in_earlier_folder(task.how, with_earlier(with_latest(words))))
        words = with_conf_here(spelled_out(with_own_keys(words)))
        if not {"--shell-completion", "-sc"} & {*words}:  # a shell's line is no place for it
            refuse_hidden(own_folders(words))
        with task.at_end:
            hydra_adapter.call(task, options_first(words))
    except (*COMPOSING, OSError, KeyboardInterrupt) as error:
        raise _in_words(error, arguments, task) from error
    finally:
        task.sending.close()
        if outcome.sweep_folder is not None:
            from expt.command.conclusion import (
                conclude,
            )  # late: a run's start does not wait for tables
            from expt.runs.view import leaderboard

            conclude(
                leaderboard.wide_console(),
                outcome.sweep_folder,
                failed_now=outcome.errors,
                notes=outcome.notes,
            )
        task.sending.wait()
    outcome.raise_if_failed()
    return outcome.in_order


def _in_words(error: BaseException, arguments: Sequence[str], task: Task) -> ExptError:
    """The error for a person."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(str(error) or ("interrupted" if task.began else INTERRUPTED_BEFORE))
    if isinstance(error, COMPOSING):  # before OSError: Hydra's for a missing file is both
        if isinstance(error.__cause__, OSError):  # in making the default folder
            return _about_the_folder(error.__cause__, arguments, began=False)
        return as_config_error(error, arguments, of_one_run="" if task.may_sweep else USE_SWEEP)
    assert isinstance(error, OSError)
    return _about_the_folder(error, arguments, began=task.began)


class Task:
    """What Hydra calls for each run; its launchers get it too, and tell what became of a sweep's."""

    def __init__(self, how: Launcher, typed_at: float, *, may_sweep: bool = True) -> None:
        self.how, self._typed_at, self.may_sweep = how, typed_at, may_sweep
        self.began = False
        """Whether a run or a sweep has its folder."""
        self.outcome = Outcome()
        self.at_end = contextlib.ExitStack()
        self.sending = Sending()

    @property
    def _several(self) -> str:
        return (
            "chooses the points of several runs;"
            f" {'add -m' if self.may_sweep else 'use expt.sweep'}"
        )

    def __call__(self, composed: DictConfig) -> float | None:
        """One run, in the folder that Hydra has made for it; returns the objective's value."""
        self.began, hydra_config = True, HydraConfig.get()
        run_paths = RunPaths(Path(hydra_config.runtime.output_dir))
        sweep = hydra_config.mode == RunMode.MULTIRUN
        told = functools.partial(
            experiment.told, typed_in(hydra_config), experiment.folders_of(hydra_config)
        )
        if sweep:
            self.outcome.sweep_folder = Path(hydra_config.sweep.dir)
        try:
            refuse_lone(() if sweep else hydra_config.overrides.hydra)
            if "search" in composed:
                raise ConfigError(f"search={composed.search.name}: {self._several}")
            settings = plain(composed, sweep=sweep)
            with told():
                config = parse(settings, machine.detect())
        except (ConfigError, OmegaConfBaseException):
            leave_no_trace(run_paths)
            raise
        try:
            request = self._request(config, run_paths, settings, sweep=sweep)
            if config.preflight:
                self._preflight(request)
                return None
            self.sending.follow(config, self.outcome.sweep_folder or run_paths.folder)
            resume = (
                functools.partial(renew, run_paths, composed) if config.resume == "auto" else None
            )
            with told():
                self.how.carry_out(request, resume)
        except ConfigError:
            leave_no_trace(run_paths)
            raise
        except Interrupted as error:
            leave_no_trace(run_paths)
            if (
                sweep
            ):  # Hydra's own launchers take an exception for a failure, and go on with the next run
                raise KeyboardInterrupt(str(error)) from None
            raise
        record = read_result(run_paths)
        self.outcome.add(run_paths, PAUSED if record.get("status") == PAUSED else COMPLETED)
        if sweep and signals.asked():  # while the run was about to end by itself: no further one
            raise KeyboardInterrupt
        return objective_of(record)

    def _preflight(self, request: RunRequest) -> None:
        """Leaves nothing in the run's folder, which Hydra has made."""
        from expt.command.preflight import preflight  # late: a run's start does not wait for tables

        try:
            preflight([Job(request.paths, request)], machine.detect(), Options())
        finally:
            leave_no_trace(request.paths)

    def _request(
        self, config: RunConfig, run_paths: RunPaths, settings: Mapping[str, Any], *, sweep: bool
    ) -> RunRequest:
        hydra_config = HydraConfig.get()
        return RunRequest(
            config=config,
            settings=settings,
            content=content_of(config),
            paths=run_paths,
            typed_at=None if sweep else self._typed_at,
            about=about_run(run_paths.folder.name, folded(typed_in(hydra_config))),
            # The forkserver may be older than these variables.
            env={str(key): str(value) for key, value in hydra_config.job.env_set.items()},
        )


def _in_earlier_folder(how: Launcher, arguments: Sequence[str]) -> list[str]:
    """The command's arguments; where torchrun has started the workers again, with the folder of
    before.
    """
    folder = how.earlier_folder()
    return (
        [*arguments, f"hydra.run.dir={quoted(folder)}", "hydra.output_subdir=null"]
        if folder
        else list(arguments)
    )


def _about_the_folder(error: OSError, arguments: Sequence[str], *, began: bool) -> ExptError:
    """What to say where the driver could not write: before a run began its folder cannot be used,
    else it failed.
    """
    where, why = error.filename, error.strerror or str(error)
    if isinstance(error, BrokenPipeError):
        return RunFailed("who reads the output has gone")
    if began:
        return RunFailed(
            f"{f'{where}: ' if where else ''}{why}; what was saved before is kept, and resume=auto"
            " goes on"
        )
    key = "hydra.sweep.dir" if {"-m", "--multirun"} & {*arguments} else "hydra.run.dir"
    typed = next(
        (word.partition("=")[2] for word in arguments if word.startswith(f"{key}=")), where or ""
    )
    return ConfigError(f"{key}={typed}: {why}; choose another folder, as in {key}=FOLDER")
