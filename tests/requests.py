"""Requests for runs, as a command would make them, for tests of what carries them out."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from tests.composing import composed


@functools.cache
def settings() -> dict[str, Any]:
    """The shipped configuration, composed once."""
    return composed()


@functools.cache
def _config() -> RunConfig:
    return parse(settings(), Machine(cpus=8))


def request(
    folder: Path, *, may_have_run: bool = False, typed_at: float | None = None, **config: Any
) -> RunRequest:
    """A request for a run in `folder`, of one CPU worker where `config` says nothing else."""
    return RunRequest(
        config=dataclasses.replace(_config(), **{"world_size": 1, "threads": 1, **config}),
        settings=copy.deepcopy(settings()),
        paths=RunPaths(folder),
        about={"name": folder.name, "overrides": {"seed": 0}, "arguments": ["seed=0"]},
        env={"COLOUR": "green"},
        typed_at=typed_at,
        may_have_run=may_have_run,
    )
