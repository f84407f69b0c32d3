"""The one process that every worker is forked from, with torch and expt imported. Free of torch itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any

from expt import signals

WORKER_MODULES = ("expt.launch.preload",)
SWEEP_MODULES = (
    *("torch.utils.tensorboard", "tensorboard.plugins.hparams.metadata"),
    *("numpy.random", "torch.utils.serialization.config"),
)
"""More to import before the first run, where many runs share the forkserver."""


def warm(extra_modules: Sequence[str] = ()) -> None:
    """Start importing what a worker needs, in the background; returns at once. Later calls do nothing."""
    multiprocessing.set_forkserver_preload([*WORKER_MODULES, *extra_modules])
    ensure_running()


def ensure_running() -> int | None:
    """Start it, also anew where it was killed; returns its pid, None where that cannot be known."""
    # Ignored from birth, in the forkserver and in every worker: Ctrl-C reaches them all, and the driver answers it.
    reach_all = signals.ASKING if signals.in_slurm() else signals.OF_THE_TERMINAL
    in_main = threading.current_thread() is threading.main_thread()  # else Python lets nobody change that
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in reach_all if in_main}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return _pid()


def is_gone(pid: int | None, within_s: float = 0.0) -> bool:
    """Whether the one with this pid, of `ensure_running`, has died, or does so; its workers die with it."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(ChildProcessError):  # there is another already
        while pid is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if pid is None or time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
    return True


def kill() -> None:
    """End the forkserver at once, even in the middle of its imports. It has no state to lose.

    By names that are Python's own: where a version has none of them, the forkserver ends by itself with this process.
    """
    pid, stop = _pid(), getattr(getattr(forkserver, "_forkserver", None), "_stop", None)
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    if stop is not None:
        stop()


def _pid() -> int | None:
    server: Any = getattr(forkserver, "_forkserver", None)
    pid: int | None = getattr(server, "_forkserver_pid", None)
    return pid
