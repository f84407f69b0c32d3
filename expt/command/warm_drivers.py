"""The second process of `expt warm`: it has what a driver imports, and no torch; commands are
forked from it.

It lives as long as the warm server, and until its drivers have ended. Each of them is killed as
soon as the process that stands in for it where it was typed is gone: by the kernel, for it may be
stopped, and this process gone."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from expt.command import hand_over
from expt.launch import warm, warm_server
from expt.launch.warm_server import Imported, close_all_but

MODULES = (
    *(
        "expt.__main__",
        "expt.command.command_line",
        "expt.command.main",
        "expt.command.sweep",
        "expt.launch.one_run",
    ),
    "expt.runs.view.summary",
)
WORDS = ("model=mlp", "epochs=2", "optimizer.lr=0.1", "batch_size=64", "world_size=1", "gpus=0")
"""Such as are typed."""
MAX_DESCRIPTORS = hand_over.MOST_DESCRIPTORS + 1
UNPRINTED = 120
"""Python's exit code where what was printed last could not be written."""


def main(name: str, idle_s: float, ready: int) -> None:
    """Be the warm server, beside such a process; see expt.launch.warm_server."""
    ends, alive = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(alive)
            _serve(name, ends, ready)
        finally:
            os._exit(0)
    os.close(ends)
    warm_server.main(name, idle_s, ready, beside=pid)


def _serve(name: str, ends: int, ready: int) -> None:
    """Import, let its socket appear, close `ready`, and fork until `ends` is closed at its other
    end.
    """
    began = time.time_ns()
    for number in signal.SIGINT, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
    plugins = _plugins()
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    read = _used_once()
    gc.freeze()  # a driver's collections pass these objects by: their pages stay shared
    gc.enable()
    with warm.listening(name, warm.DRIVERS) as listener:
        os.close(ready)
        Drivers(listener.detach(), ends, name, Imported(began, read), plugins).serve()


def _used_once() -> list[Path]:
    """Do what every driver does first, for much is made at its first use; returns the files that
    were read for it.
    """
    from expt.command import composing, hydra_composing, overrides
    from expt.command.arguments import readable
    from expt.config.parse import parse, plain
    from expt.machine import Machine
    from expt.runs.result import as_written

    overrides.register_resolvers()
    read = hydra_composing.keep_what_is_shipped()
    composed = composing.composed_alone(readable(WORDS), None)
    parse(plain(composed), Machine(cpus=1))
    as_written()
    return read


class Drivers:
    """Forks them, and tells who stands in for each how it has ended."""

    def __init__(
        self, listener: int, ends: int, name: str, imported: Imported, plugins: object
    ) -> None:
        self._asked: tuple[int, ...] = (
            listener,
            ends,
        )  # by number: in a driver they mean something else
        self._name, self._imported, self._plugins = name, imported, plugins
        self._forked: dict[
            int, tuple[int, int]
        ] = {}  # from a descriptor of the process to its pid and the line

    def serve(self) -> None:
        """Return when the warm server is gone, and all drivers are."""
        while self._asked or self._forked:
            ready, _, _ = select.select([*self._asked, *self._forked], [], [])
            for ended in {*ready} & {*self._forked}:
                self._tell_end(ended)
            if self._asked and self._asked[1] in ready:
                warm.hide(self._name, warm.DRIVERS)
                for descriptor in self._asked:
                    os.close(descriptor)
                self._asked = ()
            elif self._asked and self._asked[0] in ready:
                self._attend()

    def _tell_end(self, ended: int) -> None:
        pid, line = self._forked.pop(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # it has gone
            os.write(line, json.dumps({"code": code}).encode())
        os.close(line)
        os.close(ended)

    def _attend(self) -> None:
        with socket.socket(fileno=os.dup(self._asked[0])) as listener:
            connection, _ = listener.accept()
        with (
            connection,
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
        ):  # who asked has gone
            connection.settimeout(warm_server.PATIENCE_S)
            asked = json.loads(connection.recv(warm.MAX_BYTES))
            path, there = asked["path"], Path(asked["folder"])
            stale = self._imported.is_stale() or self._imported.is_shadowed(path, there)
            ready = not (stale or _brings_plugins(path, there, self._plugins))
            warm_server.tell(connection, ready=ready)
            if ready:
                self._fork(connection, asked["folder"], path)

    def _fork(self, connection: socket.socket, folder: str, path: list[str]) -> None:
        message, received, _, _ = socket.recv_fds(connection, warm.MAX_BYTES, MAX_DESCRIPTORS)
        try:
            request = json.loads(message)
            mask = signal.pthread_sigmask(
                signal.SIG_BLOCK, hand_over.PASSED_ON
            )  # until it can answer them
            if pid := os.fork():
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                self._forked[os.pidfd_open(pid)] = pid, os.dup(connection.fileno())
                return
            connection.setblocking(True)
            _become(request, folder, path, received, connection.detach(), self._name, mask)
        finally:
            for descriptor in received:
                os.close(descriptor)


def _plugins() -> list[tuple[str, int, int]]:
    """The files in which Hydra looks for plugins here."""
    files = [file for entry in sys.path for file in Path(entry, "hydra_plugins").rglob("*.py")]
    return sorted(
        (str(file), found.st_mtime_ns, found.st_size) for file in files for found in [file.stat()]
    )


def _brings_plugins(path: Sequence[str], folder: Path, known: object) -> bool:
    """Whether Hydra would find plugins there that it has not found here, where it has found those
    `known`.
    """
    others = {folder, *(folder / entry for entry in path)} - {*map(Path, sys.path)}
    return any((other / "hydra_plugins").exists() for other in others) or _plugins() != known


def _become(
    request: Mapping[str, Any],
    folder: str,
    path: list[str],
    received: Sequence[int],
    line: int,
    name: str,
    mask: Iterable[int],
) -> NoReturn:
    """Be the driver that was asked for, as a new interpreter would; end without a word where that
    cannot be.
    """
    code = 1
    try:
        line = _placed(received, request["descriptors"], line)
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(request["env"])
        warm.know(name)
        _interpreter_of(request, path)
        _die_with(request["descriptors"][-1])
        socket.send_fds(socket.socket(fileno=os.dup(line)), [b"{}"], [os.pidfd_open(os.getpid())])
        _signals_of(request["deaf"], mask)
        code = _exit_code(lambda: sys.modules["__main__"].drive(request["typed_at"]))
        with contextlib.suppress(OSError):  # should the process be killed that it was forked from
            os.write(line, json.dumps({"code": code}).encode())
    finally:
        os._exit(code)


def _placed(received: Sequence[int], numbers: Sequence[int], line: int) -> int:
    """Have the descriptors received by their numbers, and no others but the standard ones and the
    line.
    """
    above = max(numbers) + 1
    line = fcntl.fcntl(line, fcntl.F_DUPFD_CLOEXEC, above)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    close_all_but([line, *moved])
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=number != numbers[-1])
        os.close(descriptor)
    return line


def _interpreter_of(request: Mapping[str, Any], path: Sequence[str]) -> None:
    """Let Python's own state be that of the process which asked."""
    sys.argv[:], sys.orig_argv[:], sys.path[:] = request["arguments"], request["typed"], path
    importlib.invalidate_caches()  # a folder that was not there may be
    sys.modules["__main__"] = importlib.import_module("expt.__main__")
    time.tzset()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _opened(number, f"<{name}>", getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _opened(number: int, name: str, as_before: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard stream as Python opens it: what `as_before` knows of its file, as that it can
    seek, is of another.
    """
    mode, at_once = "w" if number else "r", as_before.write_through  # PYTHONUNBUFFERED
    file = open(number, f"{mode}b", buffering=0 if at_once and number else -1, closefd=False)  # noqa: SIM115
    raw: Any = getattr(file, "raw", file)
    raw.name = name
    stream = io.TextIOWrapper(
        file,
        as_before.encoding,
        as_before.errors,
        newline="\n" if number else None,
        line_buffering=not at_once and (number == 2 or file.isatty()),
        write_through=at_once,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def _die_with(ends: int) -> None:
    """Let the kernel kill this process as the other end of the pipe is closed, which only that
    which asked has.
    """
    fcntl.fcntl(ends, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(ends, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(ends, fcntl.F_SETFL, fcntl.fcntl(ends, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([ends], [], [], 0)[0]:
        os._exit(1)  # it has gone, or waits no longer


def _signals_of(deaf: Sequence[int], mask: Iterable[int]) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # as a command that has just been typed, see expt.__main__
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in deaf:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _exit_code(run: Callable[[], object]) -> int:
    """What Python would exit with after `run`: with its threads ended, and all printed.

    It takes nothing down.
    """
    code = warm_server.exit_code(run)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = UNPRINTED
    return code
