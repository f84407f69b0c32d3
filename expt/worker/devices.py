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
    steps, memory = list[Steps](), {index: _memory(index) for index in indices}
    try:
        yield steps
    except Exception as error:
        if any(each.first_s for each in steps):
            raise
        if errors.is_out_of_memory(error):
            filled = {
                index: f"out of memory; others held {held / 2**30:.1f} of {of / 2**30:.1f} GiB"
                for index, (held, of) in memory.items()
                if held > FILLED * of
            }
            if filled:
                raise OutOfMemory(gpus=_named(filled)) from error
        elif isinstance(error, torch.AcceleratorError):
            vars(error)["gpus"] = _named(dict.fromkeys(memory, first_line(error)))
        raise


def _memory(index: int) -> tuple[int, int]:
    """Return the bytes of a GPU's memory that others hold, and all; this is its first use."""
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
    return total - free, total


def _named(did: Mapping[int, str]) -> dict[str, str]:
    """Return GPUs of this process by name, and what each of them did."""
    names = dict(enumerate(machine.visible_gpus()))
    where = "" if signals.is_driven() else f" of {socket.gethostname()}"
    found = {names.get(index, str(index)): what for index, what in did.items()}
    return {
        gpu: f"GPU {gpu} ({machine.gpu_uuid(gpu)}){where}: {what}" for gpu, what in found.items()
    }
