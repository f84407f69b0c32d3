"""One worker as a process: forked from the warm forkserver, with an environment and log files of its own.

Plain multiprocessing: torch elastic's would have the driver import torch, and hold up a run's first step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from expt import machine
from expt.errors import RunFailed
from expt.launch import forkserver
from expt.signals import without_main

UNKNOWN = 255
"""The exit code of a worker that has ended, or whose forkserver has, which alone could tell the code."""
TRIES = 3
FORKSERVER_KILLED = "the process that all workers are forked from was killed (out of memory?)"
FINISHED = 93
"""The exit code of a worker that came to its end. One that exits otherwise has failed, with 0 too."""


class Kept(NamedTuple):
    """A descriptor that a process gets, and has open as long as it lives; the processes that it forks do not."""

    descriptor: int

    def __reduce__(self) -> tuple[Callable[[Any], Kept], tuple[Any]]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(sent: Any) -> Kept:
    open_here = [descriptor := sent.detach()]

    def close() -> None:
        while open_here:  # a child's children find it closed
            os.close(open_here.pop())

    os.register_at_fork(after_in_child=close)
    return Kept(descriptor)


def start(
    function: str,
    arguments: Sequence[Any],
    *,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    kept: Sequence[Kept] = (),
) -> BaseProcess:
    """Call `function`, named as `package.module:name`, in a new process, and return at once.

    Raises RunFailed where the process that it would be forked from is killed again and again.
    """
    context = multiprocessing.get_context("forkserver")
    umask = machine.umask()  # the forkserver may have another
    for _ in range(TRIES):
        forkserver.ensure_running()
        process = context.Process(target=_work, args=(function, arguments, dict(env), stdout, stderr, umask, kept))
        with contextlib.suppress(EOFError, ConnectionError), without_main():  # it was killed in between
            process.start()
            return process
    raise RunFailed(f"{FORKSERVER_KILLED}, {TRIES} times")


def end(processes: Sequence[BaseProcess], how: int, timeout_s: float) -> None:
    """End them by the signal `how`, and by SIGKILL those that are left after `timeout_s`."""
    ask(processes, how)
    wait_for_all(processes, timeout_s)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def ask(processes: Sequence[BaseProcess], how: int) -> None:
    """Send the signal `how` to those that live."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.pid and process.exitcode is None:
                os.kill(process.pid, how)


def wait_for_all(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Return when every process is gone or the time is up."""
    left, deadline = {process.sentinel for process in processes}, time.monotonic() + timeout_s
    while left and (remaining := deadline - time.monotonic()) > 0:
        left -= {ready for ready in wait(left, remaining) if isinstance(ready, int)}


def print_to(stdout: Path, stderr: Path) -> None:
    """Let what this process prints from now on, C and C++ code too, go to the ends of these files.

    Raises OSError, with nothing changed, where one of them can't be written.
    """
    with stdout.open("ab") as out, stderr.open("ab") as err:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)


def _work(
    function: str,
    arguments: Sequence[Any],
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    umask: int,
    kept: Sequence[Kept],  # having come here is enough
) -> None:
    os.umask(umask)
    os.environ.update(env)
    print_to(stdout, stderr)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a worker that is killed leaves its lines
    pkgutil.resolve_name(function)(*arguments)
    sys.exit(FINISHED)
