"""One worker as a process: forked from the warm forkserver, with an environment and log files of
its own.

Plain multiprocessing: torch elastic's would have the driver import torch, and hold up a run's first
step."""

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
from typing import Any, NamedTuple, NoReturn, Protocol

from expt import machine
from expt.errors import RunFailed
from expt.launch import forkserver
from expt.signals import without_main

UNKNOWN = 255
"""The exit code of a worker that has ended, or whose forkserver has, which alone could tell the
code.
"""
TRIES = 3
FORKSERVER_KILLED = "the process that all workers are forked from was killed (out of memory?)"
FINISHED = 93
"""The exit code of a worker that came to its end.

One that exits otherwise has failed, with 0 too.
"""


class Kept(NamedTuple):
    """A descriptor that a process gets, and has open as long as it lives; the processes that it
    forks do not.
    """

    descriptor: int

    def __reduce__(self) -> tuple[Callable[[Any], Kept], tuple[Any]]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(sent: Any) -> Kept:
    return keep_open(sent.detach())


def keep_open(descriptor: int) -> Kept:
    """Have this process alone keep it, and not those that it forks."""
    open_here = [descriptor]

    def close() -> None:
        while open_here:  # a child's children find it closed
            os.close(open_here.pop())

    os.register_at_fork(after_in_child=close)
    return Kept(descriptor)


class Work(NamedTuple):
    """What a process is to do: call `function`, named as `package.module:name`, and print to files."""

    function: str
    arguments: Sequence[Any]
    env: Mapping[str, str]
    """Added to its environment."""
    stdout: Path
    stderr: Path
    kept: Sequence[Kept] = ()
    umask: int | None = None
    """None for this process's."""

    def here(self) -> Work:
        """The same, with what the forkserver may have otherwise."""
        return self._replace(
            env=dict(self.env), umask=machine.umask() if self.umask is None else self.umask
        )


class Process(Protocol):
    """One that does some work, as multiprocessing has it."""

    @property
    def pid(self) -> int | None:
        """None before it has begun."""

    @property
    def sentinel(self) -> int:
        """Ready once it is gone."""

    @property
    def exitcode(self) -> int | None:
        """None while it is at work."""

    def kill(self) -> None:
        """End it at once."""

    def join(self) -> None:
        """Return when it is gone."""

    def close(self) -> None:
        """Give back what is held of it."""


def start(work: Work) -> BaseProcess:
    """Have a new process do this, and return at once. Raises as `fork` does."""
    return fork(do, (work.here(),))


def fork(target: Callable[..., None], arguments: Sequence[Any]) -> BaseProcess:
    """A new process that calls `target`.

    Raises RunFailed where the process that it would be forked from is killed again and again.
    """
    context = multiprocessing.get_context("forkserver")
    for _ in range(TRIES):
        forkserver.ensure_running()
        process = context.Process(target=target, args=arguments)
        with (
            contextlib.suppress(EOFError, ConnectionError),
            without_main(),
        ):  # it was killed in between
            process.start()
            return process
    raise RunFailed(f"{FORKSERVER_KILLED}, {TRIES} times")


def end(processes: Sequence[Process], how: int, timeout_s: float) -> None:
    """End them by the signal `how`, and by SIGKILL those that are left after `timeout_s`."""
    ask(processes, how)
    wait_for_all(processes, timeout_s)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def ask(processes: Sequence[Process], how: int) -> None:
    """Send the signal `how` to those that live."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.pid and process.exitcode is None:
                os.kill(process.pid, how)


def wait_for_all(processes: Sequence[Process], timeout_s: float) -> None:
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


def do(work: Work, tell: Callable[[], object] = lambda: None) -> NoReturn:
    """Do it in this process, and end with it; calls `tell` when it is done."""
    if work.umask is not None:
        os.umask(work.umask)
    os.environ.update(work.env)
    print_to(work.stdout, work.stderr)
    # a worker that is killed leaves its lines
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pkgutil.resolve_name(work.function)(*work.arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    tell()
    sys.exit(FINISHED)
