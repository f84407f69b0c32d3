"""Faults on purpose, for tests: EXPT_FAULT=RANK:STEP:KIND[:once] in a worker's environment."""

from __future__ import annotations

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


def _fail(_: torch.Tensor) -> NoReturn:
    raise RuntimeError("a fault on purpose")


def _run_out_of_memory(_: torch.Tensor) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, on purpose")


def _leave(_: torch.Tensor) -> NoReturn:
    os._exit(0)


def _abort(_: torch.Tensor) -> NoReturn:
    os.abort()  # as NCCL's watchdog does in a thread of its own: no Python comes after it


def _hang(_: torch.Tensor) -> NoReturn:
    while True:
        time.sleep(0.1)


def _by_signal(number: signal.Signals) -> Callable[[torch.Tensor], torch.Tensor]:
    def strike(logits: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), number)
        return logits

    return strike


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "raise": _fail,
    "oom": _run_out_of_memory,
    "exit0": _leave,
    "hang": _hang,
    "nan": lambda logits: logits * float("nan"),
    "kill": _by_signal(signal.SIGKILL),
    "term": _by_signal(signal.SIGTERM),
    "stop": _by_signal(signal.SIGSTOP),
    "abort": _abort,
}
