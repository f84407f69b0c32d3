"""From the words of a command to finished runs: Hydra composes, and calls for each run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from expt import machine, signals
from expt.command import conf_files, overrides
from expt.command.arguments import options_first, refuse_unnamed, refuse_used_folder, with_earlier, with_latest
from expt.command.hydra_adapter import called_with, prefer_own_launchers
from expt.command.hydra_errors import as_config_error
from expt.command.hydra_folder import leave_no_trace, renew
from expt.command.overrides import describe
from expt.config.parse import parse, plain
from expt.config.schema import RunConfig
from expt.errors import ConfigError, ExptError, Interrupted, RunFailed
from expt.launch.launcher import Launcher, launcher
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import read_result
from expt.runs.view import leaderboard


@machine.not_world_writable()
def command(arguments: Sequence[str], *, typed_at: float, may_sweep: bool = True) -> list[RunPaths]:
    """Do what `python -m expt ARGUMENTS` does; returns the folders of the runs that have completed.

    Raises ExptError, with a text for a person, for whatever goes wrong.
    """
    how = launcher()
    if (followed := how.follow(typed_at)) is not None:
        return [followed]
    with how.deciding():
        return _command(arguments, Task(how, typed_at, may_sweep=may_sweep))


def _command(arguments: Sequence[str], task: Task) -> list[RunPaths]:
    @hydra.main(config_path=str(conf_files.conf_dir()), config_name="config", version_base="1.3")
    def run_task(composed: DictConfig) -> float | None:
        return task.run(composed)

    run_task.__wrapped__.task = task  # for the launcher, which Hydra makes
    overrides.register_resolvers()
    if task.how.starts_workers:  # else the workers may have been started again, in their folder
        refuse_used_folder(arguments)
    refuse_unnamed(arguments)
    prefer_own_launchers(arguments)
    try:
        words = _in_earlier_folder(task.how, with_earlier(with_latest(arguments)))
        with task.at_end, called_with(options_first(words)):
            run_task()
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        if isinstance(error.__cause__, OSError):  # in making the default folder
            raise _about_the_folder(error.__cause__, arguments, began=False) from error
        raise as_config_error(error, arguments) from error
    except OSError as error:
        raise _about_the_folder(error, arguments, began=task.began) from error
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or "interrupted") from None
    finally:
        if task.sweep_folder is not None:
            leaderboard.conclude(leaderboard.wide_console(), task.sweep_folder)
    if task.failed:
        left = len(task.not_completed) + task.num_unseen
        num_runs = len(task.failed) + len(task.completed) + left
        rest = f", {left} were stopped or not started" if left else ""
        raise RunFailed(f"{len(task.failed)} of {num_runs} runs failed{rest}")
    return task.completed


class Task:
    """What Hydra calls for each run, and what became of them."""

    def __init__(self, how: Launcher, typed_at: float, *, may_sweep: bool = True) -> None:
        self.how, self._typed_at, self.may_sweep = how, typed_at, may_sweep
        self.began = False
        self.completed: list[RunPaths] = []
        self.failed: list[RunPaths] = []
        self.not_completed: list[RunPaths] = []
        """Runs that were interrupted, or never started."""
        self.num_unseen = 0
        """Points of a sweep whose turn to be composed never came."""
        self.at_end = contextlib.ExitStack()
        self.sweep_folder: Path | None = None

    def run(self, composed: DictConfig) -> float | None:
        """One run, in the folder that Hydra has made for it; returns the objective's value."""
        self.began, hydra_config = True, HydraConfig.get()
        run_paths = RunPaths(Path(hydra_config.runtime.output_dir))
        sweep = hydra_config.mode == RunMode.MULTIRUN
        if sweep:
            self.sweep_folder = Path(hydra_config.sweep.dir)
        try:
            settings = plain(composed, sweep=sweep)
            config = parse(settings, machine.detect())
        except (ConfigError, OmegaConfBaseException):
            leave_no_trace(run_paths)
            raise
        try:
            request = self._request(config, run_paths, settings, sweep=sweep)
            resume = functools.partial(renew, run_paths, composed) if config.resume == "auto" else None
            self.how.carry_out(request, resume)
        except ConfigError:
            leave_no_trace(run_paths)
            raise
        except Interrupted as error:
            leave_no_trace(run_paths)
            if sweep:  # Hydra's own launchers take an exception for a failure, and go on with the next run
                raise KeyboardInterrupt(str(error)) from None
            raise
        self.completed.append(run_paths)
        if sweep and signals.asked():  # while the run was about to end by itself: no further one
            raise KeyboardInterrupt
        return read_result(run_paths)["objective"]["value"]

    def _request(
        self, config: RunConfig, run_paths: RunPaths, settings: Mapping[str, Any], *, sweep: bool
    ) -> RunRequest:
        hydra_config = HydraConfig.get()
        return RunRequest(
            config=config,
            settings=settings,
            paths=run_paths,
            typed_at=None if sweep else self._typed_at,
            about=describe(run_paths.folder.name, list(hydra_config.overrides.task)),
            # The forkserver may be older than these variables.
            env={str(key): str(value) for key, value in hydra_config.job.env_set.items()},
        )


def _in_earlier_folder(how: Launcher, arguments: Sequence[str]) -> list[str]:
    """The command's arguments; where torchrun has started the workers again, with the folder of before."""
    folder = how.earlier_folder()
    return [*arguments, f"hydra.run.dir='{folder}'", "hydra.output_subdir=null"] if folder else list(arguments)


def _about_the_folder(error: OSError, arguments: Sequence[str], *, began: bool) -> ExptError:
    """What to say where the driver could not write: before a run began its folder cannot be used, else it failed."""
    where, why = error.filename, error.strerror or str(error)
    if began:
        return RunFailed(
            f"{f'{where}: ' if where else ''}{why}; what was saved before is kept, and resume=auto goes on"
        )
    key = "hydra.sweep.dir" if {"-m", "--multirun"} & {*arguments} else "hydra.run.dir"
    typed = next((word.partition("=")[2] for word in arguments if word.startswith(f"{key}=")), where or "")
    return ConfigError(f"{key}={typed}: {why}; choose another folder, as in {key}=FOLDER")
