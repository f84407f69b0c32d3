"""The one process that every worker is forked from, with torch and expt imported. Free of torch itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any

from expt import signals

WORKER_MODULES = ("expt.launch.preload",)
SWEEP_MODULES = ("torch.utils.tensorboard",)
"""More to import before the first run, where many runs share the forkserver."""


def warm(extra_modules: Sequence[str] = ()) -> None:
    """Start importing what a worker needs, in the background; returns at once. Later calls do nothing."""
    multiprocessing.set_forkserver_preload([*WORKER_MODULES, *extra_modules])
    # Ignored from birth, in the forkserver and in every worker: Ctrl-C reaches them all, and the driver answers it.
    reach_all = signals.ASKING if signals.in_slurm() else (signal.SIGINT,)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in reach_all}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def kill() -> None:
    """End the forkserver at once, even in the middle of its imports. It has no state to lose.

    By names that are Python's own: where a version has none of them, the forkserver ends by itself with this process.
    """
    server: Any = getattr(forkserver, "_forkserver", None)
    pid, stop = getattr(server, "_forkserver_pid", None), getattr(server, "_stop", None)
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    if stop is not None:
        stop()
