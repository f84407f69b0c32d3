"""Processes that are forked from the forkserver: what they must not do at their start, and when they have to end."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """While entered, what multiprocessing starts knows nothing of how this process began; nothing there is needed.

    Else it would run a person's script again, and look for the way of starting processes that joblib has chosen here.
    """
    main, method = sys.modules["__main__"], multiprocessing.get_start_method(allow_none=True)
    sys.modules["__main__"] = types.ModuleType("__main__")
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        sys.modules["__main__"] = main


def die_with_the_driver() -> None:
    """End this process at once when the driver is gone, even by SIGKILL, or the forkserver: nobody would watch it."""
    driver = multiprocessing.parent_process()
    assert driver is not None

    def watch() -> None:
        wait([driver.sentinel])
        os._exit(143)

    threading.Thread(target=watch, name="watch-driver", daemon=True).start()
    if sys.platform == "linux":  # its parent is the forkserver
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
