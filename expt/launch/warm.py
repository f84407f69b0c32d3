"""The warm server of `expt warm`, as a command meets it: a process to fork the forkserver from, its
imports made.

Beside it waits another, with the imports of a driver and without torch, to fork the command itself
from.

Opt-in, and never a stale or foreign one: its socket bears the fingerprint of all that cannot be
changed later, see expt.launch.surroundings, and lies in a folder that only this user can enter.
Free of torch, and of all that a command which hands itself over has no need of."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expt.launch.surroundings import fingerprint

SERVER, DRIVERS = "socket", "drivers"
"""What the names of the two sockets end with: that of the process with torch, and that of the one
without.
"""
PATIENCE_S = 0.2
"""How long a command waits for a warm server before it starts a forkserver of its own."""
FORK_PATIENCE_S = 5.0
"""How long it waits for one that has just answered: the process that it is to fork holds the
command's descriptors.
"""
MAX_BYTES = 1 << 20
"""Of a message; one with an environment that is larger is not sent."""


class Cold(Exception):
    """There is no warm server for this process, or it does not answer."""


def fork(program: str, descriptors: Sequence[int]) -> int:
    """Have the warm server fork a process that runs `program`; returns its pid, that of nobody's
    child here.

    It has this process's folder, environment, umask, stdout and stderr, and `descriptors` by the
    same numbers. Raises Cold, within PATIENCE_S of one that does not answer."""
    from expt import machine, signals  # late: who hands the command over imports neither

    sent = [1, 2, *descriptors]
    deaf = signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN  # as what a script starts with `&`
    request = {
        "program": program,
        "env": dict(os.environ),
        "umask": machine.umask(),
        "deaf": deaf,
        "descriptors": sent,
    }
    if signals.in_slurm():
        raise Cold
    with _asked_to_fork(SERVER, request, sent) as server:
        return int(_received(server, time.monotonic() + FORK_PATIENCE_S)["pid"])


def fork_driver(
    request: Mapping[str, object], descriptors: Sequence[int]
) -> tuple[socket.socket, int]:
    """Have a driver forked; returns the line on which its exit code will come, and a descriptor of
    the process.

    One that comes too late, when nobody waits for it, does nothing: see expt.command.warm_drivers.
    Raises Cold as `fork` does."""
    with _asked_to_fork(DRIVERS, request, descriptors) as server:
        server.settimeout(FORK_PATIENCE_S)
        _, received, _, _ = socket.recv_fds(server, MAX_BYTES, 1)
        if not received:  # it has ended before it began
            raise Cold
        return server.dup(), received[0]


@contextlib.contextmanager
def _asked_to_fork(
    kind: str, request: Mapping[str, object], descriptors: Sequence[int]
) -> Iterator[socket.socket]:
    """The line to a process that has been told to fork.

    Raises Cold, within PATIENCE_S of one that does not answer.
    """
    until = time.monotonic() + PATIENCE_S
    if not is_private(folder()) or not any(sockets()):
        raise Cold
    name = name_here()
    if name is None or name in _hanging:
        raise Cold
    try:
        here = os.getcwd()
    except OSError as error:  # it has been removed
        raise Cold from error
    try:
        with _connected(name, until, kind) as server:
            question = {"what": "fork", "folder": here, "path": sys.path}
            if _asked(server, question, until) != {"ready": True}:
                raise Cold
            # Only to one that is awake: the descriptors are not to be shared with a process that
            # comes too late.
            server.settimeout(_left(until))
            socket.send_fds(server, [json.dumps(request).encode()], descriptors)
            yield server
    except Cold as error:
        if isinstance(error.__cause__, TimeoutError):  # the other one is not waited for, too
            _hanging.add(name)
        raise


_hanging: set[str] = set()
_known: tuple[str, dict[str, str]] | None = None


def know(name: str) -> None:
    """Let this process, forked beside the server `name`, not look its surroundings up again."""
    global _known
    _known = name, dict(os.environ)


def name_here() -> str | None:
    """That of a server for this process; None where there can be none."""
    if _known and _known[1] == os.environ:
        return _known[0]
    return fingerprint()


def ask(name: str, what: str, timeout_s: float = 2.0, **more: object) -> dict[str, Any]:
    """What the warm server says to "status", "keep" or "stop".

    Raises Cold where it does not answer.
    """
    until = time.monotonic() + timeout_s
    with _connected(name, until) as server:
        return _asked(server, {"what": what, **more}, until)


def listens(name: str) -> bool:
    """Whether there still is a process at the socket, were it one that hangs."""
    with contextlib.suppress(Cold), _connected(name, time.monotonic() + PATIENCE_S):
        return True
    return False


def kill(name: str) -> None:
    """End a server that does not answer; what was forked from it goes on."""
    for kind, number in (
        (SERVER, signal.SIGKILL),
        (DRIVERS, signal.SIGCONT),
    ):  # the other one ends by itself then
        with (
            contextlib.suppress(Cold, OSError),
            _connected(name, time.monotonic() + PATIENCE_S, kind) as server,
        ):
            listener = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid = int.from_bytes(listener[:4], sys.byteorder)
            handle = os.pidfd_open(pid)
            os.kill(pid, number)
            if number == signal.SIGKILL:
                select.select([handle], [], [], FORK_PATIENCE_S)
            os.close(handle)
    if not listens(name):
        hide(name, SERVER)


def folder() -> Path:
    """Where the sockets lie, of this user alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and is_private(Path(runtime)):
        return Path(runtime) / "expt"
    import tempfile  # late: it takes 3 ms

    return Path(tempfile.gettempdir()) / f"expt-warm-{os.getuid()}"


def is_private(path: Path) -> bool:
    """Whether it is a folder that this user owns, and nobody else can enter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def sockets() -> Iterator[str]:
    """The names of the warm servers that have been ready, some of which may have ended."""
    return (path.stem for path in folder().glob(f"*.{SERVER}"))


@contextlib.contextmanager
def listening(name: str, kind: str) -> Iterator[socket.socket]:
    """A socket of the folder, which appears there when it can be connected to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        hidden = f".{name}.{kind}.{os.getpid()}"
        with address(hidden) as where:
            listener.bind(where)
        listener.listen()
        (folder() / hidden).rename(folder() / f"{name}.{kind}")
        yield listener


def hide(name: str, kind: str) -> None:
    """Let nobody find the socket."""
    (folder() / f"{name}.{kind}").unlink(missing_ok=True)


@contextlib.contextmanager
def address(name: str) -> Iterator[str]:
    """That of a socket in the folder, however long the folder's name is."""
    opened = os.open(folder(), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)


@contextlib.contextmanager
def _connected(name: str, until: float, kind: str = SERVER) -> Iterator[socket.socket]:
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
            address(f"{name}.{kind}") as where,
        ):
            server.settimeout(_left(until))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
            server.connect(where)
            yield server
    except (OSError, ValueError, KeyError) as error:  # TimeoutError is an OSError
        raise Cold from error


def _asked(server: socket.socket, question: Mapping[str, object], until: float) -> dict[str, Any]:
    server.send(json.dumps(question).encode())
    return _received(server, until)


def _received(server: socket.socket, until: float) -> dict[str, Any]:
    server.settimeout(_left(until))
    found: dict[str, Any] = json.loads(server.recv(MAX_BYTES))
    return found


def _left(until: float) -> float:
    return max(until - time.monotonic(), 1e-3)
