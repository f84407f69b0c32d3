"""Signals that ask a run to stop, kept until it can; and processes that end with the driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask the driver to stop.

Slurm sends SIGUSR1, or SIGUSR2 as submitit asks it to, before it takes a node; SIGHUP comes when
the terminal is closed, or the connection to it is lost."""
OF_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to every process that was started from it."""
ASK_WORKER = signal.SIGUSR1
DUMP_STACKS = signal.SIGUSR2
"""The signal by which a worker writes the Python stack of every thread to its log."""
GRACE_S, IMPATIENT_S = 30.0, 8.0
"""Seconds in which workers finish their step and save: asked by a scheduler, and by Ctrl-C."""

# Of the whole process, as signals are: the kernel asks a process, not one of its runs.
_received: list[signal.Signals] = []
_at_once = False
_interrupted = False
_in_command = False
_driven = False


@contextlib.contextmanager
def interrupts_noted() -> Iterator[None]:
    """Remember Ctrl-C while entered and until `raise_dropped`, and raise KeyboardInterrupt.

    Python prints and drops one that is raised in a callback, or in C code that takes no exception,
    as each import has; `raise_dropped` raises it later.
    """
    global _interrupted, _in_command
    _interrupted, _in_command = False, True
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def tell(dropped: sys.UnraisableHookArgs) -> None:
        if not ((_interrupted or asked()) and issubclass(dropped.exc_type, KeyboardInterrupt)):
            hook(dropped)

    sys.unraisablehook = tell
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        sys.unraisablehook, _in_command = hook, False
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def raise_dropped() -> None:
    """Raise KeyboardInterrupt where a command has dropped one; from now on none is remembered."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _interrupted and _in_command:  # not that of an earlier command in this process
        raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Return whether Ctrl-C came while it was remembered."""
    return _interrupted


def _interrupt(number: int, _: types.FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def asked() -> bool:
    """Return whether this process was asked to stop."""
    return bool(_received)


def note_interrupt() -> bool:
    """Keep a KeyboardInterrupt as a signal is; returns whether it is the first of these."""
    if _received:
        return False
    _received.append(signal.SIGINT)
    return True


def asked_by(number: signal.Signals) -> bool:
    """Return whether this process was asked to stop by this signal."""
    return number in _received


def exit_code() -> int:
    """Return the exit code of an interrupted command: 128 and the signal's number, as in shells."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def interruption() -> str:
    """Return which signal has asked this process to stop; a KeyboardInterrupt alone is Ctrl-C."""
    first = _received[0] if _received else signal.SIGINT
    return f"interrupted ({'Ctrl-C' if first == signal.SIGINT else first.name})"


def grace_s() -> float:
    """Return the seconds that workers get to save, by who asked."""
    return IMPATIENT_S if _received[:1] == [signal.SIGINT] else GRACE_S


def in_slurm() -> bool:
    """Return whether this is part of a job of Slurm, which sends signals to all its processes."""
    return "SLURM_JOB_ID" in os.environ


def heed_in_worker() -> None:
    """Let this worker be asked to stop: by the driver, or by whoever else has started it."""
    _received.clear()
    numbers = [ASK_WORKER]
    if not _driven:
        numbers += [signal.SIGUSR2, signal.SIGTERM, *_unless_ignored(signal.SIGHUP)]
    elif in_slurm():
        numbers += [signal.SIGTERM]
    for number in numbers:
        signal.signal(number, lambda number, _: _received.append(signal.Signals(number)))


class Heeded:
    """A context that keeps the first signal, see `asked`; the second raises KeyboardInterrupt.

    Only in a command, and in its main thread: a call from Python leaves the handlers of its process
    alone.
    """

    def __init__(self) -> None:
        self._before = dict[signal.Signals, Any]()

    def __enter__(self) -> None:
        _received.clear()
        if _in_command and threading.current_thread() is threading.main_thread():
            raise_dropped()
            heeded: list[signal.Signals] = [number for number in ASKING if number != signal.SIGHUP]
            heeded += _unless_ignored(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._keep) for number in heeded}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _keep(self, number: int, _: types.FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_the_terminal()
            if _received:  # it comes from the shell, and from the system too: nobody is impatient
                return
        _received.append(signal.Signals(number))
        if _at_once or len(_received) > 1:
            raise KeyboardInterrupt


def _unless_ignored(number: signal.Signals) -> list[signal.Signals]:
    """Nohup lets a command ignore the end of its terminal."""
    return [] if signal.getsignal(number) is signal.SIG_IGN else [number]


def _leave_the_terminal() -> None:
    """Print to nowhere where the terminal is gone: writing to it would be an error."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


@contextlib.contextmanager
def heeded_at_once() -> Iterator[None]:
    """While entered, the first signal that `Heeded` keeps raises KeyboardInterrupt too."""
    global _at_once
    _at_once = True
    try:
        yield
    finally:
        _at_once = False


def is_driven() -> bool:
    """Return whether a driver has started this process as a worker, not torchrun or Slurm."""
    return _driven


def note_driven() -> None:
    """Note in this process that a driver has started it."""
    global _driven
    _driven = True


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with `parent`, which has forked it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died before
        os._exit(1)
