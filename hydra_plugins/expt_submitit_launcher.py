"""Hydra's launchers `submitit_slurm` and `submitit_local`: a job array. expt.command.sweep_cluster
does it.

conf/hydra/launcher holds their keys.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class SubmititLauncher(Launcher):
    """Submits each run of a sweep as a job, and waits for them."""

    def __init__(self, **options: Any) -> None:
        self._options = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in options.items()
        }

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra gives every launcher."""
        from expt.command.sweep_cluster import (
            cluster_sweep,
        )  # late: Hydra imports every plugin, even to print --help

        self.multirun = cluster_sweep(hydra_context, task_function, config, self._options)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every point; a run's failure is in its JobReturn, and Ctrl-C cancels the jobs."""
        return self.multirun.launch(job_overrides, initial_job_idx)
