"""What a command composes: each choice of groups once for all tests and their commands."""

from __future__ import annotations

import copy
import functools
import hashlib
import pickle
import threading
from pathlib import Path
from typing import Any

from hydra import compose as _by_hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from expt.command import compose
from expt.command.compose import Composer, Where
from expt.command.conf_files import conf_dir

EXPTS = f"provider=main, path={conf_dir().resolve()}, "


def composed(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """Return the settings of `python -m expt OVERRIDES`, where the user has a folder `conf`."""
    return copy.deepcopy(composer(conf).settings(overrides, sweep=False))


@functools.cache
def composer(conf: Path | None = None) -> Composer:
    """Return the composer of a folder of custom YAML."""
    return Composer(Where(own=(str(conf),) if conf else ()))


def share(folder: str) -> None:
    """Have what Hydra composes of expt's own YAML, in 0.1 s, kept in a folder for all processes."""
    compose.compose = functools.partial(_shared, Path(folder))  # type: ignore[attr-defined]


def _shared(folder: Path, name: str, words: list[str], *, return_hydra_config: bool) -> DictConfig:
    searched = GlobalHydra.instance().config_loader().get_search_path()
    if EXPTS not in f"{searched}" or any(own in f"{words}" for own in ("searchpath", "env_copy")):
        return _by_hydra(name, words, return_hydra_config=return_hydra_config)
    overrides = [compose.parse_one(word) for word in words]
    chosen = [str(each.input_line) for each in overrides if _chooses(each)]
    kept = folder / hashlib.sha256(f"{name} {chosen}".encode()).hexdigest()
    if not kept.exists():
        base = _by_hydra(name, chosen, return_hydra_config=return_hydra_config)
        (mine := kept.with_suffix(f".{threading.get_native_id()}")).write_bytes(pickle.dumps(base))
        mine.rename(kept)
    composed: DictConfig = pickle.loads(kept.read_bytes())
    try:
        ConfigLoaderImpl._apply_overrides_to_config(
            [each for each in overrides if not _chooses(each)], composed
        )
    except Exception:
        return _by_hydra(name, words, return_hydra_config=return_hydra_config)
    of_hydra = [str(each.input_line) for each in overrides if each.is_hydra_override()]
    composed.hydra.overrides.hydra = of_hydra
    return composed


def _chooses(override: Override) -> bool:
    group = override.key_or_group
    is_group = group.startswith("hydra/") or (conf_dir() / group).is_dir()
    return override.package is not None or (is_group and not isinstance(override.value(), dict))
