"""A try at a run: its record begun, and kept true to its end."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expt.config.schema import RunConfig
from expt.errors import ConfigError, Interrupted
from expt.runs import provenance
from expt.runs.paths import RunPaths
from expt.runs.result import FAILED, INTERRUPTED, create_result, update_result


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is to be started: what, where, and for whom."""

    config: RunConfig
    paths: RunPaths
    devices: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; none is the CPU."""
    started: float
    """When the command was typed, or the run's turn came [seconds since the epoch]."""
    attempt: int = 0
    again: bool = False
    """Whether the folder may hold this run's record already, of an earlier attempt or of when it was refused."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """More for result.json: the run's name, identity and overrides."""


def begin_record(launch: Launch, port: int | None = None) -> Path | None:
    """Write the first result.json of a run or of its next attempt; returns the checkpoint that it goes on from.

    Raises ConfigError if its folder holds another run, or the checkpoint is another's.
    """
    config = launch.config
    again = launch.again or launch.attempt > 0 or config.resume == "auto"
    source = _found(config, launch.paths, again=again)
    fields = {
        "started": launch.started,
        "world_size": config.world_size,
        "local_world_size": config.world_size,
        "node": socket.gethostname(),
        "hosts": [{"name": socket.gethostname(), "ranks": list(range(config.world_size))}],
        "backend": config.backend if config.world_size > 1 else None,
        "devices": list(launch.devices),
        "master_port": port,
        "attempts": launch.attempt + 1,
        **launch.about,
        **provenance.describe(),
    }
    if again and source is None:
        launch.paths.clear_records()
    try:
        create_result(launch.paths, again=again, **fields)
    except FileExistsError:
        raise ConfigError(f"hydra.run.dir={launch.paths.folder}: holds a run already; choose another folder") from None
    if source is not None:
        from expt.runs import resume

        update_result(launch.paths, **resume.adopt(source, launch.paths))
    return source


def _found(config: RunConfig, paths: RunPaths, *, again: bool) -> Path | None:
    ran = again and (paths.checkpoints.exists() or paths.metrics.exists())
    if not ran and config.resume in (None, "auto"):
        return None
    from expt.runs import resume  # late: it imports torch, which a new run's driver has no need of

    return resume.find(config, paths, again=again)


def end_record(paths: RunPaths, error: BaseException) -> None:
    """Say in result.json that the run has failed, or was interrupted."""
    interrupted = isinstance(error, KeyboardInterrupt | Interrupted)
    status = INTERRUPTED if interrupted else FAILED
    try:
        update_result(paths, status=status, error=str(error) or "interrupted by a person")
    except OSError as problem:  # a full disk, maybe: what ended the run is still to be told
        print(f"warning: {paths.result}: could not be written ({problem})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def recorded(begun: Launch, on_start: Callable[[], None] | None) -> Iterator[Path | None]:
    """Keep result.json true about a run that trains in this process; gives the checkpoint that it goes on from."""
    source = begin_record(begun)
    if on_start:
        on_start()
    try:
        yield source
    except BaseException as error:
        end_record(begun.paths, error)
        raise
