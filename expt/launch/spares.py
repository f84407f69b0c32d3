"""Workers that are forked before a run's turn comes: each waits, and knows of no run until it is
given its work.

What a process takes to begin and to end then passes beside the training of another run: CPU, and
not the time between one run and the next. For runs on CPUs alone: memory of a GPU is free only when
the process is gone."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from expt.errors import RunFailed
from expt.launch import processes
from expt.launch.processes import Process, Work
from expt.signals import die_with_the_parent

END_S = 5.0
"""How long those that are at their end get to be gone."""
_DONE = b"."
_LENGTH = struct.Struct("!Q")
_MOST_DESCRIPTORS = 16


class Spares:
    """Those of one pool."""

    def __init__(self) -> None:
        self._waiting: list[Worker] = []
        self._leaving: list[BaseProcess] = []

    def keep(self, number: int) -> None:
        """Have one more where fewer than `number` wait; to be called again, for each takes a
        moment.
        """
        self._forget_the_gone()
        if len(self._waiting) < number:
            with contextlib.suppress(
                RunFailed, OSError
            ):  # a run that needs it will say why there is none
                self._waiting.append(_forked(self._leaving))

    def start(self, work: Work) -> Process:
        """What expt.launch.processes.start does, by one that waits where there is one."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.give(work):
                return spare
            spare.close()
        return processes.start(work)

    def close(self) -> None:
        """End those that wait, and return when those that have finished are gone, too."""
        while self._waiting:
            self._waiting.pop().close()
        processes.wait_for_all(self._leaving, END_S)
        processes.end(self._leaving, signal.SIGKILL, 0)
        self._forget_the_gone()

    def _forget_the_gone(self) -> None:
        for process in [process for process in self._leaving if process.exitcode is not None]:
            self._leaving.remove(process)
            process.close()


class Worker:
    """A process that takes its work from a line, and says there when it is done: a moment before it
    is gone.
    """

    def __init__(
        self, process: BaseProcess, line: socket.socket, leaving: list[BaseProcess]
    ) -> None:
        self._process, self._leaving = process, leaving
        self._line: socket.socket | None = line
        self._done = False

    def give(self, work: Work) -> bool:
        """Have it do this; returns whether it was there to be told."""
        assert self._line is not None
        text, descriptors = _packed(work.here())
        try:
            if self._process.exitcode is not None:
                return False
            socket.send_fds(self._line, [_LENGTH.pack(len(text))], descriptors)
            self._line.sendall(text)
        except OSError:
            return False
        self._line.setblocking(False)
        return True

    @property
    def pid(self) -> int | None:
        """That of the process."""
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Ready once the process is gone."""
        return self._process.sentinel

    @property
    def sentinels(self) -> list[int]:
        """One of them is ready once it has something to tell."""
        return [self.sentinel, *([self._line.fileno()] if self._line else [])]

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing has it; that of a process which came to its end from when it has said
        so.
        """
        with contextlib.suppress(BlockingIOError):
            if self._line:
                self._done = self._heard() == _DONE
                self._line.close()
                self._line = None
        return processes.FINISHED if self._done else self._process.exitcode

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def join(self) -> None:
        """Return when it is gone."""
        self._process.join()

    def close(self) -> None:
        """Give back what is held of it. One that has no work ends of it."""
        if self._line:
            self._line.close()
            self._line = None
        self._leaving.append(self._process)

    def _heard(self) -> bytes:
        assert self._line is not None
        try:
            return self._line.recv(1)
        except ConnectionError:
            return b""


def _forked(leaving: list[BaseProcess]) -> Worker:
    ours, its = socket.socketpair()
    try:
        with its:
            return Worker(processes.fork(_serve, (its,)), ours, leaving)
    except BaseException:
        ours.close()
        raise


def _serve(line: socket.socket) -> None:
    """What it runs: wait for the work, do it, say so."""
    die_with_the_parent()
    os.register_at_fork(after_in_child=line.close)  # else it would not end with this process
    nowhere = Path(os.devnull)
    processes.print_to(nowhere, nowhere)
    message, descriptors, _, _ = socket.recv_fds(
        line, _LENGTH.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    if not message:  # the driver has no work for it, or is gone
        os._exit(processes.FINISHED)
    with line.makefile("rb") as file:
        text = file.read(*_LENGTH.unpack(message))
    processes.do(_Unpacker(text, descriptors).load(), tell=lambda: line.send(_DONE))


class _Packer(pickle.Pickler):
    """Leaves out what only the kernel can hand over, and says where it was."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.descriptors: list[int] = []

    def persistent_id(self, found: Any) -> tuple[str, int] | None:
        """For what is a descriptor, or has one."""
        if isinstance(found, socket.socket | processes.Kept):
            number = found.fileno() if isinstance(found, socket.socket) else found.descriptor
            self.descriptors.append(number)
            return type(found).__name__, len(self.descriptors) - 1
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, text: bytes, descriptors: Sequence[int]) -> None:
        super().__init__(io.BytesIO(text))
        self._descriptors = descriptors

    def persistent_load(self, pid: tuple[str, int]) -> Any:
        make: Callable[[int], Any] = (
            processes.keep_open if pid[0] == processes.Kept.__name__ else _socket_of
        )
        return make(self._descriptors[pid[1]])


def _socket_of(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def _packed(what: object) -> tuple[bytes, list[int]]:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(what)
    return file.getvalue(), packer.descriptors
