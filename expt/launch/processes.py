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
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

FINISHED = 93
"""The exit code of a worker that came to its end. One that exits otherwise has failed, with 0 too."""


def start(
    function: str, arguments: Sequence[Any], *, env: Mapping[str, str], stdout: Path, stderr: Path
) -> BaseProcess:
    """Call `function`, named as `package.module:name`, in a new process, and return at once."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_work, args=(function, arguments, dict(env), stdout, stderr))
    with _without_main():
        process.start()
    return process


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


def _work(function: str, arguments: Sequence[Any], env: Mapping[str, str], stdout: Path, stderr: Path) -> None:
    os.environ.update(env)
    print_to(stdout, stderr)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a worker that is killed leaves its lines
    pkgutil.resolve_name(function)(*arguments)
    sys.exit(FINISHED)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running a person's script again in each worker: nothing there is needed."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
