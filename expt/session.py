"""From the words of a command to finished runs: Hydra composes, and calls for each run."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from expt import machine, paths, record, report, signals, single_run
from expt.arguments import (
    options_first,
    prefer_own_launchers,
    refuse_unnamed,
    refuse_used_folder,
    with_earlier,
    with_latest,
)
from expt.config import parse, plain
from expt.errors import ConfigError, ExptError, Interrupted, RunFailed
from expt.explain import as_config_error
from expt.identity import describe as describe_config
from expt.overrides import describe
from expt.paths import RunPaths
from expt.schema import RunConfig
from expt.single_run import Asked

COMPOSED = "config.yaml"


@record.not_world_writable()
def command(arguments: Sequence[str], *, started: float, may_sweep: bool = True) -> list[RunPaths]:
    """Do what `python -m expt ARGUMENTS` does; returns the folders of the runs that have completed.

    Raises ExptError, with a text for a person, for whatever goes wrong.
    """
    if not machine.is_external_worker():
        return _command(arguments, Task(started, may_sweep=may_sweep))
    from expt import external

    if os.environ["RANK"] != "0":
        return [external.follow(started)]
    with external.refusal_told():
        return _command(arguments, Task(started, may_sweep=may_sweep))


def _command(arguments: Sequence[str], task: Task) -> list[RunPaths]:
    @hydra.main(config_path=str(paths.conf_dir()), config_name="config", version_base="1.3")
    def run_task(composed: DictConfig) -> float | None:
        return task.run(composed)

    run_task.__wrapped__.task = task  # for the launcher, which Hydra makes
    paths.register_resolvers()
    refuse_used_folder(arguments)
    refuse_unnamed(arguments)
    prefer_own_launchers(arguments)
    try:
        with task.at_end, _hydra_called_with(options_first(_again(with_earlier(with_latest(arguments))))):
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
            report.conclude(report.wide_console(), task.sweep_folder)
    if task.failed:
        left = len(task.not_completed) + task.num_unseen
        num_runs = len(task.failed) + len(task.completed) + left
        rest = f", {left} were stopped or not started" if left else ""
        raise RunFailed(f"{len(task.failed)} of {num_runs} runs failed{rest}")
    return task.completed


class Task:
    """What Hydra calls for each run, and what became of them."""

    def __init__(self, started: float, *, may_sweep: bool = True) -> None:
        self._started, self.may_sweep = started, may_sweep
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
            _leave_no_trace(run_paths)
            raise
        try:
            _run(self._asked(config, run_paths, composed, settings, sweep=sweep))
        except ConfigError:
            _leave_no_trace(run_paths)
            raise
        except Interrupted as error:
            _leave_no_trace(run_paths)
            if sweep:  # Hydra's own launchers take an exception for a failure, and go on with the next run
                raise KeyboardInterrupt(str(error)) from None
            raise
        self.completed.append(run_paths)
        if sweep and signals.asked():  # while the run was about to end by itself: no further one
            raise KeyboardInterrupt
        value: float | None = record.read_result(run_paths)["objective"]["value"]
        return value

    def _asked(
        self, config: RunConfig, run_paths: RunPaths, composed: DictConfig, settings: Mapping[str, Any], *, sweep: bool
    ) -> Asked:
        hydra_config = HydraConfig.get()
        typed = list(hydra_config.overrides.task)
        return Asked(
            config=config,
            settings=settings,
            paths=run_paths,
            started=time.time() if sweep else self._started,
            about={**describe_config(config), **describe(run_paths.folder.name, typed)},
            # The forkserver may be older than these variables.
            env={str(key): str(value) for key, value in hydra_config.job.env_set.items()},
            on_start=functools.partial(_renew_hydra, run_paths, composed) if config.resume == "auto" else None,
        )


def _run(asked: Asked) -> None:
    if not machine.is_external_worker():
        single_run.run(asked)
        return
    from expt import external

    external.lead(asked)


def _again(arguments: Sequence[str]) -> list[str]:
    """The command's arguments; where torchrun has started the workers again, with the folder of before."""
    if not machine.is_external_worker():
        return list(arguments)
    from expt import external

    folder = external.earlier_folder()
    return [*arguments, f"hydra.run.dir='{folder}'", "hydra.output_subdir=null"] if folder else list(arguments)


@contextlib.contextmanager
def _hydra_called_with(arguments: Sequence[str]) -> Iterator[None]:
    """What Hydra reads from its surroundings: the command line, and that exceptions are to come through."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _without_echo():
            yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Drop the line that Hydra prints before it raises a failed job's exception: the error itself follows."""

    class Filter:
        def write(self, text: str) -> int:
            return len(text) if text.startswith("Error executing job with overrides") else real.write(text)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    real = sys.stderr
    with contextlib.redirect_stderr(cast(TextIO, Filter())):
        yield


def _leave_no_trace(run_paths: RunPaths) -> None:
    """Remove the folder that Hydra made for a run that cannot start, unless it holds something."""
    with contextlib.suppress(OSError):  # a disk that is read-only now; why it cannot start is still to be told
        if run_paths.result.exists() or run_paths.logs(0).exists():
            return
        own = (*(run_paths.hydra / name for name in (COMPOSED, "hydra.yaml")), run_paths.overrides, run_paths.lock)
        for path in own:
            path.unlink(missing_ok=True)
        for folder in (run_paths.hydra, run_paths.folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


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


def _renew_hydra(run_paths: RunPaths, composed: DictConfig) -> None:
    """Let the folder's .hydra tell what the run is now, when it goes on: Hydra was kept from writing there."""
    words = HydraConfig.get().overrides.task
    run_paths.hydra.mkdir(exist_ok=True)
    OmegaConf.save(
        OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]), run_paths.hydra / COMPOSED
    )
    OmegaConf.save(OmegaConf.create([word for word in words if word != "resume=auto"]), run_paths.overrides)
