"""A watchdog whose naps the test counts."""

from __future__ import annotations

import threading

import pytest

from expt.worker.watchdog import TICKS, Watchdog


def naps_until_a_hang(beats_after: set[int], *, most: int = 5 * TICKS) -> int | None:
    """After how many naps it calls `on_hang`, where the worker beats after some; None if not within
    `most`."""
    naps, ended, hung = list[float](), threading.Event(), list[int]()
    ready = threading.Event()
    dog: Watchdog

    def nap(seconds: float) -> None:
        ready.wait()
        naps.append(seconds)
        if len(naps) in beats_after:
            dog.beat()
        if len(naps) == most:
            ended.set()
            threading.Event().wait()  # for ever: the thread is a daemon

    def on_hang() -> None:
        hung.append(len(naps))
        ended.set()

    dog = Watchdog(100.0, on_hang, nap=nap)
    ready.set()
    assert ended.wait(10)
    assert set(naps) == {100.0 / TICKS}
    return hung[0] if hung else None


@pytest.mark.parametrize(
    ("beats_after", "hangs_after"),
    [
        (set(), {TICKS}),  # its dataset blocks, or the others cannot be reached
        (set(range(1, 5 * TICKS, TICKS - 1)), {None}),
        ({1, 2, 7}, {7 + TICKS, 8 + TICKS}),
    ],
)
def test_watchdog_barks_in_time(beats_after: set[int], hangs_after: set[int | None]) -> None:
    assert naps_until_a_hang(beats_after) in hangs_after
