"""A run in the pool, what is told of it, and how the pool uses its machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from expt.config.schema import RunConfig
from expt.errors import ExptError
from expt.launch.workers import Workers
from expt.runs.paths import RunPaths


@dataclass(eq=False)
class Job:
    """A run in the pool; `config` is missing where it could not be made, and `error` says why."""

    name: str
    paths: RunPaths
    config: RunConfig | None
    settings: Mapping[str, Any] | None = field(default=None, repr=False)
    """What `config` was parsed from; another machine parses it anew."""
    status: str = "queued"
    error: ExptError | None = None
    devices: tuple[str, ...] = ()
    attempt: int = 0
    again: bool = False
    """Whether its folder may hold a record of it already."""
    env: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    workers: Workers | None = field(default=None, repr=False)
    retries: int = 0
    """How often this pool has started it again."""
    typed: float | None = None
    """When the command was typed, where it is for this run alone."""
    started: float = 0.0
    ended: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether it has failed before it could start."""
        return self.error is not None and not self.started


class Observer(Protocol):
    """What is told of a pool's progress, from within its loop."""

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        """It is the job's turn, but another command holds `devices`; told once of each job."""

    def job_starting(self, job: Job) -> None:
        """The job's workers are about to start, maybe once more; the last moment to set `env`, `about`, `attempt`."""

    def job_retrying(self, job: Job, error: ExptError) -> None:
        """The job has failed, and waits to be started once more."""

    def job_ended(self, job: Job) -> None:
        """The job has completed, failed, or was interrupted."""

    def tick(self, active: Sequence[Job]) -> None:
        """Called many times a second, with the jobs under way."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a pool uses its machine; hydra_plugins/expt_pool_launcher.py says what each means."""

    max_concurrent: int | None = None
    runs_per_gpu: int = 1
    fail_fast: bool = False
    retries: int = 0
    stagger_s: float = 0.0


def config_of(job: Job) -> RunConfig:
    """The configuration of a job that has one."""
    assert job.config is not None
    return job.config


def workers_of(job: Job) -> Workers:
    """The workers of a job that has started."""
    assert job.workers is not None
    return job.workers
