"""Faults on purpose, for tests: EXPT_FAULT=RANK:STEP:KIND[:once] in a worker's environment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VARIABLE = "EXPT_FAULT"


def arm(module: nn.Module, rank: int, steps_done: Callable[[], int]) -> None:
    """Register the fault as a forward hook of `module`, where the variable is set."""
    if VARIABLE not in os.environ:
        return
    victim, step, kind, *once = os.environ[VARIABLE].split(":")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def after_forward(module: nn.Module, _: Any, outputs: Any) -> Any:
        return strike(kind, outputs) if module.training and steps_done() + 1 == int(step) else None

    if int(victim) == rank and (is_first or not once):
        module.register_forward_hook(after_forward)


def strike(kind: str, outputs: Any) -> Any:
    """Carry out the fault `kind`, or send this process the signal of that name, such as kill."""
    if kind == "raise":
        raise RuntimeError("a fault on purpose")
    if kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, on purpose")
    if kind == "nan":
        return outputs * float("nan")
    if kind == "exit0":
        os._exit(0)
    if kind == "abort":  # as NCCL's watchdog does in a thread of its own: no Python comes after it
        os.abort()
    if kind == "hang":
        time.sleep(1e6)
    os.kill(os.getpid(), signal.Signals[f"SIG{kind.upper()}"])
    return outputs
