"""Hydra's launcher `pool`: the keys of `hydra.launcher`, and the pool for other sweepers than ours.

expt runs its own sweeps without Hydra's launchers; see expt.command.sweep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
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
    """Runs the batches of a sweeper by the pool, and calls Hydra's callbacks for each run."""

    def __init__(self, **_: Any) -> None:
        """Do nothing: the keys are in the configuration that `setup` gets."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra gives every launcher."""
        self._callbacks, self._task, self._config = hydra_context.callbacks, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every point; the value of a failed run is nan, and Ctrl-C ends them all."""
        from expt.command.by_hydra import HydraTask  # late: Hydra imports every plugin

        if not isinstance(self._task, HydraTask):
            raise TypeError("hydra/launcher=pool runs the sweeps of expt only")
        return self._task.launch(
            self._config, job_overrides, initial_job_idx, self._callbacks, _returned
        )


def _returned(words: Sequence[str], value: float | None) -> JobReturn:
    returned = JobReturn(overrides=list(words), status=JobStatus.COMPLETED)
    returned.return_value = value
    return returned
