"""The state of a custom task, or of a stream's loader, in checkpoints: each worker's own."""

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


def task_state(task: Task | Loader, key: str = "task") -> dict[str, Any]:
    """Return a checkpoint's entry for a worker's task; empty if the task has no state."""
    whose = f"{type(task).__name__}.state_dict"
    try:
        state = task.state_dict()
        checkpoint.refuse_unreadable(state, whose)
    except Exception as error:
        raise in_words(error, whose) from error
    if not state:
        return {}
    on_gpu = list[str]()  # tensors that are to come back to a GPU

    def copied(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        if value.device.type == "cuda":
            on_gpu.append(key)
        return value.detach().to("cpu", copy=True)

    known = {"class": type(task).__qualname__, "state": checkpoint.map_leaves(copied, state)}
    return {key: {**known, "on_gpu": on_gpu}}


def load_task_state(
    task: Task | Loader,
    workers: Sequence[Mapping[str, Any]],
    device: torch.device,
    rank: int = 0,
    key: str = "task",
) -> None:
    """Load this worker's saved state; another worker's if the run had fewer ranks."""
    saved = [one[key] for one in workers if key in one]
    if not saved or saved[0]["class"] != type(task).__qualname__:
        return
    mine = saved[rank % len(saved)]

    def placed(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device if key in mine["on_gpu"] else "cpu", copy=True)

    state = checkpoint.map_leaves(placed, mine["state"])
    try:
        task.load_state_dict(state)
    except Exception as error:
        raise in_words(error, f"{type(task).__name__}.load_state_dict") from error


@contextlib.contextmanager
def unchanged(task: Task, device: torch.device) -> Iterator[None]:
    """Restore random numbers and the task's state after the body."""
    before = task_state(task)
    with random_state.kept(device):
        yield
    load_task_state(task, [before], device)
