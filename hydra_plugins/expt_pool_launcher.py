"""Hydra's launcher `pool`: a sweep's runs, packed on GPUs or cores. expt.command.sweep does the
work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


# Without `from __future__ import annotations`: Hydra loads plugins in a way that dataclasses could
# not resolve.
@dataclass
class PoolLauncherConf:
    """The keys of `hydra.launcher`."""

    _target_: str = "hydra_plugins.expt_pool_launcher.PoolLauncher"
    max_concurrent: int | None = None  # most runs at a time; null is as many as the machine holds
    runs_per_gpu: int = 1  # runs that share a GPU
    fail_fast: bool = False  # stop the others, and start no more, when a run fails
    retries: int = 0  # how often a failed run is started again
    stagger_s: float = 0.0  # least time between two starts [seconds]
    dry_run: bool = False  # show what would run, and start nothing


ConfigStore.instance().store(
    group="hydra/launcher", name="pool", node=PoolLauncherConf, provider="expt"
)


class PoolLauncher(Launcher):
    """Starts each run the moment enough devices are free; no batch waits for its slowest run."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra gives every launcher."""
        from expt.command.sweep import (
            Multirun,
        )  # late: Hydra imports every plugin, even to print --help

        self.multirun = Multirun(hydra_context, task_function, config, self._options)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every point; a run's failure is in its JobReturn, and Ctrl-C ends them all."""
        return self.multirun.launch(job_overrides, initial_job_idx)
