"""Hydra's part of a configuration, and `.hydra` of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from expt.command.compose import key_of, parse
from expt.runs import paths
from expt.runs.paths import RunPaths, is_held
from expt.runs.result import Record

OWN_LAUNCHERS = ("pool", "submitit_slurm", "submitit_local")


def is_sweep(composed: DictConfig) -> bool:
    """Return whether the configuration itself asks for a sweep, as a named grid does."""
    return getattr(composed.hydra.mode, "name", None) == "MULTIRUN"


def named_axes(composed: DictConfig) -> list[str]:
    """Return the axes of a named grid, as words."""
    return [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]


def launcher_options(composed: DictConfig) -> dict[str, Any]:
    """Return the keys of `hydra.launcher`, without what names a folder, which is made at once."""
    found: Any = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    return {
        key: value for key, value in found.items() if key not in ("_target_", "submitit_folder")
    }


def launcher_name(composed: DictConfig) -> str:
    """Return the chosen launcher of Hydra's."""
    return str(composed.hydra.runtime.choices.get("hydra/launcher"))


def needs_hydra(composed: DictConfig) -> str:
    """Return what Hydra itself has to run: its own callbacks, other sweepers and launchers."""
    choices = composed.hydra.runtime.choices
    if (sweeper := choices.get("hydra/sweeper")) not in (None, "basic"):
        return f"hydra/sweeper={sweeper}"
    if (launcher := choices.get("hydra/launcher")) not in (None, *OWN_LAUNCHERS):
        return f"hydra/launcher={launcher}"
    if composed.hydra.sweeper.get("max_batch_size") is not None:
        return "hydra.sweeper.max_batch_size"
    return "hydra.callbacks" if composed.hydra.callbacks else ""


def own_folders_of(hydra_yaml: Path) -> list[str]:
    """Return the folders of a person's own YAML that a run was started with."""
    if not hydra_yaml.exists():
        return []
    found = OmegaConf.select(OmegaConf.load(hydra_yaml), "hydra.searchpath") or ()
    return [str(folder) for folder in found]


def about_run(name: str, words: Sequence[str]) -> Record:
    """Return the fields of result.json that say what the run is called, and what asks for it."""
    settings = [word for word in words if word != "resume=auto"]
    return {"name": name, "overrides": as_dict(settings), "arguments": list(words)}


def as_dict(words: Sequence[str]) -> dict[str, Any]:
    """Return `{"optimizer.lr": 0.1}` for `["optimizer.lr=0.1"]`."""
    return {key_of(override): override.value() for override in parse(words)}


def write_hydra_files(paths: RunPaths, files: Mapping[str, str]) -> None:
    """Write `.hydra` of a run."""
    paths.hydra.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (paths.hydra / f"{name}.yaml").write_text(text, encoding="utf-8")


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
