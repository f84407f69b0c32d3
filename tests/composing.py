"""What a command composes: each choice of groups once for all tests and their commands."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from expt.command import compose
from expt.command.compose import Composer, Where
from expt.command.conf_files import conf_dir

EXPTS = f"provider=main, path={conf_dir().resolve()}, "
_by_hydra = compose.compose


def composed(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """Return the settings of `python -m expt OVERRIDES`, where the user has a folder `conf`."""
    return copy.deepcopy(composer(conf).settings(overrides, sweep=False))


@functools.cache
def composer(conf: Path | None = None) -> Composer:
    """Return the composer of a folder of custom YAML."""
    return Composer(Where(own=(str(conf),) if conf else ()))


def share(folder: str) -> None:
    """Have what Hydra composes of expt's own YAML, in 0.1 s, kept in a folder for all processes."""
    compose.compose = functools.partial(_shared, Path(folder))  # type: ignore[assignment]


def _shared(folder: Path, name: str, words: list[str], *, return_hydra_config: bool) -> DictConfig:
    searched = GlobalHydra.instance().config_loader().get_search_path()
    if EXPTS not in f"{searched}" or "hydra." in f"{words}":
        return _by_hydra(name, words, return_hydra_config=return_hydra_config)
    kept = folder / hashlib.sha256(f"{name} {words}".encode()).hexdigest()
    if not kept.exists():
        composed = _by_hydra(name, words, return_hydra_config=return_hydra_config)
        (mine := kept.with_suffix(f".{os.getpid()}")).write_bytes(pickle.dumps(composed))
        mine.rename(kept)
    return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]
