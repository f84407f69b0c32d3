"""The process that every worker is forked from, with torch and expt imported.

A program of its own, `python -m expt.launch.forkserver`, and what starts it. The driver asks for a
process by sending one end of a new socket pair; the new process gets its work through that, see
`expt.launch.processes`. The program dies when the driver does: the kernel kills it as soon as a
pipe closes whose other end only the driver has, also in the middle of its imports. Its children
are killed with it.

Free of torch, as the driver is.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import NoReturn

from expt import signals

WORKER_MODULES = ("expt.launch.preload",)
SWEEP_MODULES = ("expt.launch.preload_sweep",)
"""More to import before the first run, where many runs share the forkserver."""
_LIBRARIES = {
    "timm": r"\btimm\b",
    "torchmetrics": r"\btorchmetrics\b",
    "torchvision": r"\btorchvision\b",
    "expt.launch.preload_sharded": r"(?:^| )strategy=(?:\S+,)?(?:fsdp|hsdp)\b",
}


def libraries_in(words: Sequence[str]) -> list[str]:
    """Return the libraries, slow to import, that the words of a command name."""
    return [name for name, pattern in _LIBRARIES.items() if re.search(pattern, " ".join(words))]


def _ignored() -> tuple[signal.Signals, ...]:
    """Signals that reach every process at once, and that the driver answers."""
    return signals.ASKING if signals.in_slurm() else signals.OF_THE_TERMINAL


def launch(control: int, alive: int, modules: Sequence[str]) -> Callable[[], object]:
    """Start the program with these two descriptors; return what waits for its end.

    It has a session of its own, where Ctrl-C does not reach it before it can ignore that, and
    imports from where this process does.
    """
    words = [str(control), str(alive), *modules]
    program = subprocess.Popen(
        [sys.executable, "-m", "expt.launch.forkserver", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        pass_fds=(control, alive),
        start_new_session=True,
    )
    return program.wait


class Server:
    """A running forkserver, as the driver sees it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, control = socket.socketpair()
        alive, self._alive = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ignored())  # until it can ignore them
        try:
            self._wait = launch(control.fileno(), alive, modules)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            control.close()
            os.close(alive)

    def fork(self, line: socket.socket) -> None:
        """Have a process forked that gets this end of a pair. Raises OSError if it is gone."""
        socket.send_fds(self._control, [b"f"], [line.fileno()])

    @property
    def is_gone(self) -> bool:
        """Whether it has died."""
        return bool(wait([self._control], 0))  # it sends nothing, so this is an end

    def kill(self) -> None:
        """End it at once, and all of its workers. It has no state to lose."""
        self.forget()
        self._wait()

    def forget(self) -> None:
        """Close what this process has of it."""
        self._control.close()
        os.close(self._alive)


_server: Server | None = None
_modules: tuple[str, ...] = ()
_lock = threading.Lock()


def warm(extra_modules: Sequence[str] = ()) -> None:
    """Start importing what workers need, in the background, unless that has been started."""
    global _modules
    if _server is None:
        _modules = (*WORKER_MODULES, *extra_modules)
    ensure_running()


def ensure_running() -> Server:
    """Return the forkserver, started anew if it was killed."""
    global _server
    with _lock:
        if _server is not None and _server.is_gone:
            _server.kill()
            _server = None
        if _server is None:
            _server = Server(_modules or WORKER_MODULES)
        return _server


def kill() -> None:
    """End the forkserver at once, if there is one, even in the middle of its imports."""
    global _server
    if _server is not None:
        _server.kill()
    _server = None


def _forget() -> None:
    """In a forked child of the driver: its forkserver dies with the driver only."""
    global _server, _lock
    if _server is not None:
        _server.forget()
    _server, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def main(arguments: Sequence[str]) -> NoReturn:
    """Import the modules, and fork until the driver is gone."""
    for number in _ignored():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ignored())
    control, alive, *modules = arguments
    _die_with(int(alive))
    set_title("expt forkserver")
    gc.disable()  # a fifth of the time goes to it else
    for module in modules:
        # A worker that needs it says what is wrong with it.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # collections in workers pass these objects by, so that their pages stay shared
    gc.enable()
    _serve(socket.socket(fileno=int(control)), int(alive))


def set_title(title: str) -> None:
    """Name this process, for ps and top."""
    import setproctitle  # late: the driver's title is its own

    setproctitle.setproctitle(title)


def _die_with(alive: int) -> None:
    """Have the kernel kill this process as soon as the pipe closes at its other end."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:  # it has closed before
        os._exit(0)


def _serve(control: socket.socket, alive: int) -> NoReturn:
    """Fork a process for each line that comes, and write its exit code there when it has ended."""
    from expt.launch import processes  # late: it imports this module

    server, selector = os.getpid(), selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fd)
                pid, line = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with line, contextlib.suppress(OSError):  # the driver has closed it
                    processes.send(line, ("exit", code))
                os.close(key.fd)
                continue
            message, descriptors, *_ = socket.recv_fds(control, 1, 1)
            if not message:
                os._exit(0)
            line = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                signals.die_with_parent(server)
                for other in [*selector.get_map().values()]:
                    if other.fileobj is not control:
                        os.close(other.fd)
                        other.data[1].close()
                selector.close()
                control.close()
                os.close(alive)
                processes.work_through(line)
            with contextlib.suppress(OSError):
                processes.send(line, ("pid", pid))
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, line))


if __name__ == "__main__":
    main(sys.argv[1:])
