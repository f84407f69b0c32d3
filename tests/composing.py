"""What a command composes: each choice of groups once for all tests and their commands."""

import copy
import functools
import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from hydra import compose as _by_hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from expt.command import compose, conf_files
from expt.command.compose import Composer
from expt.command.grammar import parse_one
from expt.config import conf_dir

APART = ("model", "init", "task", "dataset", "optimizer", "scheduler")
"""The groups whose choice changes no other part of the settings."""
SEARCHED = "hydra.searchpath"
EXPTS = f"provider=main, path={conf_dir().resolve()}, "


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
    searched = GlobalHydra.instance().config_loader().get_search_path()
    if EXPTS not in f"{searched}" or "env_copy" in f"{words}":
        return _by_hydra(name, words, return_hydra_config=return_hydra_config)
    overrides = [parse_one(word) for word in words]
    of_path = [word for word in words if word.startswith(SEARCHED)]
    named: list[Any] = [parse_one(word).value() for word in of_path]
    roots = [Path(path[7:]) for paths in named for path in paths]
    chosen = [each for each in overrides if _chooses(each, (*roots, conf_dir()))]
    try:
        composed = _assembled(functools.partial(_kept, folder, name), chosen, roots)
        ConfigLoaderImpl._apply_overrides_to_config(
            [each for each in overrides if each not in chosen], composed
        )
    except Exception:
        return _by_hydra(name, words, return_hydra_config=return_hydra_config)
    of_hydra = [str(each.input_line) for each in overrides if each.is_hydra_override()]
    composed.hydra.overrides.hydra = of_hydra
    return composed


def _chooses(override: Override, roots: Sequence[Path]) -> bool:
    group = override.key_or_group
    is_group = group.startswith("hydra/") or any((root / group).is_dir() for root in roots)
    by_word = is_group and not isinstance(override.value(), dict)
    return override.package is not None or by_word or group == SEARCHED


def _assembled(
    kept: Callable[[list[str], str], DictConfig], chosen: list[Override], roots: Sequence[Path]
) -> DictConfig:
    """Return the defaults with a part for each choice, or what Hydra composes of all of them."""
    words = [str(each.input_line) for each in chosen]
    where = [word for word in words if word.startswith(SEARCHED)]
    if any("://" in word.replace("file://", "") for word in where):
        raise ValueError("a package may have other YAML in the next test")
    if not all(root.is_dir() for root in roots):
        raise ValueError("Hydra says which folder is not there")
    files = [file for root in roots for file in sorted(root.rglob("*.yaml"))]
    own = "".join(f"{file}: {file.read_text()}\n" for file in files)
    apart = all(each.package is None and each.key_or_group in (*APART, SEARCHED) for each in chosen)
    if not apart or "@package" in own or "defaults:" in own:
        return kept(words, own)
    composed = kept([], "")  # custom YAML comes behind expt's own, so it changes what it names
    with open_dict(composed), read_write(composed):
        composed.hydra.searchpath = [f"file://{root}" for root in roots]
        for each in chosen:
            if (group := each.key_or_group) == SEARCHED:
                continue
            of_expt = (conf_dir() / group / f"{each.value()}.yaml").exists()
            word = str(each.input_line)
            one = kept([word], "") if of_expt else kept([*where, word], own)
            for whole, part in (
                (composed, one),
                (composed.hydra.runtime.choices, one.hydra.runtime.choices),
            ):
                if group in part:
                    whole[group] = part[group]
                else:
                    del whole[group]
    return composed


def _kept(folder: Path, name: str, words: list[str], own: str) -> DictConfig:
    """Return what Hydra composes, `own` being the text of all custom YAML."""
    file = folder / hashlib.sha256(f"{name} {words} {own}".encode()).hexdigest()
    if not file.exists():
        mine = file.with_suffix(f".{threading.get_native_id()}")
        mine.write_bytes(pickle.dumps(_by_hydra(name, words, return_hydra_config=True)))
        mine.rename(file)
    return pickle.loads(file.read_bytes())  # type: ignore[no-any-return]
