"""Requests for runs, as a command would make them, for tests of what carries them out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from expt.config.identity import VERSION, Content, Identity, shown
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.data.build import Data, build
from expt.machine import Machine
from expt.runs import continuing
from expt.runs.attempt import Attempt
from expt.runs.continuing import Source
from expt.runs.metrics_file import MetricsWriter
from expt.runs.named_checkpoint import read
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


def request_of(
    config: RunConfig, folder: Path, content: Content | None = None, **more: Any
) -> RunRequest:
    """A request for a run of this configuration in `folder`."""
    words: Any = {"name": folder.name, "overrides": {"seed": 0}, "arguments": ["seed=0"]}
    known: Any = {"about": words, "typed_at": 0.0, **more}
    identity = Identity.of(config, content or {})
    return RunRequest(config=config, identity=identity, paths=RunPaths(folder), **known)


def request(
    folder: Path,
    *,
    may_have_run: bool = False,
    typed_at: float | None = None,
    content: Content | None = None,
    **config: Any,
) -> RunRequest:
    """A request for a run in `folder`, of one CPU worker where `config` says nothing else."""
    more = {"typed_at": typed_at, "may_have_run": may_have_run, "env": {"COLOUR": "green"}}
    given = dataclasses.replace(_config(), **{"world_size": 1, "threads": 1, **config})
    return request_of(given, folder, content, settings=copy.deepcopy(settings()), **more)


@functools.cache
def _dataset(words: str) -> Any:
    return parse(composed(*words.split()), Machine(cpus=8)).dataset


def dataset(words: str, **changes: Any) -> Any:
    """The dataset of a command with these words, and what is other than in its YAML."""
    return dataclasses.replace(_dataset(words), **changes)


def built(dataset: Any, task: Any = None, **options: Any) -> Data:
    """The loaders of a dataset, of one CPU worker where `options` say nothing else."""
    return build(dataset, task, **{"batch_size": 4, "device": torch.device("cpu"), **options})


def checkpoint_state(config: RunConfig, step: int, **more: Any) -> dict[str, Any]:
    """What a checkpoint of a run's first epoch says after `step` steps, without tensors."""
    return {
        "version": VERSION,
        "model": {},
        "workers": [],
        "config": shown(config),
        "position": {"epoch": 1, "step": step, "step_in_epoch": step},
        "steps_per_epoch": 9,
        "plan": None,
        "metrics_bytes": 0,
        "best": None,
        "bests": [],
        "evaluated": None,
        **more,
    }


def record_points(paths: RunPaths, *points: tuple[int, int, dict[str, float]]) -> None:
    """Leave numbers in a run's metrics.jsonl: step, epoch and tag to value of each point."""
    with contextlib.closing(MetricsWriter(paths)) as writer:
        for point in points:
            writer.write(*point)


def continued(
    config: RunConfig, paths: RunPaths, *, content: Content | None = None, resumes: bool = True
) -> Path | None:
    """Find what a run begins from and bring it into its folder, as its driver does."""
    asked = request_of(config, paths.folder, content, may_have_run=resumes)
    source = continuing.find(asked)
    return continuing.take(source, paths) if source else None


def begun(config: RunConfig, folder: Path, *, may_have_run: bool = False) -> Path | None:
    """Make the folder of a run, as its driver does; return the checkpoint that it begins from."""
    content = continuing.of_fork(config, continuing.continued(config, RunPaths(folder)))
    asked = request_of(config, folder, content, may_have_run=may_have_run)
    return Attempt(request=asked, devices=()).begin()


def resumed(file: Path, folder: Path) -> Path:
    """Bring a checkpoint into a new folder that resumes it."""
    return continuing.take(Source("resume", read(file)), RunPaths(folder))
