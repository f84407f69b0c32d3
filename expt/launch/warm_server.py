"""What `expt warm` keeps: a process that has imported what workers need, to fork each command's forkserver from.

It serves one command after another, by a socket that bears the fingerprint of its surroundings; ends when idle.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from expt.launch import forkserver, warm

PATIENCE_S = 1.0
"""How long a command may take with its request, once it has been let in."""
MAX_DESCRIPTORS = 16


def main(name: str, idle_s: float, ready: int) -> None:
    """Import, let the socket `name` appear, write a byte to `ready`, and serve until nothing was asked for `idle_s`."""
    for number in signal.SIGINT, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # the forkservers are deaf to them too
    for module in (*forkserver.WORKER_MODULES, *forkserver.SWEEP_MODULES):
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        hidden = f".{name}.{os.getpid()}"
        with warm.address(hidden) as where:
            listener.bind(where)
        listener.listen()
        (warm.folder() / hidden).rename(warm.folder() / f"{name}.socket")
        os.write(ready, b"1")
        os.close(ready)
        Server(listener, name, idle_s).serve()


class Server:
    """Answers commands, and knows which of them are under way."""

    def __init__(self, listener: socket.socket, name: str, idle_s: float) -> None:
        self._listener, self._name, self._idle_s = listener, name, idle_s
        self._forked: dict[int, int] = {}  # from a descriptor of the process to its pid
        self._num_forked = 0
        self._last_used = self._began = time.monotonic()

    def serve(self) -> None:
        """Return when it is idle, or asked to."""
        while self._forked or self._left_s() > 0:
            timeout = None if self._forked else self._left_s()
            ready, _, _ = select.select([self._listener.fileno(), *self._forked], [], [], timeout)
            for ended in {*ready} & {*self._forked}:
                os.waitpid(self._forked.pop(ended), 0)
                os.close(ended)
                self._last_used = time.monotonic()
            if self._listener.fileno() in ready and self._attend() == "stop":
                break
        self._hide()

    def _hide(self) -> None:
        (warm.folder() / f"{self._name}.socket").unlink(missing_ok=True)

    def _left_s(self) -> float:
        return self._last_used + self._idle_s - time.monotonic()

    def _attend(self) -> str | None:
        """Answer one command; returns what it has asked for."""
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            try:
                asked: dict[str, Any] = json.loads(connection.recv(warm.MAX_BYTES))
                self._answer(connection, asked)
            except (OSError, ValueError, KeyError):  # who asked has gone, or is none of ours
                return None
            return str(asked["what"])

    def _answer(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        if asked["what"] == "fork":
            ready = not _shadowed(Path(asked["folder"]))
            _tell(connection, ready=ready)
            if ready:
                self._fork(connection, asked["folder"])
            return
        if asked["what"] == "keep":
            self._idle_s, self._last_used = float(asked["idle_s"]), time.monotonic()
        if asked["what"] == "stop":
            self._hide()  # before it is told, for who asks looks
        _tell(
            connection,
            pid=os.getpid(),
            prefix=sys.prefix,
            mebibytes=_mebibytes(),
            age_s=time.monotonic() - self._began,
            left_s=self._left_s(),
            idle_s=self._idle_s,
            under_way=len(self._forked),
            commands=self._num_forked,
        )

    def _fork(self, connection: socket.socket, folder: str) -> None:
        message, received, _, _ = socket.recv_fds(connection, warm.MAX_BYTES, MAX_DESCRIPTORS)
        try:
            request = json.loads(message)
            if pid := os.fork():
                self._forked[os.pidfd_open(pid)] = pid
                self._num_forked += 1
                _tell(connection, pid=pid)
                return
            self._listener.detach()
            connection.detach()
            _become(request, folder, received)
        finally:
            for descriptor in received:
                os.close(descriptor)


def _become(request: Mapping[str, Any], folder: str, received: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, with only the descriptors that it would have."""
    code = 1
    try:
        numbers = request["descriptors"]
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in received]
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in moved:
                _close(int(name))
        for descriptor, number in zip(moved, numbers, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.umask(request["umask"])
        os.environ.clear()
        os.environ.update(request["env"])
        exec(request["program"], {"__name__": "__main__"})
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:  # that of the listing itself
        return


def _shadowed(folder: Path) -> bool:
    """Whether something in a command's folder would be imported in the place of what is imported here."""
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    for name in names & {*sys.modules}:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or not Path(file).is_relative_to(folder):
            return True
    return False


def _mebibytes() -> int:
    """What it holds of the machine's memory, what it shares with others in part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024


def _tell(connection: socket.socket, **answer: object) -> None:
    connection.send(json.dumps(answer).encode())
