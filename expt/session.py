"""From the words of a command to finished runs: Hydra composes, this decides how each run's workers come to be."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from expt import machine, paths, record
from expt.config import parse
from expt.display import REFRESH_S, RunDisplay, print_summary
from expt.errors import ConfigError
from expt.explain import as_config_error
from expt.paths import RunPaths
from expt.schema import RunConfig

FOLDER_KEY = "expt/run_folder"


def command(arguments: Sequence[str], *, started: float) -> list[RunPaths]:
    """Do what `python -m expt ARGUMENTS` does; returns the folders of the runs that have completed.

    Raises ExptError, with a text for a person, for whatever goes wrong.
    """
    completed: list[RunPaths] = []

    @hydra.main(config_path=str(paths.conf_dir()), config_name="config", version_base="1.3")
    def task(composed: DictConfig) -> float | None:
        run_paths = RunPaths(Path(HydraConfig.get().runtime.output_dir))
        objective = run(composed, run_paths, started=started)
        completed.append(run_paths)
        return objective

    paths.register_resolvers()
    _refuse_used_folder(arguments)
    try:
        with _hydra_called_with(_agreed(arguments)):
            task()
    except (HydraException, OmegaConfBaseException) as error:
        raise as_config_error(error, arguments) from error
    return completed


def run(composed: DictConfig, run_paths: RunPaths, *, started: float) -> float | None:
    """Train what `composed` describes in its folder; returns the objective's value."""
    here = machine.detect()
    try:
        config = parse(_plain(composed), here)
    except (ConfigError, OmegaConfBaseException):
        _leave_no_trace(run_paths)
        raise
    console = Console()
    if machine.is_external_worker():
        _run_as_external_worker(config, run_paths, console, started)
    elif config.debug:
        _run_in_process(config, run_paths, _devices(config, here), started)
    else:
        _run_workers(config, run_paths, _devices(config, here), console, started)
    if _is_first():
        print_summary(console, run_paths)
    value: float | None = record.read_result(run_paths)["objective"]["value"]
    return value


def _run_workers(
    config: RunConfig, run_paths: RunPaths, devices: Sequence[str], console: Console, started: float
) -> None:
    from expt.data.files import prepare

    prepare(config.dataset)  # once, here, before any worker could try the same
    from expt import launch  # late: it imports torch, which the forkserver is importing meanwhile

    with RunDisplay(run_paths, console, epochs=config.epochs) as display:
        launch.run(config, run_paths, devices, started=started, on_poll=display.update)


def _run_in_process(config: RunConfig, run_paths: RunPaths, devices: Sequence[str], started: float) -> None:
    """The single worker of `debug=true`: here, where pdb works."""
    from expt import distributed, launch, worker
    from expt.data.files import prepare

    prepare(config.dataset)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    alone = distributed.worker_from({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, num_gpus=len(devices))
    with launch.recorded(config, run_paths, devices, started=started):
        worker.run_as(alone, config, run_paths, started)


def _run_as_external_worker(config: RunConfig, run_paths: RunPaths, console: Console, started: float) -> None:
    """One of the workers that torchrun has started: rank 0 says where the run folder is, and keeps its record."""
    from expt import distributed, launch, worker
    from expt.data.files import prepare

    prepare(config.dataset)  # under a file lock, so that one worker of each machine does it
    if not _is_first():
        worker.main(config, run_paths, started)
        return
    display = RunDisplay(run_paths, console, epochs=config.epochs)
    with launch.recorded(config, run_paths, [], started=started), _watched(display):
        distributed.external_store().set(FOLDER_KEY, str(run_paths.folder.resolve()))
        worker.main(config, run_paths, started)


def _is_first() -> bool:
    """Whether this process speaks for the run: the driver, or rank 0 where there is none."""
    return not machine.is_external_worker() or os.environ["RANK"] == "0"


def _agreed(arguments: Sequence[str]) -> list[str]:
    """The command's arguments; for a worker that torchrun started, with rank 0's run folder."""
    if _is_first():
        return list(arguments)
    from expt import distributed

    folder = distributed.external_store().get(FOLDER_KEY).decode()
    return [*arguments, f"hydra.run.dir='{folder}'", "hydra.output_subdir=null"]


def _refuse_used_folder(arguments: Sequence[str]) -> None:
    """Raise ConfigError before Hydra writes into the folder of an earlier run."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        folder = Path(value.strip("'\""))
        if key == "hydra.run.dir" and RunPaths(folder).result.exists() and not machine.is_external_worker():
            raise ConfigError(f"hydra.run.dir={folder}: holds a run already; choose another folder")


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
def _watched(display: RunDisplay) -> Iterator[None]:
    """Keep the display up to date from a thread, where this process is busy training."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(REFRESH_S):
            display.update()

    thread = threading.Thread(target=watch, name="display", daemon=True)
    with display:
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _devices(config: RunConfig, here: machine.Machine) -> list[str]:
    indices = range(config.gpus) if isinstance(config.gpus, int) else config.gpus
    return [here.gpus[index] for index in indices]


def _plain(composed: DictConfig) -> dict[str, Any]:
    content = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _leave_no_trace(run_paths: RunPaths) -> None:
    """Remove the folder that Hydra made for a run that cannot start, unless it holds something."""
    for path in (run_paths.hydra / name for name in ("config.yaml", "hydra.yaml", "overrides.yaml")):
        path.unlink(missing_ok=True)
    for folder in (run_paths.hydra, run_paths.folder):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
