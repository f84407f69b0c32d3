"""`python -m expt` without its seconds of imports: forked from a process that has made them all.

What comes of it is what a person gets: a process in a session of its own, with its arguments,
folder, environment and streams, whose forkserver and workers are its descendants. Only the two
interpreters' starts are left out."""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import setproctitle

from expt.config import own_code
from expt.config.parse import parse
from expt.launch import forkserver
from expt.machine import Machine
from expt.runs import provenance, result
from tests import on_cards, soft_gpu
from tests.composing import composed, know_keys, share

FOLDER = "EXPT_TEST_TEMPLATES"
"""The variable that says where the processes listen that commands are forked from."""
CARDS = "cards"
"""The folder in it of those with soft GPUs, if this process has none."""
PRELOADED = (
    *forkserver.WORKER_MODULES, *forkserver.SWEEP_MODULES, "hydra.main", "rich.live",
    "rich._emoji_codes",
)  # fmt: skip
LIBRARIES = ("timm", "torchmetrics", "expt.launch.preload:for_sharding")
"""What few commands need, forked from a process of their own: these add half and more to what a
fork copies.
"""
_HAS_CARDS = soft_gpu.is_preloaded(os.environ)
"""Whether all commands have soft GPUs, as this process does."""


class Command:
    """A command under way, or a program, with the needed methods of subprocess.Popen."""

    def __init__(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], program: str = ""
    ) -> None:
        self.args = [sys.executable, *(("-c", program) if program else ("-m", "expt")), *arguments]
        self.returncode: int | None = None
        self._streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._told, told = socket.socketpair()
        with told:
            libraries = any(forkserver.libraries_in(arguments))
            _ask(env, libraries, told.fileno(), *self._streams)
        more = {"arguments": arguments, "cwd": str(cwd), "env": dict(env), "program": program}
        self.pid = _begun(self._told, descriptors=(1, 2), **more)
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
            self.returncode = _number(self._told)
            self._told.close()
        return self.returncode


def launch(control: int, alive: int, modules: Sequence[str]) -> Callable[[], object]:
    """As expt.launch.forkserver.launch: for the process that tests, and that only."""
    ours, told = socket.socketpair()
    numbers = (1, 2, control, alive)
    with ours:
        with told:
            _ask(os.environ, False, told.fileno(), *numbers)
        serves = [str(control), str(alive), *modules]
        _begun(ours, descriptors=numbers, serves=serves, cwd=os.getcwd(), env=dict(os.environ))
    return lambda: None


def _launch_here(control: int, alive: int, modules: Sequence[str]) -> Callable[[], object]:
    """As expt.launch.forkserver.launch: for a command, which has all imports of its forkserver."""
    if pid := os.fork():
        return lambda: os.waitpid(pid, 0)
    os.setsid()
    close_all_but((control, alive))
    _become_forkserver([str(control), str(alive), *modules])


def _become_forkserver(arguments: Sequence[str]) -> NoReturn:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        forkserver.main(arguments)
    finally:
        os._exit(1)


def _begun(told: socket.socket, **request: Any) -> int:
    """The pid of what is asked for."""
    text = json.dumps(request).encode()
    told.sendall(len(text).to_bytes(8, "big") + text)
    return _number(told)


def _number(told: socket.socket) -> int:
    return int.from_bytes(told.recv(8), "big", signed=True)


@functools.cache
def shared() -> str:
    """Make the folder of this process and its commands, where what Hydra composes is kept."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    share(folder)
    return folder


def start_template() -> None:
    """Start the process that this process's commands are forked from; it ends with it."""
    os.environ[FOLDER] = folder = shared()
    ends, alive = os.pipe()
    with contextlib.ExitStack() as stack:
        passed = [ends]
        os.mkdir(f"{folder}/{CARDS}")
        for name in ("plain", "libraries", f"{CARDS}/plain", f"{CARDS}/libraries"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{name}")
            listener.listen(64)  # who asks before the imports are made waits
            passed.append(listener.fileno())
        template = _start_serving(passed, os.environ)
    os.close(ends)
    atexit.register(template.wait)
    atexit.register(os.close, alive)  # earlier: it asks for the end


def templates() -> str:
    """Return the folder where processes listen that commands are forked from."""
    if FOLDER not in os.environ:
        start_template()
    return os.environ[FOLDER]


def _start_serving(passed: Sequence[int], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.warm", *map(str, passed)]
    nothing, root = subprocess.DEVNULL, Path(__file__).parents[1]
    return subprocess.Popen(command, cwd=root, env=env, stdin=nothing, pass_fds=passed)


def _ask(env: Mapping[str, str], libraries: bool, *descriptors: int) -> None:
    """Send the template of such commands what one of them talks through."""
    cards = soft_gpu.is_preloaded(env) and not _HAS_CARDS
    name = "libraries" if libraries else "plain"
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"{templates()}/{f'{CARDS}/{name}' if cards else name}")
        socket.send_fds(line, [b"?"], descriptors)


def _import(modules: Iterable[str], use: Callable[[], object] = lambda: None) -> None:
    gc.disable()
    for module in modules:
        forkserver.load(module)
    use()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        # torch takes its operators down in 40 ms, and a command has not imported it
        finalizer.atexit = False
    collapse()
    gc.freeze()  # or each command would look for garbage among all that, and have its memory copied
    gc.enable()


def count_as_own(module: ModuleType, own: bool) -> None:
    """Have a module count as custom code of this process's runs, or not.

    Each run looks through all custom code, and the suite has 200 modules that no run uses."""
    assert module.__spec__
    module.__spec__.has_location = own


def collapse() -> None:
    """Have the kernel put what this process has written into pages of 2 MiB, as far as it can.

    A fork then copies a few hundred entries of the page table in place of 100,000."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    size, collapse = 2**21, 25  # MADV_COLLAPSE, of Linux 6.1; others refuse it
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(each, 16) for each in ends.split("-"))
            for address in range(-(-begin // size) * size, end - size + 1, size):
                madvise(address, size, collapse)


def _serve(ends: int, plain: int, with_libraries: int, *cards: int) -> None:
    """Serve requests: become a command in a child, or start a template with libraries or cards."""
    share(os.environ[FOLDER])
    setproctitle.getproctitle()  # it finds its place before the environment is another's
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        signal.signal(number, usual)  # who starts this may be deaf to them, as a forkserver is
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    packages = map(_modules, ("expt", "hydra._internal.core_plugins", "hydra_plugins"))
    _import((*PRELOADED, *itertools.chain(*packages)), _use_once)
    on_cards.fill_auto()
    for name in own_code.own_files():
        count_as_own(sys.modules[name], False)
    listeners, under_way = [plain, with_libraries, *cards], dict[int, tuple[int, int]]()
    while ends not in (ready := {*select.select([*listeners, ends, *under_way], [], [])[0]}):
        for ended in ready & {*under_way}:
            _tell_end(ended, *under_way.pop(ended))
        if plain in ready:
            _fork_command(plain, under_way)
        elif with_libraries in ready:
            listeners.remove(with_libraries)
            if os.fork() == 0:
                _import(LIBRARIES)
                listeners, plain, under_way = [with_libraries], with_libraries, {}
        elif not ready.isdisjoint(cards):
            listeners = [plain, *({with_libraries} & {*listeners})]
            _start_serving([ends, *cards], {**os.environ, "LD_PRELOAD": soft_gpu.preload()})


def prepare() -> None:
    """Import and do once what each fork of this process would."""
    for module in (*PRELOADED, "torch._dynamo"):
        forkserver.load(module)
    _use_once()


def _use_once() -> None:
    """Do what every command does first: much is made at its first use."""
    provenance.imported_versions()
    know_keys()
    for words in ((), ("model=mlp", "model.hidden=[8]", "optimizer.lr=0.1", "epochs=1")):
        parse(composed(*words), Machine(gpus=(), cpus=2))
    result.as_written()
    provenance.versions()


def _fork_command(listener: int, under_way: dict[int, tuple[int, int]]) -> None:
    """Become the command, in a child; note its handle, with its pid and whom to tell."""
    with socket.socket(fileno=os.dup(listener)) as asked, asked.accept()[0] as line:
        _, (told, *passed), *_ = socket.recv_fds(line, 1, 16)
    if (pid := os.fork()) == 0:
        _become(told, passed)
    for descriptor in passed:
        os.close(descriptor)
    under_way[os.pidfd_open(pid)] = pid, told


def _tell_end(handle: int, pid: int, told: int) -> None:
    """Tell who has asked for the command, if it is still there, how that has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(handle)
    with socket.socket(fileno=told) as teller, contextlib.suppress(OSError):
        teller.sendall(code.to_bytes(8, "big", signed=True))


def _modules(package: str) -> list[str]:
    """The names of all modules in `package`, but those that are commands, or LIBRARIES."""
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    return [
        module.name
        for module in found
        if not module.name.endswith("__main__") and module.name not in LIBRARIES
    ]


def _become(told: int, passed: Sequence[int]) -> NoReturn:
    """Become the requested command, with its descriptors only, by their numbers."""
    os.setsid()
    with socket.socket(fileno=told) as teller, teller.makefile("rb") as asked:
        teller.sendall(os.getpid().to_bytes(8, "big", signed=True))
        request = json.loads(asked.read(int.from_bytes(asked.read(8), "big")))
    place(passed, request["descriptors"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if serves := request.get("serves"):
        _become_forkserver(serves)
    _run(request["arguments"], request["cwd"], request["program"])


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


def _run(arguments: list[str], cwd: str, program: str) -> NoReturn:
    sys.path[0] = cwd
    sys.argv = ["-c" if program else "-m", *arguments]
    forkserver.launch = _launch_here
    code: object = 1
    try:
        if program:
            exec(program, {"__name__": "__main__"})
        else:
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


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
    os._exit(0)  # to take torch down takes two seconds
