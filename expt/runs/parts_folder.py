"""The folder of a sharded checkpoint's parts: what a checkpoint says of it, and whether it is
whole. Free of torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expt.errors import CheckpointError

PARTS = "parts"
"""Key of a checkpoint: of the folder its name, and the checksum of each file in it."""


def described(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of the parts in `folder`."""
    return {
        "folder": folder.name,
        "files": {path.name: sha256_of(path) for path in sorted(folder.iterdir())},
    }


def check(path: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where parts of the checkpoint at `path` are missing, or not what was
    written.
    """
    if PARTS not in state:
        return
    folder = path.parent / state[PARTS]["folder"]
    for name, digest in state[PARTS]["files"].items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{path}: {folder / name} is missing, which holds a part of it")
        if sha256_of(folder / name) != digest:
            raise CheckpointError(f"{path}: {folder / name}, a part of it, is truncated or damaged")


def bring(parts: Mapping[str, Any], source: Path, target: Path) -> None:
    """Let the folder `target` have the parts that a checkpoint in `source` names, too, at no cost
    where links do.
    """
    folder, goal = source / parts["folder"], target / parts["folder"]
    if goal.exists():
        return
    beside = goal.with_name(f".{goal.name}")  # what is cut short is no folder of parts
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        for name in parts["files"]:
            _link(folder / name, beside / name)
        beside.rename(goal)
    except (
        FileNotFoundError
    ) as error:  # of a run that is under way, which has written another meanwhile
        raise CheckpointError(
            f"{error.filename}: is missing, which holds a part of a checkpoint"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)


def free_folder(checkpoints: Path, step: int) -> str:
    """A name for parts that no folder has yet."""
    number = 0
    while (checkpoints / (name := f"step-{step}{f'-{number}' if number else ''}.parts")).exists():
        number += 1
    return name


def remove_all_but(checkpoints: Path, names: set[str]) -> None:
    """Remove the parts that no checkpoint has any more."""
    for folder in (*checkpoints.glob("step-*.parts"), *checkpoints.glob(".step-*.parts")):
        if folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
