"""`python -m expt` without its seconds of imports: forked from a process that has made them all, and done nothing else.

What comes of it is what a person gets: a process in a session of its own, with its arguments, folder, environment and
streams, whose forkserver and workers are its descendants. Only the two interpreters' starts are left out.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from expt.launch import forkserver
from expt.launch.warm_server import close_all_but

ADDRESS = "EXPT_TEST_TEMPLATE"
"""The variable that says where the process listens that commands are forked from."""
PRELOADED = (*forkserver.WORKER_MODULES, *forkserver.SWEEP_MODULES, "hydra.main", "rich.live", "timm", "torchmetrics")


class Command:
    """A command under way, with what a test needs of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.args = [sys.executable, "-m", "expt", *arguments]
        self.returncode: int | None = None
        self._streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._told, told = socket.socketpair()
        with told:
            _ask(told.fileno(), *self._streams)
        request = json.dumps({"arguments": arguments, "cwd": str(cwd), "env": dict(env)}).encode()
        self._told.sendall(len(request).to_bytes(8, "big") + request)
        self.pid = self._number()
        weakref.finalize(self, self._told.close)  # of one that a failed test has not waited for

    def poll(self) -> int | None:
        """The exit code, -N of a command that signal N ended; None while it is under way."""
        return self._wait(0)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it has printed."""
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        texts = []
        for stream in self._streams:
            with open(stream, encoding="utf-8") as file:
                file.seek(0)
                texts.append(file.read())
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            self.returncode = self._number()
            self._told.close()
        return self.returncode

    def _number(self) -> int:
        return int.from_bytes(self._told.recv(8), "big", signed=True)


def start_template() -> None:
    """Start the process that commands are forked from, for all that this process starts; it ends with it."""
    folder = tempfile.mkdtemp()
    os.environ[ADDRESS] = f"{folder}/socket"
    ends, alive = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen(64)  # who asks before the imports are made waits
        passed = (listener.fileno(), ends)
        command = [sys.executable, "-m", "tests.warm", *map(str, passed)]
        root = Path(__file__).parents[1]
        template = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, pass_fds=passed)
    os.close(ends)
    atexit.register(shutil.rmtree, folder)
    atexit.register(template.wait)
    atexit.register(os.close, alive)  # earlier: it asks for the end


def _ask(*descriptors: int) -> None:
    """Send the template what a command talks through."""
    if ADDRESS not in os.environ:
        start_template()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ[ADDRESS])
        socket.send_fds(line, [b"?"], descriptors)


def _serve(listener: socket.socket, ends: int) -> None:
    """Become each command that is asked for, in a child; returns in the children alone, and at the end."""
    packages = map(_modules, ("expt", "hydra._internal.core_plugins", "hydra_plugins"))
    for module in (*PRELOADED, *itertools.chain(*packages)):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that attend
    while ends not in select.select([listener.fileno(), ends], [], [])[0]:
        line, _ = listener.accept()
        with line:
            _, descriptors, *_ = socket.recv_fds(line, 1, 3)
        if os.fork() == 0:
            listener.close()
            os.close(ends)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(*descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _modules(package: str) -> list[str]:
    """The names of all modules in `package`, but those that are commands."""
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    return [module.name for module in found if not module.name.endswith("__main__")]


def _attend(told: int, out: int, err: int) -> None:
    """Fork again: the child is the command, its parent tells how it ends."""
    with socket.socket(fileno=told) as teller, teller.makefile("rb") as asked:
        request = json.loads(asked.read(int.from_bytes(asked.read(8), "big")))
        if pid := os.fork():
            teller.sendall(pid.to_bytes(8, "big", signed=True))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            teller.sendall(code.to_bytes(8, "big", signed=True))
            os._exit(0)
    os.setsid()
    for number, stream in enumerate((out, err), 1):
        os.dup2(stream, number)
        os.close(stream)
    _become(**request)


def _become(arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[0] = cwd
    sys.argv = ["-m", *arguments]
    util.spawnv_passfds = _fork_forkserver  # type: ignore[assignment]
    code: object = 1
    try:
        runpy.run_module("expt", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)  # to take torch down takes two seconds


_spawn = util.spawnv_passfds


def _fork_forkserver(path: Any, command: Sequence[Any], fds: Sequence[int]) -> int:
    """What starts a forkserver: a child that has all it would import, and only the descriptors that it would have."""
    program = str(command[-1])
    if "forkserver" not in program:
        return _spawn(path, command, fds)
    if pid := os.fork():
        return pid
    try:
        close_all_but(fds)
        exec(program, {})
    finally:
        os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
