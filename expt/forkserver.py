"""The one process that every worker is forked from, with torch and expt imported. Free of torch itself."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver

WORKER_MODULES = ("expt.worker", "torch.distributed.elastic.multiprocessing.api")


def warm(extra_modules: Sequence[str] = ()) -> None:
    """Start importing what a worker needs, in the background; returns at once. Later calls do nothing."""
    multiprocessing.set_forkserver_preload([*WORKER_MODULES, *extra_modules])
    # Ignored from birth, in the forkserver and in every worker: Ctrl-C reaches them all, and the driver answers it.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


def kill() -> None:
    """End the forkserver at once, even in the middle of its imports. It has no state to lose."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None and sys.platform != "win32":
        import os

        os.kill(pid, signal.SIGKILL)
        forkserver._forkserver._stop()
