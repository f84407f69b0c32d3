"""A command that is typed after `expt warm`: it has a driver forked that has its imports, and
stands in for it here.

The driver has this process's streams, folder, arguments and environment, but is not of its
terminal's session: what this process is sent it passes on, and when it is killed the driver is
killed, too. Where anything is out of the ordinary, as under a debugger, this process becomes the
driver itself, as without `expt warm`. Imports next to nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from expt.launch import warm

OPTIONS = ("-m", "--multirun", "-q", "--quiet", "--config-dir", "-cd")
"""Those of runs and sweeps; any other prints something, or is rare."""
UNLIKE = ("debug=", "hydra/launcher=")
"""What a command with such a word does in its own process, or on other machines, is not done in a
fork.
"""
PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGWINCH, signal.SIGCONT),
)
IGNORABLE = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What a shell or nohup may let a command ignore; the others are of a process's surroundings."""
MOST_DESCRIPTORS = 32


def become_its_stand_in(typed_at: float) -> None:
    """Have a forked driver do what sys.argv asks for, and exit as it does; return where there is
    none.
    """
    if not (_asks_for_runs(sys.argv[1:]) and _is_ordinary()):
        return
    descriptors = _inherited()
    if descriptors is None or len(descriptors) > MOST_DESCRIPTORS:
        return
    ends, alive = (
        os.pipe()
    )  # the driver is killed as `alive` is closed, by this process's end at the latest
    try:
        with _Relay() as relay:
            line, handle = warm.fork_driver(
                _request(typed_at, [*descriptors, ends]), [*descriptors, ends]
            )
            relay.to(handle)
            _exit_as(_exit_code(line, handle))
    except warm.Cold:
        os.close(ends)
        os.close(alive)


def _asks_for_runs(words: Sequence[str]) -> bool:
    """Whether it is a run or a sweep of this machine; where that is not plain to see, it is not."""
    if words and "=" not in words[0] and words[0][:1] not in ("-", "~"):  # expt report
        return False
    dashed = {word.partition("=")[0] for word in words if word.startswith("-")}
    return dashed <= {*OPTIONS} and not any(word.lstrip("+").startswith(UNLIKE) for word in words)


def _is_ordinary() -> bool:
    """Whether nothing but the shell stands between a person and this process: no debugger,
    profiler, script.
    """
    typed = sys.orig_argv[1:]
    by_module, by_name = typed == ["-m", "expt", *sys.argv[1:]], typed == sys.argv
    if not by_module and not (by_name and os.path.basename(sys.argv[0]) == "expt"):
        return False
    monitoring: Any = getattr(sys, "monitoring", None)
    return (
        sys.gettrace() is None
        and sys.getprofile() is None
        and not (monitoring and any(map(monitoring.get_tool, range(6))))
        and None not in (sys.stdin, sys.stdout, sys.stderr)
        and not _is_traced()
        and not any(map(_stops_who_prints, (1, 2)))
    )


def _is_traced() -> bool:
    """Whether strace or gdb looks at this process; true where that cannot be known."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        return "\nTracerPid:\t0\n" not in status.read()
    return True


def _stops_who_prints(descriptor: int) -> bool:
    """Whether it is a terminal that stops who prints in the background (`stty tostop`): only those
    of its session.
    """
    if not os.isatty(descriptor):
        return False
    import termios

    flags: int = termios.tcgetattr(descriptor)[3]
    return bool(flags & termios.TOSTOP)


def _inherited() -> list[int] | None:
    """The descriptors that this process was started with, as of `>(tee log)`; None where they are
    not to be known.
    """
    try:
        numbers = sorted(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        return None
    found = []
    for number in numbers:
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.get_inheritable(number):
                found.append(number)
    return found


def _request(typed_at: float, numbers: Sequence[int]) -> dict[str, object]:
    """What the driver needs to know; it closes its end as the last of `numbers` is."""
    return {
        "typed_at": typed_at,
        "arguments": sys.argv,
        "typed": sys.orig_argv,
        "env": dict(os.environ),
        "deaf": [int(number) for number in IGNORABLE if signal.getsignal(number) is signal.SIG_IGN],
        "descriptors": numbers,
    }


class _Relay:
    """While entered, this process passes on to the driver what it is sent, and stops and goes on
    with it.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, types.FrameType | None], Any] | int | None] = {}
        self._driver: int | None = None
        self._kept: list[int] = []

    def __enter__(self) -> _Relay:
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._kept:  # there was no driver
            _exit_as(-self._kept[0])

    def to(self, driver: int) -> None:
        """Pass on to this process, of which it is a descriptor, what has come by now and what will."""
        self._driver = driver
        while self._kept:
            self._pass_on(self._kept.pop(0))

    def _pass_on(self, number: int, _: types.FrameType | None = None) -> None:
        if self._driver is None:
            self._kept.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._driver, number)

    def _stop(self, number: int, _: types.FrameType | None) -> None:
        """Ctrl-Z: stop both. The driver's group has no shell, without which SIGTSTP is not heard."""
        if self._driver is not None:
            self._pass_on(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # until `fg` or `bg`
        signal.signal(number, self._stop)
        if self._driver is not None:
            self._pass_on(signal.SIGCONT)


def _exit_code(line: socket.socket, driver: int) -> int:
    """The driver's, once it is gone; -N of one that signal N has ended."""
    line.settimeout(None)
    try:
        code = int(json.loads(line.recv(warm.MAX_BYTES))["code"])
    except (OSError, ValueError, KeyError):  # who could tell was killed, too
        code = -signal.SIGKILL
    select.select([driver], [], [])
    return code


def _exit_as(code: int) -> NoReturn:
    """End this process at once, as the driver has ended."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
