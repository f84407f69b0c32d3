"""End a worker that is stuck, with its stacks in its log. Free of torch, for the driver."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from expt.signals import DUMP_STACKS

TICKS = 20
DUMP_S = 1.0
"""How long a stuck worker gets to write its stacks."""
SHOWN_CALLS = 10
_THIS_THREAD = "Current thread "


def answer_dumps(*, when_asked: bool) -> None:
    """Write the stacks of all threads to stderr on a crash, and on DUMP_STACKS `when_asked`."""
    faulthandler.enable(all_threads=True)
    if when_asked:
        faulthandler.register(DUMP_STACKS, all_threads=True)


class Watchdog:
    """A thread that calls `on_hang` when there was no `beat` for `timeout_s`."""

    def __init__(self, timeout_s: float, on_hang: Callable[[], None]) -> None:
        self._timeout_s, self._on_hang = timeout_s, on_hang
        self.beats = 0
        """The number of calls of `beat`."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Report progress, such as a step of training or a batch of an evaluation."""
        self.beats += 1

    def _watch(self) -> None:
        # Counts its own naps, and so not the time in which the whole process is stopped.
        seen = unchanged = 0
        while unchanged < TICKS:
            time.sleep(self._timeout_s / TICKS)
            unchanged = unchanged + 1 if self.beats == seen else 0
            seen = self.beats
        self._on_hang()


def main_frame() -> FrameType:
    """Return the innermost call of the main thread."""
    return sys._current_frames()[threading.main_thread().ident or 0]


def main_stack() -> str:
    """Return the last calls of the main thread, the innermost at the end."""
    return "".join(traceback.format_stack(main_frame(), limit=SHOWN_CALLS))


def wait_for_dump(log: Path, size_before: int) -> str:
    """Return the calls that a worker adds to its `log` within DUMP_S, after `size_before` bytes."""
    end = time.monotonic() + DUMP_S
    written = ""
    while time.monotonic() < end:
        time.sleep(0.02)
        with log.open("rb") as file:
            file.seek(size_before)
            before, written = written, file.read().decode(errors="replace")
        if written and written == before:
            break
    calls = written.partition(_THIS_THREAD)[2].partition("\n\n")[0].splitlines()[1:]
    return "\n".join(reversed(calls[:SHOWN_CALLS]))
