"""Faults on purpose, for tests: EXPT_FAULT=RANK:STEP:KIND[:once] in a worker's environment."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

VARIABLE = "EXPT_FAULT"


def arm(module: nn.Module, rank: int, steps_done: Callable[[], int]) -> None:
    """Register the fault as a forward hook of `module`, for that step of the run, from 1.

    With `once` only the first attempt fails. Costs nothing where the variable is not set.
    """
    if VARIABLE not in os.environ:
        return
    victim, step, kind, *once = os.environ[VARIABLE].split(":")
    if int(victim) != rank or (
        once == ["once"] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    ):
        return
    strike = KINDS[kind]

    def after_forward(module: nn.Module, _: Any, logits: torch.Tensor) -> torch.Tensor:
        return strike(logits) if module.training and steps_done() + 1 == int(step) else logits

    module.register_forward_hook(after_forward)


def _raise(error: Exception) -> NoReturn:
    raise error


def _signal(number: signal.Signals, logits: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), number)
    return logits


def _hang(logits: torch.Tensor) -> torch.Tensor:
    time.sleep(1e6)
    return logits


NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB, on purpose"
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "raise": lambda _: _raise(RuntimeError("a fault on purpose")),
    "oom": lambda _: _raise(torch.OutOfMemoryError(NO_MEMORY)),
    "exit0": lambda _: os._exit(0),
    # as NCCL's watchdog does in a thread of its own: no Python comes after it
    "abort": lambda _: os.abort(),
    "hang": _hang,
    "nan": lambda logits: logits * float("nan"),
    "kill": functools.partial(_signal, signal.SIGKILL),
    "term": functools.partial(_signal, signal.SIGTERM),
    "stop": functools.partial(_signal, signal.SIGSTOP),
}
