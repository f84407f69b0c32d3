"""What `expt warm` keeps: a process that has imported what workers need, to fork each command's
forkserver from.

It serves one command after another, by a socket that bears the fingerprint of its surroundings;
ends when idle."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import expt
from expt.launch import forkserver, huge_pages, surroundings, warm

PATIENCE_S = 1.0
"""How long a command may take with its request, once it has been let in."""
MAX_DESCRIPTORS = 16


def main(name: str, idle_s: float, ready: int, beside: int | None = None) -> None:
    """Import, let the socket `name` appear, write a byte to `ready`, and serve until nothing was
    asked for `idle_s`.

    `beside` is the pid of the process that drivers are forked from.
    """
    began = time.time_ns()
    for number in signal.SIGINT, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # the forkservers are deaf to them too
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for module in (*forkserver.WORKER_MODULES, *forkserver.SWEEP_MODULES):
        importlib.import_module(module)
    # what is forked from here, and the workers from that, begins and ends sooner
    huge_pages.collapse()
    with warm.listening(name, warm.SERVER) as listener:
        os.write(ready, b"1")
        os.close(ready)
        Server(listener, name, idle_s, Imported(began), beside).serve()


class Imported:
    """The files of all that this process has imported, and of what it has `read`, as they were
    then.
    """

    def __init__(self, began_ns: int, read: Iterable[Path] = ()) -> None:
        found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        archives = filter(os.path.isfile, sys.path)
        self._states = {file: _state(file) for file in (*found, *archives, *map(str, read)) if file}
        self._newer = any(state and state[0] > began_ns for state in self._states.values())

    def is_stale(self) -> bool:
        """Whether one of them has changed since; takes 5 ms for 2,000 files."""
        return self._newer or any(_state(file) != state for file, state in self._states.items())

    def is_shadowed(self, path: Sequence[str], folder: Path) -> bool:
        """Whether a process that imports by `path`, in `folder`, would find another file for one of
        them.
        """
        root = str(Path(expt.__file__).parents[1])  # wherever it stands: it is looked into
        ours = list(dict.fromkeys(entry for entry in sys.path if entry in path and entry != root))
        if ours != list(dict.fromkeys(entry for entry in path if entry in ours)):
            return True
        others = {folder, *(folder / entry for entry in path if entry not in ours)}
        own = [
            index
            for index, entry in enumerate(ours)
            if not (_is_of_packages(entry) or os.path.isfile(entry))
        ]
        return any(map(_shadows, others)) or any(
            _shadows(Path(ours[index]), ours[:index]) for index in own
        )


def exit_code(run: Callable[[], object]) -> int:
    """What an interpreter would exit with that runs this; an exception's traceback is printed."""
    try:
        run()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


class Server:
    """Answers commands, and knows which of them are under way."""

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        idle_s: float,
        imported: Imported,
        beside: int | None = None,
    ) -> None:
        self._listener, self._name, self._idle_s, self._beside = listener, name, idle_s, beside
        self._forked: dict[int, int] = {}  # from a descriptor of the process to its pid
        self._num_forked = 0
        self._last_used = time.monotonic()
        self._parts, self._imported = surroundings.parts(), imported

    def serve(self) -> None:
        """Return when it is idle, or asked to."""
        while self._forked or self._left_s() > 0:
            if self._beside and os.waitpid(self._beside, os.WNOHANG)[0]:  # it was killed
                self._beside = None
            timeout = None if self._forked else self._left_s()
            ready, _, _ = select.select([self._listener.fileno(), *self._forked], [], [], timeout)
            for ended in {*ready} & {*self._forked}:
                os.waitpid(self._forked.pop(ended), 0)
                os.close(ended)
                self._last_used = time.monotonic()
            if self._listener.fileno() in ready and self._attend():
                break
        self._hide()
        if self._beside:
            os.kill(self._beside, signal.SIGCONT)  # it ends by itself, but not while it is stopped

    def _hide(self) -> None:
        for kind in warm.DRIVERS, warm.SERVER:
            warm.hide(self._name, kind)

    def _left_s(self) -> float:
        return self._last_used + self._idle_s - time.monotonic()

    def _attend(self) -> bool:
        """Answer one command; returns whether this is the end."""
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            try:
                return self._answer(connection, json.loads(connection.recv(warm.MAX_BYTES)))
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
            ):  # who asked has gone, or is none of ours
                return False

    def _answer(self, connection: socket.socket, asked: Mapping[str, Any]) -> bool:
        if asked["what"] == "fork":
            stale = self._imported.is_stale()
            ready = not (stale or self._imported.is_shadowed(asked["path"], Path(asked["folder"])))
            tell(connection, ready=ready)
            if ready:
                self._fork(connection, asked["folder"])
            return stale
        if asked["what"] == "keep":
            self._idle_s, self._last_used = float(asked["idle_s"]), time.monotonic()
        if asked["what"] == "stop":
            self._hide()  # before it is told, for who asks looks
        tell(
            connection,
            pid=os.getpid(),
            prefix=sys.prefix,
            mebibytes=_mebibytes("self") + (_mebibytes(self._beside) if self._beside else 0),
            left_s=self._left_s(),
            idle_s=self._idle_s,
            under_way=len(self._forked),
            commands=self._num_forked,
            parts=self._parts,
            stopped=self._beside if self._beside and _is_stopped(self._beside) else None,
        )
        return bool(asked["what"] == "stop")

    def _fork(self, connection: socket.socket, folder: str) -> None:
        message, received, _, _ = socket.recv_fds(connection, warm.MAX_BYTES, MAX_DESCRIPTORS)
        try:
            request = json.loads(message)
            if pid := os.fork():
                self._forked[os.pidfd_open(pid)] = pid
                self._num_forked += 1
                tell(connection, pid=pid)
                return
            self._listener.detach()
            connection.detach()
            _become(request, folder, received)
        finally:
            for descriptor in received:
                os.close(descriptor)


def _become(request: Mapping[str, Any], folder: str, received: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, with only the descriptors that it would have."""
    try:
        place(received, request["descriptors"])
        os.chdir(folder)
        os.umask(request["umask"])
        if request["deaf"]:
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        os.environ.clear()
        os.environ.update(request["env"])
        importlib.invalidate_caches()  # a folder that was not there may be
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    code = exit_code(lambda: exec(request["program"], {"__name__": "__main__"}))
    sys.stderr.flush()
    os._exit(code)


def place(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the descriptors received by these numbers, and no others but the standard ones."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in received]
    close_all_but(moved)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def close_all_but(kept: Collection[int]) -> None:
    """Close every descriptor of this process but these, and the three standard ones."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(descriptor)


def _state(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:  # in a zip file, or gone
        return None
    return found.st_mtime_ns, found.st_size


def _is_of_packages(entry: str) -> bool:
    """Whether what comes or goes there is seen elsewhere, see expt.launch.surroundings, or is
    Python's own.
    """
    installed = (*surroundings.of_packages(), Path(sysconfig.get_path("stdlib")))
    return any(Path(entry).is_relative_to(folder) for folder in installed)


def _shadows(folder: Path, before: Sequence[str] = ()) -> bool:
    """Whether something in it would be imported in the place of what is imported here, if not from
    what is `before`.
    """
    if not folder.is_dir():
        return folder.exists()  # a zip file, which is not looked into
    files = {
        path.name.partition(".")[0]
        for path in folder.iterdir()
        if path.suffix in (".py", ".pyc", ".so")
    }
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    for name in (files | packages) & {*sys.modules} - {"__main__"}:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or not (
            Path(file).is_relative_to(folder) or str(_entry_of(Path(file))) in before
        ):
            return True
    return False


def _entry_of(file: Path) -> Path:
    """The folder of sys.path in which a module or package was found."""
    return file.parents[1] if file.stem == "__init__" else file.parent


def _mebibytes(pid: int | str) -> int:
    """What a process holds of the machine's memory, what it shares with others in part; 0 of one
    that is gone.
    """
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) // 1024
    return 0


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    return False


def tell(connection: socket.socket, **answer: object) -> None:
    """Answer who asks."""
    connection.send(json.dumps(answer).encode())
