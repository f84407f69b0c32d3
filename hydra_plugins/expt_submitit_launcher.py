"""The name that conf/hydra/launcher/submitit_*.yaml give; expt.command.sweep submits the jobs."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SubmititLauncher(Launcher):
    """Refuses to launch for another sweeper than expt's own."""

    def __init__(self, **_: Any) -> None:
        """Do nothing: the keys are read from the configuration."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Do nothing."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Raise ConfigError."""
        from expt.errors import ConfigError

        raise ConfigError("hydra/launcher=submitit_*: runs a grid or search=... only")
