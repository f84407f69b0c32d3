"""The one process that every worker is forked from, with torch and expt imported.

Free of torch itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, util
from typing import Any, TypeAlias

from expt import signals
from expt.machine import usable_cpus

Spawn: TypeAlias = Callable[[Any, Sequence[Any], Sequence[int]], int]

WORKER_MODULES = ("expt.launch.preload",)
SWEEP_MODULES = ("expt.launch.preload_sweep",)
"""More to import before the first run, where many runs share the forkserver."""
_LIBRARIES = {
    "timm": r"\btimm\b",
    "torchmetrics": r"\btorchmetrics\b",
    "torchvision": r"\btorchvision\b",
    "expt.launch.preload_sharded": r"(?:^| )strategy=(?:\S+,)?(?:fsdp|hsdp)\b",
}
_KILLED_WITH_THE_DRIVER = (
    "import fcntl, os, select; fcntl.fcntl({0}, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl({0},"
    " fcntl.F_SETSIG, 9); fcntl.fcntl({0}, fcntl.F_SETFL, fcntl.fcntl({0}, fcntl.F_GETFL) |"
    " os.O_ASYNC); select.select([{0}], [], [], 0)[0] and os._exit(0); "
)
"""Has the kernel kill it as a pipe closes that the driver alone holds open, in the middle of its
imports too: until it
has read what was sent to it, it has the lock of the run. Python's own pipe does not close by then,
as it is sent along. So it dies without a word of what its libraries have left."""
_READS_NOTHING = (
    "import os; nothing = os.open(os.devnull, os.O_RDONLY); os.dup2(nothing, 0); nothing and"
    " os.close(nothing); "
)
"""Workers get nothing of what is typed for the command, which several of them would share, in any
order.
"""
_QUIET_AT_ITS_END = (
    "import atexit, os; atexit.register(lambda me=os.getpid(): me == os.getpid() and os._exit(0)); "
)
"""Where the kernel does not do that: the process ends by itself after its imports, without that
word.
"""
LOADING = "EXPT_LOADING"
"""Environment variable of the forkserver: a descriptor that it closes once it has loaded torch's
libraries. One that
was forked with them closes it at once."""
_TELLS = (
    "import os, sys; os.close({0}) if 'torch' in sys.modules else"
    f" os.environ.update({LOADING}='{{0}}'); "
)
_LONGEST_LOAD_S = 1.0


def libraries_in(words: Sequence[str]) -> list[str]:
    """The libraries, slow to import, that a command asks for: to import them once and not in each
    worker.
    """
    return [name for name, pattern in _LIBRARIES.items() if re.search(pattern, " ".join(words))]


def warm(extra_modules: Sequence[str] = ()) -> None:
    """Start importing what a worker needs, in the background; returns at once.

    Later calls do nothing.
    """
    multiprocessing.set_forkserver_preload([*WORKER_MODULES, *extra_modules])
    ensure_running()


def leave_it_both_cores() -> None:
    """Wait, on a machine of two, until the forkserver has loaded torch's libraries while it
    imports, on a core each.

    Nothing that this process has to do is due before all is imported."""
    if _loading is not None and usable_cpus() <= 2:
        select.select([_loading], [], [], _LONGEST_LOAD_S)


def ensure_running() -> int | None:
    """Start it, also anew where it was killed; returns its pid, None where that cannot be known."""
    with _heard_later():
        _start()
    return _pid()


@contextlib.contextmanager
def _heard_later() -> Iterator[None]:
    """While entered, what a person asks by a signal waits: nothing half made is interrupted, and
    nothing is lost.
    """
    kept = list[int]()
    in_main = (
        threading.current_thread() is threading.main_thread()
    )  # else Python lets nobody change that
    numbers = _reaching_all() if in_main else ()
    previous = {
        number: signal.signal(number, lambda got, _: kept.append(got)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for each in kept:
        signal.raise_signal(each)


def _reaching_all() -> tuple[signal.Signals, ...]:
    """What reaches every process at once, and the driver answers: the forkserver and workers ignore
    it from birth.
    """
    return signals.ASKING if signals.in_slurm() else signals.OF_THE_TERMINAL


def is_gone(pid: int | None, within_s: float = 0.0) -> bool:
    """Whether the one with this pid, of `ensure_running`, has died, or does so; its workers die
    with it.
    """
    deadline = time.monotonic() + within_s
    with contextlib.suppress(ChildProcessError):  # there is another already
        while pid is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if pid is None or time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
    return True


def kill() -> None:
    """End the forkserver at once, even in the middle of its imports. It has no state to lose.

    By names that are Python's own: where a version has none of them, the forkserver ends by itself
    with this process."""
    pid, stop = _pid(), getattr(getattr(forkserver, "_forkserver", None), "_stop", None)
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    if stop is not None:
        stop()


def _start() -> None:
    """Start a Python, where none runs."""
    if hasattr(util, "spawnv_passfds"):
        with _spawned(_deaf_from_birth):
            forkserver.ensure_running()
    else:  # a Python that names its parts otherwise
        forkserver.ensure_running()


def _deaf_from_birth(spawn: Spawn, command: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Start a Python that never hears what reaches all: it is blocked until the program's first
    line ignores it.
    """
    *options, program = command
    numbers = [int(number) for number in _reaching_all()]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    before = [int(number) for number in mask]
    deaf = (
        f"import signal; [signal.signal(number, signal.SIG_IGN) for number in {numbers}]; "
        f"signal.pthread_sigmask(signal.SIG_SETMASK, {before}); "
    )
    loads = _heard_when_loaded()
    try:
        return spawn(
            command[0], [*options, deaf + _TELLS.format(loads) + program], [*descriptors, loads]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(loads)


_loading: int | None = None
"""A pipe that is closed at its other end as the forkserver has loaded torch's libraries."""


def _heard_when_loaded() -> int:
    """The end for it, of a new pipe of which this process keeps the other."""
    global _loading
    if _loading is not None:
        os.close(_loading)
    _loading, loads = os.pipe()
    return loads


@contextlib.contextmanager
def _spawned(how: Callable[[Spawn, Sequence[Any], Sequence[int]], int]) -> Iterator[None]:
    """While entered, Python starts its forkserver in this way."""
    real = util.spawnv_passfds

    def spawn(path: Any, command: Sequence[Any], descriptors: Sequence[int]) -> int:
        if "forkserver" not in str(command[-1]):  # Python's tracker of shared memory
            return real(path, command, descriptors)
        *options, program = command
        ends = _held_open()
        try:
            first = (
                _KILLED_WITH_THE_DRIVER.format(ends)
                if hasattr(fcntl, "F_SETSIG")
                else _QUIET_AT_ITS_END
            )
            if 0 not in (
                *descriptors,
                ends,
            ):  # a command whose stdin is closed may have any of these there
                first = _READS_NOTHING + first
            return how(real, [*options, first + program], [*descriptors, ends])
        finally:
            os.close(ends)

    util.spawnv_passfds = spawn  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = real


_held: int | None = None


def _held_open() -> int:
    """The end to be read of a new pipe, of which this process keeps the other."""
    global _held
    if _held is not None:  # of a forkserver that is gone
        os.close(_held)
    ends, _held = os.pipe()
    return ends


def _pid() -> int | None:
    server: Any = getattr(forkserver, "_forkserver", None)
    pid: int | None = getattr(server, "_forkserver_pid", None)
    return pid
