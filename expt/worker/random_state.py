"""Every random number generator of a worker: seeded, saved, loaded."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Seed every random number generator of this process."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(
        number
    )  # torch.manual_seed asks for five kinds of devices, in 3 ms
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def set_determinism(deterministic: bool, device: torch.device) -> None:
    """Have torch refuse what varies from run to run, or else choose the fastest."""
    if deterministic:  # the call imports the compiler, two seconds, even to say no
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic


def state_dict(device: torch.device) -> dict[str, Any]:
    """The state of every random number generator of this process, in plain containers and bytes."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, np.asarray(words, np.uint32).tobytes(), gauss),
        "numpy": (np.asarray(keys).tobytes(), position, has_gauss, cached),
        "torch": _bytes(torch.get_rng_state()),
        "cuda": _bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def load_state_dict(state: Mapping[str, Any], device: torch.device) -> None:
    """Continue with the random numbers that follow what `state_dict` found."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(_from_bytes(state["torch"]))
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(_from_bytes(state["cuda"]), device)


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
