"""Processes of the forkserver, as the driver sees them: start them, signal them, wait for them.

The driver waits for a process by the socket through which it has given it work.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from expt import machine
from expt.errors import RunFailed
from expt.launch import forkserver
from expt.launch.forkserver import FINISHED, Packer, Surroundings, Work

UNKNOWN = 255
"""The exit code of a process whose forkserver, which knows the code, has died."""
TRIES = 3
FORKSERVER_KILLED = "the process that all workers are forked from was killed (out of memory?)"
LEAVING_S = 5.0
"""How long processes that have done their work get to end."""


class Process:
    """A process that the forkserver has forked."""

    def __init__(self, line: Connection, *, frees_at_end: bool = False) -> None:
        self._line, self._frees_at_end = line, frees_at_end
        self._heard: dict[str, Any] = {}
        """Its pid; its result or error; the exit code."""

    @property
    def pid(self) -> int:
        """The pid, once the process has started. Raises OSError if there is no process."""
        while not self.is_gone and "pid" not in self._heard:
            wait([self._line])
        if "pid" not in self._heard:
            raise ProcessLookupError
        return int(self._heard["pid"])

    @property
    def sentinel(self) -> int:
        """Ready to be read once `exitcode` may have changed."""
        return self._line.fileno()

    @property
    def exitcode(self) -> int | None:
        """The exit code, or FINISHED once its work is done; None while it is at work."""
        self._listen()
        has_finished = "done" in self._heard and not self._frees_at_end
        return self._heard.get("exit", FINISHED if has_finished else None)

    @property
    def is_gone(self) -> bool:
        """True if the process has ended."""
        self._listen()
        return "exit" in self._heard

    def result(self) -> Any:
        """Wait for the result of its function; raise the error of that, or RunFailed."""
        while self.exitcode is None:
            wait([self._line])
        self.refuse_failed()
        if "done" not in self._heard:
            raise RunFailed(f"a process ended with code {self.exitcode}")
        return self._heard["done"]

    def refuse_failed(self) -> None:
        """Raise the error that it has sent, if any."""
        if "raised" in self._heard:
            raise self._heard["raised"]

    def send_signal(self, number: int) -> None:
        """Send it this signal, unless it has ended."""
        if not self.is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Close the sockets of this process and of earlier ones that are gone."""
        for one in [self, *_take_leaving()]:
            if one.is_gone:
                one._line.close()
            else:
                _leaving.append(one)

    def _listen(self) -> None:
        while "exit" not in self._heard and self._line.poll():
            try:
                kind, value = self._line.recv()
            except (EOFError, OSError):  # OSError: it was killed in the middle of a message
                kind, value = "exit", UNKNOWN
            self._heard[kind] = value


_leaving: list[Process] = []
os.register_at_fork(after_in_child=_leaving.clear)  # they are the parent's


def _take_leaving() -> list[Process]:
    """Return the processes that are about to end; of several threads one gets each."""
    found = list[Process]()
    with contextlib.suppress(IndexError):
        while True:
            found.append(_leaving.pop())
    return found


def start(work: Work) -> Process:
    """Start a process that does this work, and return at once.

    Raises RunFailed if the system has no room for it, or if the process that it would be forked
    from is killed again and again.
    """
    here = Surroundings(
        {**os.environ, **work.env}, sys.path, sys.argv, os.getcwd(), machine.umask()
    )
    packer = Packer(packed := io.BytesIO())
    packer.dump((work, here))
    for _ in range(TRIES):
        server = forkserver.ensure_running()
        ours, its = Pipe()
        process = Process(ours, frees_at_end=work.frees_at_end)
        try:
            with its:
                socket.send_fds(server.control, [b"f"], [its.fileno()])
            if process.pid:  # it has started
                ours.send_bytes(packed.getvalue())
                for descriptor in packer.descriptors:
                    reduction.send_handle(ours, descriptor, None)
                return process
        except OSError:  # it was killed in between
            process.close()
            process.refuse_failed()
    if not server.is_gone:
        raise RunFailed("no process can be started: too many open files (ulimit -n)")
    raise RunFailed(f"{FORKSERVER_KILLED}, {TRIES} times")


def call_each(function: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of `function` for each of the arguments, each from its own process.

    Raises the error of one of them, or RunFailed, with all of them ended.
    """
    nowhere, processes = Path(os.devnull), list[Process]()
    try:
        for each in arguments:
            processes.append(start(Work(function, each, {}, nowhere, nowhere)))
        return [process.result() for process in processes]
    finally:
        kill(processes)
        for process in processes:
            process.close()


def kill(processes: Sequence[Process]) -> None:
    """Kill processes, and return when they are gone."""
    ask(processes, signal.SIGKILL)
    wait_for_all(processes, None, until_gone=True)


def ask(processes: Sequence[Process], how: int) -> None:
    """Send the signal `how` to all processes that live."""
    for process in processes:
        process.send_signal(how)


def wait_for_all(
    processes: Sequence[Process], timeout_s: float | None, *, until_gone: bool = False
) -> None:
    """Return when every process has an exit code, or is gone, or the time is up."""
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while left := [
        process.sentinel
        for process in processes
        if not process.is_gone and (until_gone or process.exitcode is None)
    ]:
        if (remaining := end - time.monotonic()) <= 0:
            return
        wait(left, None if remaining == math.inf else remaining)


def wait_for_leaving() -> None:
    """Return when all processes that have done their work are gone."""
    leaving = _take_leaving()
    wait_for_all(leaving, LEAVING_S, until_gone=True)
    kill(leaving)
    for process in leaving:
        process.close()
