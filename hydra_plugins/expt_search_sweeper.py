"""Hydra's sweeper `search`: points that depend on what came of others. expt.command.search does the
work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


# Without `from __future__ import annotations`: Hydra loads plugins in a way that dataclasses could
# not resolve.
@dataclass
class SearchSweeperConf:
    """The keys of `hydra.sweeper`; those of the search itself are below `search`."""

    _target_: str = "hydra_plugins.expt_search_sweeper.SearchSweeper"
    max_batch_size: int | None = None  # as of Hydra's own sweeper; search.batch is what counts
    params: dict[str, str] | None = None  # axes, as in conf/sweep


ConfigStore.instance().store(
    group="hydra/sweeper", name="search", node=SearchSweeperConf, provider="expt"
)


class SearchSweeper(Sweeper):
    """Chooses each point when devices are free for it."""

    def __init__(self, **_: Any) -> None:
        """What it needs is in the configuration that `setup` gets."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra gives every sweeper."""
        self._context, self._config = hydra_context, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[Any]:
        """Search the space that `arguments` describe."""
        from expt.command.search import (
            search,
        )  # late: Hydra imports every plugin, even to print --help

        return [search(self._context, self._config, self._launcher, arguments)]
