"""The GPUs of a worker: taken into use, and named where one may be to blame for an error."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from expt import errors, signals
from expt.errors import ConfigError, DeviceFull, DeviceLost, first_line
from expt.gpus import gpu_uuid, visible

FILLED = 0.25
"""Share of a GPU's memory above which other processes may be the cause of a lack of it."""


@contextlib.contextmanager
def in_use(indices: Sequence[int], has_begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Take GPUs into use; name in an error those that may be to blame, unless a run `has_begun`.

    Raises ConfigError where torch has no CUDA, DeviceLost for a GPU that can't be used, DeviceFull
    where other processes hold it.
    """
    for index in indices:
        _begin_to_use(index)
    try:
        yield
    except Exception as error:
        if has_begun():
            raise
        if errors.is_out_of_memory(error):
            found = {index: held_by_others(index) for index in indices}
            if faults := {index: f"out of memory; {said}" for index, said in found.items() if said}:
                raise DeviceFull(gpus=_named(faults)) from error
        elif isinstance(error, torch.AcceleratorError):
            lost = [index for index in indices if not _answers(index)]
            vars(error)["gpus"] = _named(dict.fromkeys(lost, first_line(error)))
        raise


def _answers(index: int) -> bool:
    """Return whether this process can still use a GPU: an error of the GPU stays."""
    try:
        torch.cuda.synchronize(index)
    except RuntimeError:
        return False
    return True


def _begin_to_use(index: int) -> None:
    """Raise ConfigError where this torch has no CUDA, DeviceLost where the GPU can't be used."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi
    try:
        torch.cuda.init()
        if index >= (have := torch.cuda.device_count()):
            raise RuntimeError(f"CUDA shows this process {have} GPUs")
        torch.cuda.mem_get_info(index)
    except AssertionError as error:
        raise ConfigError(f"{first_line(error)}; install another torch, or use gpus=0") from error
    except RuntimeError as error:
        raise DeviceLost(gpus=_named({index: first_line(error).rstrip(".")})) from error


def held_by_others(index: int | None = None) -> str:
    """Say how much of a GPU, by default the current one, others hold; "" where that is little."""
    if not torch.cuda.is_initialized():
        return ""
    gib = 2**30
    own, (free, total) = torch.cuda.memory_reserved(index), torch.cuda.mem_get_info(index)
    others = total - free - own
    if others < max(FILLED * total, gib):  # the libraries of this process hold some, too
        return ""
    held = f"{others / gib:.1f} of {total / gib:.1f} GiB, and this one {own / gib:.1f}"
    return f"other processes hold {held}; wait until they end, or take another GPU"


def _named(faults: Mapping[int, str]) -> dict[str, str]:
    """Return the faults of GPUs of this process, by their names."""
    names = dict(enumerate(visible().gpus))
    where = "" if signals.is_driven() else f" of {socket.gethostname()}"
    found = {names.get(index, str(index)): fault for index, fault in faults.items()}
    return {gpu: f"GPU {gpu} ({gpu_uuid(gpu)}){where}: {found[gpu]}" for gpu in found}
