"""A worker that gets stuck: its stacks written to its log, and an end to it. Free of torch."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from expt.signals import DUMP_STACKS

TICKS = 20
DUMP_S = 1.0
"""How long a stuck worker gets to write its stacks."""
SHOWN_CALLS = 10
_THIS_THREAD = "Current thread "


def answer_dumps(*, when_asked: bool) -> None:
    """Write this process's stacks to stderr when it crashes, or on DUMP_STACKS; in C, so that
    nothing can block it.
    """
    faulthandler.enable(all_threads=True)
    if when_asked:
        faulthandler.register(DUMP_STACKS, all_threads=True)


class Watchdog:
    """Calls `on_hang`, from a thread, when no `beat` has come for `timeout_s`; the first is that it
    is made.
    """

    def __init__(
        self,
        timeout_s: float,
        on_hang: Callable[[], None],
        *,
        nap: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timeout_s, self._on_hang, self._nap, self._beats = timeout_s, on_hang, nap, 0
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @property
    def beats(self) -> int:
        """How much is done."""
        return self._beats

    def beat(self) -> None:
        """Say that something is done: a part of the preparations, a step, a batch of an evaluation."""
        self._beats += 1

    def _watch(self) -> None:
        # Counted in naps of its own, so that the time in which the whole process is stopped does
        # not count.
        seen = unchanged = 0
        while unchanged < TICKS:
            self._nap(self._timeout_s / TICKS)
            unchanged = unchanged + 1 if self._beats == seen else 0
            seen = self._beats
        self._on_hang()


def main_stack() -> str:
    """Where the main thread is: its last calls, the innermost at the end."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame, limit=SHOWN_CALLS))


def wait_for_dump(log: Path, size_before: int) -> str:
    """Where a worker is, by what it has added to its log since that was `size_before` bytes long;
    see `main_stack`.

    Empty where it wrote nothing within DUMP_S.
    """
    end = time.monotonic() + DUMP_S
    written = ""
    while time.monotonic() < end:
        time.sleep(0.02)
        before, written = written, log.read_bytes()[size_before:].decode(errors="replace")
        if written and written == before:
            break
    calls = written.partition(_THIS_THREAD)[2].partition("\n\n")[0].splitlines()[1:]
    return "\n".join(reversed(calls[:SHOWN_CALLS]))
