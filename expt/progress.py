"""Report the phase of this process every ten seconds, if it takes longer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

EVERY_S = 8.0  # so that with its start it is within ten on a busy machine, too
LOOK_S = 0.5

_under_way: list[Phase] = []
"""The innermost last."""
_sayers: list[Callable[[str], object]] = []
_said_at = time.monotonic()
os.register_at_fork(after_in_child=_under_way.clear)
os.register_at_fork(after_in_child=_sayers.clear)


class Phase:
    """A part of the work, with the `done` of `total` samples, where these are known."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done, self.began = name, total, 0, time.monotonic()

    def __str__(self) -> str:
        took_s = time.monotonic() - self.began
        if not self.done:
            return f"{self.name}: {took_s:.0f} s so far"
        if not self.total:
            return f"{self.name}: {self.done:,} in {took_s:.0f} s"
        left_s = took_s / self.done * max(0, self.total - self.done)
        return f"{self.name}: {min(self.done, self.total):,} of {self.total:,}, {left_s:.0f} s left"

    def again(self) -> None:
        """Begin the next of many short parts; only a long one is reported."""
        self.began = time.monotonic()
        said()


@contextlib.contextmanager
def phase(name: str, total: int = 0) -> Iterator[Phase]:
    """Have `name` reported until the end; the caller may count the samples that are `done`."""
    _under_way.append(found := Phase(name, total))
    try:
        yield found
    finally:
        _under_way.remove(found)


@contextlib.contextmanager
def reported(say: Callable[[str], object]) -> Iterator[None]:
    """Say which phase is under way after EVERY_S silent seconds; only the innermost does."""
    done, num_before = threading.Event(), len(_under_way)
    _sayers.append(say)
    threading.Thread(target=_report, args=(say, done), name="progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        _sayers.remove(say)
        del _under_way[num_before:]  # of a run that has failed


def said() -> None:
    """Note that something was said just now."""
    global _said_at
    _said_at = time.monotonic()


os.register_at_fork(after_in_child=said)


def is_quiet() -> bool:
    """Return whether nothing was said for EVERY_S seconds."""
    return time.monotonic() - _said_at >= EVERY_S


def _report(say: Callable[[str], object], done: threading.Event) -> None:
    while not done.wait(min(LOOK_S, EVERY_S)):
        if (phases := [*_under_way]) and is_quiet() and [*_sayers][-1:] == [say]:
            said()
            with contextlib.suppress(OSError):  # nobody reads it
                say(str(phases[-1]))
