"""What Hydra composes, in a tenth of its time: the choices once for all tests, then the values, as for a sweep."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from expt.command import hydra_adapter
from expt.command.conf_files import conf_dir
from expt.command.hydra_words import parsed_once
from expt.command.overrides import register_resolvers
from expt.command.point_composer import PointComposer
from expt.config.parse import plain

_READ: dict[tuple[str, str], bytes] = {}
"""The YAML that expt ships, which nobody edits meanwhile."""


def composed(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """The settings of `python -m expt OVERRIDES`, where a person has a folder `conf`. Raises what Hydra raises."""
    composer, master = _composer(conf)
    with hydra_adapter._read_once(_READ):
        found = composer.settings(master, overrides)
        found = plain(composer.compose(master, overrides)) if found is None else found
    copied: dict[str, Any] = pickle.loads(pickle.dumps(found))  # the next test gets it as it was
    return copied


@contextlib.contextmanager
def hydra_at_hand() -> Iterator[None]:
    """While entered, Hydra composes from the YAML that expt ships, as in a command."""
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"), hydra_adapter._read_once(_READ), parsed_once():
        yield


@functools.cache
def _composer(conf: Path | None) -> tuple[PointComposer, DictConfig]:
    own = [f"hydra.searchpath=['file://{conf}']"] if conf else []
    with hydra_at_hand():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        master = hydra.compose_config("config", own, run_mode=RunMode.RUN, with_log_configuration=False)
        return PointComposer(HydraContext(hydra.config_loader, Callbacks()), master), master
