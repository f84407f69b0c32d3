"""Checkpoints: written atomically, loaded with weights_only, holding all that a resumed run needs."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every random number generator of this process, in plain containers and bytes."""
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (np.asarray(keys).tobytes(), position, has_gauss, cached),
        "torch": _bytes(torch.get_rng_state()),
        "cuda": _bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` beside `path`, sync it to the disk, and only then take the place of the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def keep_as(last: Path, best: Path) -> None:
    """Give the file `last` the second name `best`; the next `last` is another file."""
    beside = best.with_name(f".{best.name}.tmp")
    beside.unlink(missing_ok=True)
    os.link(last, beside)
    beside.replace(best)
    _sync_folder(best.parent)


def load(path: Path) -> dict[str, Any]:
    """The state that `save` wrote, on the CPU. No pickled code is run."""
    # Given explicitly: the environment can turn the default off.
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
