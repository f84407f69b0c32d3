"""Functions that a forked process calls, so that they leave no trace in this one."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from expt import signals

Found = TypeVar("Found")
LIMIT_S = 20.0
"""Seconds after which a forked process is given up: it may wait for a thread that it lacks."""


def can_fork() -> bool:
    """Return whether this process may fork others."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def in_fork(function: Callable[[], Found]) -> Found | None:
    """Return the result of a function that a forked process calls; None where it fails or hangs.

    Caches, counters, generators and all else that the function changes stay as they are here. It
    prints nothing, and can use neither a GPU nor other workers.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks next to threads
        parent, child = os.getpid(), os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # OpenMP's other threads are not there
            begin(parent)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            sender.send_bytes(pickle.dumps(function()))
        finally:
            os._exit(0)
    sender.close()
    try:
        found = receiver.recv_bytes() if receiver.poll(LIMIT_S) else None
    except EOFError:
        found = None
    finally:
        receiver.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None if found is None else cast("Found", pickle.loads(found))


def begin(parent: int | None) -> None:
    """Make a process that `parent` has forked end with it, and read files at places of its own.

    Ctrl-C reaches the whole group, and the parent decides on it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux" and parent is not None:
        signals.die_with_parent(parent)
        _open_anew()


def _open_anew() -> None:
    """Open the regular files of the parent again in this process, at the same places.

    A descriptor shares its place in the file with all processes that were forked with it: a custom
    dataset that reads by it would get the bytes of another process.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own; files that may not be opened again
            number = int(name)
            if number <= 2 or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            if flags & os.O_ACCMODE == os.O_WRONLY:  # such as a log: all write to its end
                continue
            anew = os.open(f"/proc/self/fd/{number}", flags | os.O_CLOEXEC)
            os.lseek(anew, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(anew, number, inheritable=os.get_inheritable(number))
            os.close(anew)
