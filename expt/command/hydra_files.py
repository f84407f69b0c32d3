"""Hydra's part of a configuration, and `.hydra` of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from expt.command.compose import ChoiceSweep, Override, key_of, parse, parse_one
from expt.config.parse import with_value
from expt.errors import ConfigError
from expt.runs import paths
from expt.runs.paths import RunPaths, is_held
from expt.runs.result import Record

OF_SWEEPS = ("hydra.launcher.", "hydra/launcher", "hydra.sweep.")
"""Beginnings of the keys that only a sweep has."""
USED = tuple(
    "hydra.run.dir hydra.sweep.dir hydra.launcher hydra/launcher hydra.sweeper"
    " hydra/sweeper hydra.callbacks hydra/callbacks hydra.mode hydra.job.env_set".split()
)
"""Beginnings of Hydra's keys that expt reads."""
OWN_LAUNCHERS = ("pool", "submitit_slurm", "submitit_local")


def last_of_each(words: Sequence[str]) -> list[Override]:
    """Return the overrides that count; where the one before had a `+`, the last has one too."""
    found: list[Override] = []
    for override in parse(words):
        typed = override.get_key_element()
        before = [each for each in found if replaces(override, each)]
        found = [each for each in found if each not in before]
        if "+" not in typed and any(each.get_key_element()[0] == "+" for each in before):
            plus = before[0].get_key_element().removesuffix(typed)
            override = parse_one(f"{plus}{override.input_line}")
        found.append(override)
    return found


def replaces(later: Override, earlier: Override) -> bool:
    """Return whether nothing of the earlier override counts; of two mappings both do."""
    if key_of(later) != key_of(earlier) or later.is_delete() or earlier.is_delete():
        return False
    return not (_names_keys(later) and _names_keys(earlier))


def _names_keys(override: Override) -> bool:
    """Return whether it changes only the keys that it names, unlike a class for a group."""
    value = override.value()
    several = value.list if isinstance(value, ChoiceSweep) else [value]
    is_below = "." in override.key_or_group
    return all(isinstance(each, dict) and (is_below or "_target_" not in each) for each in several)


def is_sweep(composed: DictConfig) -> bool:
    """Return whether the configuration itself asks for a sweep, as a named grid does."""
    return getattr(composed.hydra.mode, "name", None) == "MULTIRUN"


def named_axes(composed: DictConfig) -> list[str]:
    """Return the axes of a named grid, as words."""
    return [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]


def of_all_runs(composed: DictConfig) -> dict[str, Any]:
    """Return the settings that a sweep has once: its grid, its search, its launcher."""
    found: Any = OmegaConf.to_container(composed)
    of_hydra = {f"hydra.{key}": value for key, value in found["hydra"].items()}
    keys = [f"hydra.{key}" for key in ("sweeper", "launcher", "callbacks", "mode")]
    return {key: {**found, **of_hydra}.get(key) for key in (*keys, "search", "preflight")}


def refuse_unused(composed: DictConfig, typed: Sequence[str], *, sweep: bool) -> None:
    """Raise ConfigError for a key of Hydra's that has no effect on a command of this kind."""
    if composed.hydra.job.get("chdir"):
        raise ConfigError(
            "hydra.job.chdir=true: runs stay in the folder where they are typed; leave it out, and"
            " write to ${hydra:runtime.output_dir}"
        )
    for word in typed:
        key = word.partition("=")[0].lstrip("+~")
        if sweep and key == "hydra.run.dir":
            raise ConfigError(f"{word}: is for one run; a sweep has hydra.sweep.dir")
        if not sweep and key.startswith(OF_SWEEPS):
            raise ConfigError(f"{word}: is for a sweep; add -m")
        if not key.startswith(USED) and not needs_hydra(composed):
            raise ConfigError(f"{word}: has no effect on expt's own runs; leave it out")


def launcher_options(composed: DictConfig) -> dict[str, Any]:
    """Return the keys of `hydra.launcher`, without that of a folder, which is made at once."""
    found: Any = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    return {
        key: value for key, value in found.items() if key not in ("_target_", "submitit_folder")
    }


def launcher_name(composed: DictConfig) -> str:
    """Return the chosen launcher of Hydra's."""
    return str(composed.hydra.runtime.choices.get("hydra/launcher"))


def needs_hydra(composed: DictConfig) -> str:
    """Return the part that needs Hydra itself: its callbacks, another sweeper or launcher."""
    choices = composed.hydra.runtime.choices
    if (sweeper := choices.get("hydra/sweeper")) not in (None, "basic"):
        return f"hydra/sweeper={sweeper}"
    if (launcher := choices.get("hydra/launcher")) not in (None, *OWN_LAUNCHERS):
        return f"hydra/launcher={launcher}"
    if composed.hydra.sweeper.get("max_batch_size") is not None:
        return "hydra.sweeper.max_batch_size"
    return "hydra.callbacks" if composed.hydra.callbacks else ""


def own_folders_of(hydra_yaml: Path) -> list[str]:
    """Return the folders of custom YAML that a run was started with."""
    if not hydra_yaml.exists():
        return []
    found = OmegaConf.select(OmegaConf.load(hydra_yaml), "hydra.searchpath") or ()
    return [str(folder).removeprefix("file://") for folder in found]


def about_run(name: str, words: Sequence[str], config: object = None) -> Record:
    """Return the fields of result.json with the name of the run and the words of its command."""
    typed = as_dict([word for word in words if word != "resume=auto"])
    overrides = {key: _of_kind(config, key, value) for key, value in typed.items()}
    return {"name": name, "overrides": overrides, "arguments": list(words)}


def _of_kind(config: Any, key: str, value: Any) -> Any:
    """Return 1 as 1.0 where the key has that: typed as 1 or 1.0 it is one setting."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config if type(value) is int and type(config) is float and config == value else value


def as_dict(words: Sequence[str]) -> dict[str, Any]:
    """Return `{"optimizer.lr": 0.1}` for `["optimizer.lr=0.1"]`."""
    found: dict[str, Any] = {}
    for each in last_of_each(words):  # of two mappings both count
        found = with_value(found, [key_of(each)], each.value(), merge=True)
    return found


def remove_unused(run_paths: RunPaths) -> None:
    """Remove the folder of a run that did not begin, unless it holds something."""
    unused = {run_paths.hydra, run_paths.lock, run_paths.code}
    with contextlib.suppress(OSError):  # a disk that is read-only now
        folder = run_paths.folder
        if folder.is_dir() and {*folder.iterdir()} <= unused and not is_held(run_paths):
            for path in (run_paths.hydra, run_paths.code):
                shutil.rmtree(path, ignore_errors=True)
            run_paths.lock.unlink(missing_ok=True)
            paths.remove_empty(folder)
