"""From the words of a command to finished runs: Hydra composes, this decides how each run's workers come to be."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from expt import machine, paths, provenance, record, report
from expt.arguments import (
    options_first,
    prefer_own_launchers,
    refuse_null_group,
    refuse_used_folder,
    with_earlier,
    with_latest,
)
from expt.config import parse, plain
from expt.display import RunDisplay, print_summary
from expt.errors import ConfigError, ExptError, Interrupted, RunFailed
from expt.explain import as_config_error
from expt.identity import describe as describe_config
from expt.overrides import describe
from expt.paths import RunPaths
from expt.schema import RunConfig

if TYPE_CHECKING:
    from expt.pool import Job


def command(arguments: Sequence[str], *, started: float) -> list[RunPaths]:
    """Do what `python -m expt ARGUMENTS` does; returns the folders of the runs that have completed.

    Raises ExptError, with a text for a person, for whatever goes wrong.
    """
    if not machine.is_external_worker():
        return _command(arguments, started)
    from expt import external

    if os.environ["RANK"] != "0":
        return [external.follow(started)]
    with external.refusal_told():
        return _command(arguments, started)


def _command(arguments: Sequence[str], started: float) -> list[RunPaths]:
    task = Task(started)

    @hydra.main(config_path=str(paths.conf_dir()), config_name="config", version_base="1.3")
    def run_task(composed: DictConfig) -> float | None:
        return task.run(composed)

    run_task.__wrapped__.task = task  # for the launcher, which Hydra makes
    paths.register_resolvers()
    refuse_used_folder(arguments)
    refuse_null_group(arguments)
    prefer_own_launchers(arguments)
    try:
        with task.at_end, _hydra_called_with(options_first(_again(with_earlier(with_latest(arguments))))):
            run_task()
    except (HydraException, OmegaConfBaseException) as error:
        raise as_config_error(error, arguments) from error
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or "interrupted") from None
    finally:
        if task.sweep_folder is not None:
            report.conclude(report.wide_console(), task.sweep_folder)
    if task.failed:
        num_runs = len(task.failed) + len(task.completed) + len(task.not_completed)
        rest = f", {len(task.not_completed)} were stopped or not started" if task.not_completed else ""
        raise RunFailed(f"{len(task.failed)} of {num_runs} runs failed{rest}")
    return task.completed


class Task:
    """What Hydra calls for each run, and what became of them."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.completed: list[RunPaths] = []
        self.failed: list[RunPaths] = []
        self.not_completed: list[RunPaths] = []
        """Runs that were interrupted, or never started."""
        self.at_end = contextlib.ExitStack()
        self.sweep_folder: Path | None = None

    def run(self, composed: DictConfig) -> float | None:
        """One run, in the folder that Hydra has made for it; returns the objective's value."""
        hydra_config = HydraConfig.get()
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
            run(config, run_paths, started=time.time() if sweep else self._started, settings=settings)
        except Interrupted as error:
            if sweep:  # Hydra's own launchers take an exception for a failure, and go on with the next run
                raise KeyboardInterrupt(str(error)) from None
            raise
        self.completed.append(run_paths)
        value: float | None = record.read_result(run_paths)["objective"]["value"]
        return value


def run(config: RunConfig, run_paths: RunPaths, *, started: float, settings: Mapping[str, Any]) -> None:
    """Train what `config`, parsed from `settings`, describes in its folder.

    Raises ConfigError, RunFailed or Interrupted.
    """
    console = Console()
    if machine.is_external_worker():
        from expt import external

        env = {str(key): str(value) for key, value in HydraConfig.get().job.env_set.items()}
        external.lead(config, settings, run_paths, started=started, about=_about(config, run_paths), env=env)
    elif config.debug:
        _run_in_process(config, run_paths, started)
    else:
        attempt = run_paths.clear_for_next_attempt() if config.resume == "auto" else 0
        about = _about(config, run_paths)
        run_workers(config, run_paths, console, started=started, about=about, attempt=attempt, env={})
    print_summary(console, run_paths)


class _Watcher:
    """Shows the pool's only run."""

    def __init__(self, display: RunDisplay) -> None:
        self._display = display

    def job_starting(self, job: Job) -> None:
        pass

    def job_retrying(self, job: Job, error: ExptError) -> None:
        pass

    def job_ended(self, job: Job) -> None:
        pass

    def tick(self, active: Sequence[Job]) -> None:
        self._display.update()


def run_workers(
    config: RunConfig,
    run_paths: RunPaths,
    console: Console,
    *,
    started: float,
    about: Mapping[str, Any],
    attempt: int,
    env: Mapping[str, str],
) -> None:
    """Train on workers of this machine. Raises ConfigError, RunFailed or Interrupted."""
    # late: it imports torch, which the forkserver is importing meanwhile
    from expt.pool import Job, Options, Pool

    job = Job(
        run_paths.folder.name, run_paths, config, about=dict(about), typed=started, attempt=attempt, env=dict(env)
    )
    with RunDisplay(run_paths, console, epochs=config.epochs) as display:
        try:
            Pool(machine.detect(), Options(), _Watcher(display)).run(iter([job]))
        except KeyboardInterrupt:
            go_on = shlex.quote(f"hydra.run.dir={run_paths.folder}")
            raise Interrupted(f"interrupted; to go on: {provenance.program()} {go_on} resume=auto") from None
    if job.error:
        raise job.error


def _about(config: RunConfig, run_paths: RunPaths) -> dict[str, Any]:
    overrides = list(HydraConfig.get().overrides.task)
    return {**describe_config(config), **describe(run_paths.folder.name, overrides)}


def _run_in_process(config: RunConfig, run_paths: RunPaths, started: float) -> None:
    """The single worker of `debug=true`: here, where pdb works."""
    from expt import distributed, worker
    from expt.data.files import prepare

    prepare(config.dataset)
    alone = distributed.worker_from(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, gpus=config.gpu_indices
    )
    with _recorded(config, run_paths, started) as source:
        worker.run_as(alone, config, run_paths, started, source)


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


@contextlib.contextmanager
def _recorded(config: RunConfig, run_paths: RunPaths, started: float) -> Iterator[Path | None]:
    """Keep result.json true about a run that trains in this process; gives the checkpoint that it goes on from."""
    from expt import launch

    about = _about(config, run_paths)
    source = launch.begin_record(launch.Launch(config=config, paths=run_paths, started=started, about=about))
    try:
        yield source
    except BaseException as error:
        launch.end_record(run_paths, error)
        raise


def _leave_no_trace(run_paths: RunPaths) -> None:
    """Remove the folder that Hydra made for a run that cannot start, unless it holds something."""
    if run_paths.result.exists():
        return
    for path in (*(run_paths.hydra / name for name in ("config.yaml", "hydra.yaml")), run_paths.overrides):
        path.unlink(missing_ok=True)
    for folder in (run_paths.hydra, run_paths.folder):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
