"""State that each worker has of its own in checkpoints: a custom task's, or a stream's loader's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from expt.data.checked_samples import in_words
from expt.data.loader import Loader
from expt.runs import checkpoint
from expt.tasks.task import Task
from expt.training import random_state


def own_state(owner: Task | Loader) -> dict[str, Any]:
    """Return a checkpoint's entry for a worker's task or loader; empty if it has no state."""
    whose = f"{type(owner).__name__}.state_dict"
    try:
        state = owner.state_dict()
        checkpoint.refuse_unreadable(state, whose)
    except Exception as error:
        raise in_words(error, whose) from error
    if not state:
        return {}
    on_gpu = list[str]()  # tensors that are to come back to a GPU

    def copied(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        if value.device.type == "cuda":
            on_gpu.append(name)
        return value.detach().to("cpu", copy=True)

    known = {"class": type(owner).__qualname__, "state": checkpoint.map_leaves(copied, state)}
    return {_key(owner): {**known, "on_gpu": on_gpu}}


def load_own_state(
    owner: Task | Loader, workers: Sequence[Mapping[str, Any]], device: torch.device, rank: int = 0
) -> None:
    """Load this worker's saved state; another worker's if the run had fewer ranks."""
    saved = workers[rank % len(workers)].get(_key(owner)) if workers else None
    if saved is None or saved["class"] != type(owner).__qualname__:
        return

    def placed(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device if name in saved["on_gpu"] else "cpu", copy=True)

    _load(owner, checkpoint.map_leaves(placed, saved["state"]))


@contextlib.contextmanager
def unchanged(task: Task, device: torch.device) -> Iterator[None]:
    """Restore random numbers and the task's state after the body."""
    before = own_state(task)
    with random_state.kept(device):
        yield
    if before:
        load_own_state(task, [before], device)
    elif own_state(task):  # it has begun in the body
        _load(task, {})


def _key(owner: Task | Loader) -> str:
    return "loader" if isinstance(owner, Loader) else "task"


def _load(owner: Task | Loader, state: Mapping[str, Any]) -> None:
    try:
        owner.load_state_dict(state)
    except Exception as error:
        raise in_words(error, f"{type(owner).__name__}.load_state_dict") from error
