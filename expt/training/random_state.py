"""Seed, save and load all random number generators of a worker."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Seed every random number generator of this process."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 3 ms for other devices
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def set_determinism(deterministic: bool, device: torch.device) -> None:
    """Let torch raise for operations that are not deterministic, or choose the fastest."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with cuBLAS' first handle
    if deterministic:  # with False, too, the call would import the compiler, for two seconds
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic


def state_dict(device: torch.device) -> dict[str, Any]:
    """Return the state of all random number generators."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, np.asarray(words, np.uint32).tobytes(), gauss),
        "numpy": (np.asarray(keys).tobytes(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": [generator.get_state() for generator in _of_cards(device)],
    }


def load_state_dict(state: Mapping[str, Any], device: torch.device) -> None:
    """Load a state that `state_dict` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for generator, each in zip(_of_cards(device), state["cuda"], strict=False):
        generator.set_state(each)


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Restore the state of all random number generators after the body."""
    before = state_dict(device)
    try:
        yield
    finally:
        load_state_dict(before, device)


def _of_cards(device: torch.device) -> list[torch.Generator]:
    """Return the generators of all visible GPUs, that of `device` first; dp computes on several."""
    if device.type != "cuda":
        return []
    torch.cuda.init()
    return sorted(torch.cuda.default_generators, key=lambda each: each.device != device)
