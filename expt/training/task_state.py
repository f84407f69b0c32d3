"""The state of a custom task, or of a stream's loader, in checkpoints: each worker's own."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from expt.data.checked_samples import in_words
from expt.data.loading import Loader
from expt.runs import checkpoint
from expt.tasks.task import Task


def task_state(task: Task | Loader, key: str = "task") -> dict[str, Any]:
    """Return what a checkpoint holds of a worker's task: nothing where it has no state."""
    whose = f"{type(task).__name__}.state_dict"
    try:
        state = task.state_dict()
        checkpoint.refuse_unreadable(state, whose)
    except Exception as error:
        raise in_words(error, whose) from error
    if not state:
        return {}
    file = io.BytesIO()  # bytes, which tensors leave for the devices that they came from
    torch.save(checkpoint.without_numpy(state), file)
    return {key: {"class": type(task).__qualname__, "state": file.getvalue()}}


def load_task_state(
    task: Task | Loader,
    workers: Sequence[Mapping[str, Any]],
    device: torch.device,
    rank: int = 0,
    key: str = "task",
) -> None:
    """Load what the worker's task has saved; of more workers than there were, that of another."""
    saved = [one[key] for one in workers if key in one]
    if not saved or saved[0]["class"] != type(task).__qualname__:
        return

    def place(storage: Any, location: str) -> Any:
        return storage if "cpu" in (location, device.type) else storage.cuda(device.index)

    file = io.BytesIO(saved[rank % len(saved)]["state"])
    state = torch.load(file, map_location=place, weights_only=True)
    try:
        task.load_state_dict(state)
    except Exception as error:
        raise in_words(error, f"{type(task).__name__}.load_state_dict") from error
