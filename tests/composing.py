"""What a command composes: each choice of groups once for all tests and their commands."""

import copy
import functools
import hashlib
import io
import pickle
import threading
from pathlib import Path
from typing import IO, Any

from hydra import compose as _by_hydra
from omegaconf import DictConfig, OmegaConf

from expt.command import compose, conf_files
from expt.command.compose import Composer


def composed(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """Return the settings of `python -m expt OVERRIDES`, where the user has a folder `conf`."""
    return copy.deepcopy(composer(conf).settings(overrides, sweep=False))


@functools.cache
def composer(conf: Path | None = None) -> Composer:
    """Return the composer of a folder of custom YAML."""
    return Composer([conf] if conf else [])


def know_keys() -> None:
    """Note that expt's own keys are no groups, which takes Hydra 3 ms for each to find out."""
    keys = {*conf_files.keys_in_yaml()} - {*conf_files.groups()}
    compose._OF_EXPT.options.update({key: list[str]() for key in keys})


def share(folder: str) -> None:
    """Have what Hydra composes of expt's own YAML, in 0.1 s, kept in a folder for all processes."""
    compose.compose = functools.partial(_shared, Path(folder))  # type: ignore[attr-defined]
    OmegaConf.load = _loaded  # type: ignore[assignment, method-assign]


_load = OmegaConf.load


def _loaded(file: str | Path | IO[Any]) -> Any:
    """Load YAML as OmegaConf does, each text once: Hydra reads the same files each time."""
    text = Path(file).read_text("utf-8") if isinstance(file, str | Path) else file.read()
    return pickle.loads(_parsed(text, getattr(file, "name", str(file))))


@functools.cache
def _parsed(text: str, name: str) -> bytes:
    stream = io.StringIO(text)
    stream.name = name  # what an error names  # type: ignore[attr-defined]
    return pickle.dumps(_load(stream))


def _shared(folder: Path, name: str, words: list[str], *, return_hydra_config: bool) -> DictConfig:
    """Compose as Hydra does; only expt's own YAML is the same in the next test."""
    if any("://" in word for word in words):
        return _by_hydra(name, words, return_hydra_config=return_hydra_config)
    file = folder / hashlib.sha256(f"{name} {words}".encode()).hexdigest()
    if not file.exists():
        mine = file.with_suffix(f".{threading.get_native_id()}")
        composed = _by_hydra(name, words, return_hydra_config=return_hydra_config)
        mine.write_bytes(pickle.dumps(composed))
        mine.rename(file)
    return pickle.loads(file.read_bytes())  # type: ignore[no-any-return]
