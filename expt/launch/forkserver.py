"""The process that every worker is forked from, with torch and expt imported.

The driver starts it, and asks for a process by sending one end of a new socket pair. The new
process says its pid there, gets its work and says when it is done; the forkserver adds its exit
code. The forkserver dies when the driver does: the kernel kills it as soon as a pipe closes whose
other end only the driver has, also in the middle of its imports. Its children are killed with it.

Free of torch, as the driver is.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import pickle
import pkgutil
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from expt import machine, signals
from expt.errors import RunFailed

WORKER_MODULES = ("expt.launch.preload:for_all",)
SWEEP_MODULES = ("expt.launch.preload:for_sweep",)
"""More modules to load before the first run, if many runs share the forkserver."""
_LIBRARIES = {
    "timm": r"\btimm\b",
    "torchmetrics": r"\btorchmetrics\b",
    "torchvision": r"\btorchvision\b",
    "expt.launch.preload:for_transformers": r"\bmodel=\S*\btransformers\b",
    "peft": r"\bmodel[.]lora[.]rank=",
    "expt.launch.preload:for_sharding": r"(?:^| )strategy=(?:\S+,)?(?:fsdp|hsdp)\b",
}
FINISHED = 93
"""The exit code of a process that has done its work; any other has failed, with 0 too."""


def libraries_in(words: Sequence[str]) -> list[str]:
    """Return the libraries, slow to import, that the words of a command name."""
    return [name for name, pattern in _LIBRARIES.items() if re.search(pattern, " ".join(words))]


def _ignored() -> tuple[signal.Signals, ...]:
    return signals.ASKING if signals.in_slurm() else signals.OF_THE_TERMINAL


def launch(control: int, alive: int, modules: Sequence[str]) -> Callable[[], object]:
    """Start the program with these two descriptors; return a function that waits for its end.

    It has a session of its own, where Ctrl-C does not reach it before it can ignore that, and
    imports from where this process does. The order of a set is the same in all commands.
    """
    program = "import sys; from expt.launch import forkserver; forkserver.main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(control), str(alive), *modules],
        env={"PYTHONHASHSEED": "0", **machine.for_child()},
        stdin=subprocess.DEVNULL,
        pass_fds=(control, alive),
        start_new_session=True,
    )
    return process.wait


class Server:
    """A running forkserver, as the driver sees it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.control, control = socket.socketpair()
        """Send it one end of a pair with any byte, and it forks a process that reads there."""
        alive, self._alive = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ignored())  # until it can ignore them
        try:
            self._wait = launch(control.fileno(), alive, modules)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            control.close()
            os.close(alive)

    @property
    def is_gone(self) -> bool:
        """True if the forkserver has died."""
        return bool(wait([self.control], 0))  # it sends nothing, so this is an end

    def kill(self) -> None:
        """End the forkserver and all of its workers at once; it has no state to lose."""
        self.forget()
        self._wait()

    def forget(self) -> None:
        """Close this process's ends of the sockets."""
        self.control.close()
        os.close(self._alive)


_server: Server | None = None
_modules: tuple[str, ...] = ()
_lock = threading.Lock()


def warm(extra_modules: Sequence[str] = ()) -> None:
    """Start importing workers' modules, in the background, unless that has been started."""
    global _modules
    if _server is None:
        _modules = (*WORKER_MODULES, *extra_modules)
    ensure_running()


def ensure_running() -> Server:
    """Return the forkserver; start it again if it was killed."""
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
    """Forget the forkserver in a forked child of the driver: it dies with the driver only."""
    global _server, _lock
    if _server is not None:
        _server.forget()
    _server, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def main(arguments: Sequence[str]) -> NoReturn:
    """Load the modules, and fork until the driver is gone."""
    for number in _ignored():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ignored())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no exit code is kept
    control, alive, *modules = arguments
    _die_with(int(alive))
    set_title(f"expt forkserver of {os.getppid()}")
    gc.disable()  # a fifth of the time goes to it else
    for module in modules:
        # A worker that needs it reports its error.
        with contextlib.suppress(Exception):
            load(module)
    gc.freeze()  # collections in workers pass these objects by, so that their pages stay shared
    gc.enable()
    _serve(socket.socket(fileno=int(control)), int(alive))


def load(name: str) -> None:
    """Import a module, or call a function named as `package.module:function`."""
    found = pkgutil.resolve_name(name if ":" in name else f"{name}:")
    if callable(found):
        found()


def set_title(title: str) -> None:
    """Name this process, for ps and top."""
    import setproctitle  # late: the driver's title is its own

    setproctitle.setproctitle(title)


def _die_with(alive: int) -> None:
    """Have the kernel kill this process as soon as the pipe closes at its other end."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()  # select takes no descriptor from 1024 on
    closed.register(alive)
    if closed.poll(0):  # before
        os._exit(0)


def _serve(control: socket.socket, alive: int) -> NoReturn:
    """Fork a process for each line that comes, and write its exit code there when it has ended."""
    server, selector = os.getpid(), selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fd)
                pid, line = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with line, contextlib.suppress(OSError):  # the driver has closed it
                    line.send(("exit", code))
                os.close(key.fd)
                continue
            message, descriptors, *_ = socket.recv_fds(control, 1, 1)
            if not message:
                os._exit(0)
            if not descriptors:  # too many are open, and the kernel has closed it
                continue
            line = Connection(descriptors[0])
            try:
                room = os.dup(line.fileno())  # for the descriptor of the process
                try:
                    pid = os.fork()
                finally:
                    os.close(room)
            except OSError as error:  # a limit, which is no reason to end all others
                with line, contextlib.suppress(OSError):
                    why = f"{error.strerror}; a limit (ulimit -u, ulimit -n), or of memory"
                    line.send(("raised", RunFailed(f"no process can be started: {why}")))
                continue
            if pid == 0:
                signals.note_driven()
                signals.die_with_parent(server)
                for other in [*selector.get_map().values()]:
                    if other.fileobj is not control:
                        os.close(other.fd)
                        other.data[1].close()
                selector.close()
                control.close()
                os.close(alive)
                _work_through(line)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, line))


class Kept(NamedTuple):
    """A descriptor that stays open in one process, and not in those that it forks."""

    descriptor: int


def keep_open(descriptor: int) -> Kept:
    """Keep a descriptor open in this process, and closed in those that it forks."""
    open_here = [descriptor]

    def close() -> None:
        while open_here:  # a child's children find it closed
            os.close(open_here.pop())

    os.register_at_fork(after_in_child=close)
    return Kept(descriptor)


class Work(NamedTuple):
    """The work of a process: call `function`, named as `package.module:name`, print to files."""

    function: str
    arguments: Sequence[Any]
    env: Mapping[str, str]
    """Added to this process's environment."""
    stdout: Path
    stderr: Path
    kept: Sequence[Kept] = ()
    title: str = "expt worker"
    frees_at_end: bool = False
    """True if it is finished only once it is gone, since others wait for the memory it frees."""


class Surroundings(NamedTuple):
    """The driver's environment, paths and folder, which a new process takes over."""

    env: Mapping[str, str]
    path: Sequence[str]
    argv: Sequence[str]
    folder: str
    umask: int


def print_to(stdout: Path, stderr: Path) -> None:
    """Let this process print to the ends of these files from now on, C and C++ code too.

    Raises OSError, with nothing changed, where one of them can't be written.
    """
    with stdout.open("ab") as out, stderr.open("ab") as err:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)


def _work_through(line: Connection) -> NoReturn:
    """Receive work by the line, do it in this process, and end the process."""
    code = 1
    try:
        with contextlib.suppress(OSError):  # the driver has closed it
            # Only here: who knows this process may count on its death with the forkserver.
            line.send(("pid", os.getpid()))
        os.register_at_fork(after_in_child=line.close)  # else its end would not be seen
        set_title("expt worker")
        try:
            work, surroundings = _Unpacker(line).load()
        except EOFError:  # the driver has no work for it
            os._exit(0)
        set_title(work.title)
        os.umask(surroundings.umask)
        with contextlib.suppress(OSError):  # a folder that is gone
            os.chdir(surroundings.folder)
        os.environ.clear()
        os.environ.update(surroundings.env)
        sys.path[:], sys.argv[:] = surroundings.path, surroundings.argv
        try:
            print_to(work.stdout, work.stderr)
        except OSError:  # the driver sees that the folder is gone, or that its disk is full
            os._exit(code)
        # a worker that is killed leaves its lines
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        found = pkgutil.resolve_name(work.function)(*work.arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        line.send(("done", found))
        code = FINISHED
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):  # one that can't be sent
            line.send(("raised", error))
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
            util._exit_function()  # type: ignore[attr-defined]  # ends the loaders' processes
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Packer(pickle.Pickler):
    """A pickler that leaves sockets and descriptors to the kernel, and names their kinds."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.descriptors = list[int]()
        """Those to send after the pickle."""

    def persistent_id(self, found: Any) -> str | None:
        """Accept a file descriptor or an object with `fileno()`."""
        if isinstance(found, socket.socket | Kept):
            number = found.fileno() if isinstance(found, socket.socket) else found.descriptor
            self.descriptors.append(number)
            return type(found).__name__
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, line: Connection) -> None:
        super().__init__(io.BytesIO(line.recv_bytes()))
        self._line = line

    def persistent_load(self, kind: str) -> Any:
        number = reduction.recv_handle(self._line)  # they come in the order in which they were sent
        os.set_inheritable(number, False)
        return keep_open(number) if kind == Kept.__name__ else socket.socket(fileno=number)
