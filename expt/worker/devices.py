"""The GPUs of a worker: taken into use, and named where one may be to blame for an error."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

import torch

from expt import errors, machine, signals
from expt.errors import ConfigError, DeviceLost, OutOfMemory, first_line
from expt.worker.steps import Steps

FILLED = 0.25
"""The share of a GPU's memory: where others hold more, they may be why it does not suffice."""


@contextlib.contextmanager
def in_use(indices: Sequence[int]) -> Iterator[list[Steps]]:
    """Take GPUs into use; name in an error before a first step those that may be to blame.

    The body puts its steps into the list. Raises ConfigError where torch can use no GPU, rather
    than train on the CPU, DeviceLost for one that can't be used, OutOfMemory where others hold it.
    """
    steps, held = list[Steps](), {index: _held_by_others(index) for index in indices}
    try:
        yield steps
    except Exception as error:
        if any(each.first_s for each in steps):
            raise
        if errors.is_out_of_memory(error):
            text = "out of memory; others held {:.0%} of it when this run began".format
            faults = {index: text(share) for index, share in held.items() if share > FILLED}
            if faults:
                raise OutOfMemory(gpus=_named(faults)) from error
        elif isinstance(error, torch.AcceleratorError):
            vars(error)["gpus"] = _named(dict.fromkeys(held, first_line(error)))
        raise


def _held_by_others(index: int) -> float:
    """Return the share of a GPU's memory that is not free; this is its first use."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi
    try:
        torch.cuda.init()
        if index >= (have := torch.cuda.device_count()):
            raise RuntimeError(f"CUDA shows this process {have} GPUs")
        free, total = torch.cuda.mem_get_info(index)
    except AssertionError as error:
        raise ConfigError(f"{first_line(error)}; install another torch, or use gpus=0") from error
    except RuntimeError as error:
        raise DeviceLost(gpus=_named({index: first_line(error).rstrip(".")})) from error
    return 1 - free / total


def _named(faults: Mapping[int, str]) -> dict[str, str]:
    """Return the faults of GPUs of this process, by their names."""
    names = dict(enumerate(machine.visible_gpus()))
    where = "" if signals.is_driven() else f" of {socket.gethostname()}"
    found = {names.get(index, str(index)): fault for index, fault in faults.items()}
    return {gpu: f"GPU {gpu} ({machine.gpu_uuid(gpu)}){where}: {found[gpu]}" for gpu in found}
