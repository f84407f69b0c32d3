"""Processes of the forkserver: what they are given to do, and how they end.

Each has one end of a socket pair. It gets its work there, says when that is done, and the
forkserver says with which code it has exited: ready to be read is what the driver waits for.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import pkgutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from expt import machine
from expt.errors import RunFailed
from expt.launch import forkserver

UNKNOWN = 255
"""The exit code of a process whose forkserver has died, which alone knows the code."""
FINISHED = 93
"""The exit code of a process that has done its work; any other has failed, with 0 too."""
TRIES = 3
FORKSERVER_KILLED = "the process that all workers are forked from was killed (out of memory?)"
LEAVING_S = 5.0
"""How long processes that have done their work get to end."""
_LENGTH = struct.Struct("!Q")
_MOST_DESCRIPTORS = 16


class Kept(NamedTuple):
    """A descriptor that a process has open as long as it lives; those that it forks do not."""

    descriptor: int


def keep_open(descriptor: int) -> Kept:
    """Have only this process keep it, and not those that it forks."""
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
    """Added to this process's environment."""
    stdout: Path
    stderr: Path
    kept: Sequence[Kept] = ()
    title: str = "expt worker"
    frees_at_end: bool = False
    """Whether it counts as finished only once it is gone, since others wait for what it frees then,
    as the memory of a GPU; else as soon as it has done its work.
    """


class _Surroundings(NamedTuple):
    """What a process has of the driver."""

    env: Mapping[str, str]
    path: Sequence[str]
    argv: Sequence[str]
    folder: str
    umask: int


class Process:
    """A process that the forkserver has forked."""

    def __init__(self, line: socket.socket, *, frees_at_end: bool = False) -> None:
        self._line, self._buffer, self._frees_at_end = line, b"", frees_at_end
        self._pid: int | None = None
        self._code: int | None = None
        self._outcome: tuple[str, Any] | None = None

    @property
    def pid(self) -> int:
        """Wait for its start, and return the pid. Raises OSError if there is no process."""
        while not self.is_gone and self._pid is None:
            wait([self._line])
        if self._pid is None:
            raise ProcessLookupError
        return self._pid

    @property
    def sentinel(self) -> int:
        """Ready to be read once `exitcode` may have changed."""
        return self._line.fileno()

    @property
    def exitcode(self) -> int | None:
        """FINISHED once it has done its work, else how it has ended; None while it is at work."""
        self._listen()
        if self._code is None and self._outcome and self._outcome[0] == "done":
            return None if self._frees_at_end else FINISHED
        return self._code

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        self._listen()
        return self._code is not None

    def result(self) -> Any:
        """Wait for what its function returns; raise what that raises, or RunFailed."""
        while self.exitcode is None:
            wait([self._line])
        if self._outcome is None:
            raise RunFailed(f"a process ended with code {self._code}")
        kind, value = self._outcome
        if kind == "raised":
            raise value
        return value

    def send_signal(self, number: int) -> None:
        """Send it this signal, unless it has ended."""
        if not self.is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Give back what is held of it; if it is about to end, once it is gone."""
        if self.is_gone:
            self._line.close()
        else:
            _leaving.append(self)

    def _listen(self) -> None:
        while self._code is None:
            try:
                heard = self._line.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                heard = b""
            self._buffer += heard
            while (message := self._next_message()) is not None:
                kind, value = message
                if kind == "pid":
                    self._pid = value
                elif kind == "exit":
                    self._code = value
                else:
                    self._outcome = message
            if not heard and self._code is None:
                self._code = UNKNOWN

    def _next_message(self) -> Any:
        begin = _LENGTH.size
        if len(self._buffer) < begin:
            return None
        end = begin + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        text, self._buffer = self._buffer[begin:end], self._buffer[end:]
        return pickle.loads(text)


_leaving: list[Process] = []


def start(work: Work) -> Process:
    """Have a new process do this, and return at once.

    Raises RunFailed if the process that it would be forked from is killed again and again.
    """
    here = _Surroundings(
        {**os.environ, **work.env}, sys.path, sys.argv, os.getcwd(), machine.umask()
    )
    for _ in range(TRIES):
        server = forkserver.ensure_running()
        ours, its = socket.socketpair()
        process = Process(ours, frees_at_end=work.frees_at_end)
        try:
            with its:
                server.fork(its)
            if process.pid:
                send(ours, (work, here))
                return process
        except OSError:  # it was killed in between
            process.close()
    raise RunFailed(f"{FORKSERVER_KILLED}, {TRIES} times")


def call_each(function: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what `function` returns of each of these, every one in a process of its own.

    Raises what one of them raises, or RunFailed, with all of them ended.
    """
    nowhere, processes = Path(os.devnull), list[Process]()
    try:
        for each in arguments:
            processes.append(start(Work(function, each, {}, nowhere, nowhere)))
        return [process.result() for process in processes]
    finally:
        end(processes, signal.SIGKILL, 0)
        for process in processes:
            process.close()


def end(processes: Sequence[Process], how: int, timeout_s: float) -> None:
    """End them by the signal `how`, and by SIGKILL those that are left after `timeout_s`."""
    ask(processes, how)
    wait_for_all(processes, timeout_s, until_gone=True)
    ask(processes, signal.SIGKILL)
    wait_for_all(processes, None, until_gone=True)


def ask(processes: Sequence[Process], how: int) -> None:
    """Send the signal `how` to those that live."""
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


def see_off() -> None:
    """Return when all processes that have done their work are gone."""
    leaving, _leaving[:] = [*_leaving], []
    wait_for_all(leaving, LEAVING_S, until_gone=True)
    end(leaving, signal.SIGKILL, 0)
    for process in leaving:
        process.close()


def print_to(stdout: Path, stderr: Path) -> None:
    """Let what this process prints from now on, C and C++ code too, go to the ends of these files.

    Raises OSError, with nothing changed, where one of them can't be written.
    """
    with stdout.open("ab") as out, stderr.open("ab") as err:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)


def work_through(line: socket.socket) -> NoReturn:
    """Do in this process, which was just forked, what comes by the line, and end with it."""
    code = 1
    try:
        os.register_at_fork(after_in_child=line.close)  # else its end would not be seen
        forkserver.set_title("expt worker")
        if (found := receive(line)) is None:
            os._exit(0)  # the driver has no work for it
        send(line, ("done", _do(*found)))
        code = FINISHED
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):  # one that can't be sent
            send(line, ("raised", error))
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
            util._exit_function()  # type: ignore[attr-defined]  # ends the loaders' processes
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _do(work: Work, surroundings: _Surroundings) -> Any:
    forkserver.set_title(work.title)
    os.umask(surroundings.umask)
    with contextlib.suppress(OSError):  # a folder that is gone
        os.chdir(surroundings.folder)
    os.environ.clear()
    os.environ.update(surroundings.env)
    sys.path[:], sys.argv[:] = surroundings.path, surroundings.argv
    print_to(work.stdout, work.stderr)
    # a worker that is killed leaves its lines
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    found = pkgutil.resolve_name(work.function)(*work.arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    return found


def send(line: socket.socket, what: object) -> None:
    """Send an object, with the descriptors that it holds. Raises OSError where nobody is there."""
    file = io.BytesIO()
    packer = _Packer(file, pickle.HIGHEST_PROTOCOL)
    packer.descriptors = []
    packer.dump(what)
    text = file.getvalue()
    message = _LENGTH.pack(len(text)) + text
    sent = socket.send_fds(line, [message], packer.descriptors)
    line.sendall(message[sent:])


def receive(line: socket.socket) -> Any:
    """Wait for what `send` has sent; return None at the end."""
    flags = socket.MSG_CMSG_CLOEXEC
    text, descriptors, _, _ = socket.recv_fds(line, 1 << 16, _MOST_DESCRIPTORS, flags)
    while text and len(text) < _LENGTH.size + _LENGTH.unpack_from(text)[0]:
        text += line.recv(1 << 16)
    return _Unpacker(text[_LENGTH.size :], descriptors).load() if text else None


class _Packer(pickle.Pickler):
    """Leaves out what only the kernel can hand over, and says where it was."""

    descriptors: list[int]

    def persistent_id(self, found: Any) -> tuple[str, int] | None:
        """For what is a descriptor, or has one."""
        if isinstance(found, socket.socket | Kept):
            number = found.fileno() if isinstance(found, socket.socket) else found.descriptor
            self.descriptors.append(number)
            return type(found).__name__, len(self.descriptors) - 1
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, text: bytes, descriptors: Sequence[int]) -> None:
        super().__init__(io.BytesIO(text))
        self._descriptors = descriptors

    def persistent_load(self, pid: tuple[str, int]) -> Any:
        number = self._descriptors[pid[1]]
        return keep_open(number) if pid[0] == Kept.__name__ else socket.socket(fileno=number)
