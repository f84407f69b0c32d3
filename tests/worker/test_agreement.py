"""When workers meet, and what they agree on."""

import threading
from pathlib import Path

import pytest

from expt.training.collectives import Worker
from expt.worker import steps as agreement
from expt.worker.steps import Agreement
from expt.worker.watchdog import TICKS, Watchdog
from tests.facade import Patch
from tests.ranks import together

NONE = set[str]()


class Clock:
    """Stands until it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_all_save_and_stop_after_the_same_step(tmp_path: Path, monkeypatch: Patch) -> None:
    """Meet after the first step of 0.125 s, then every second; agreed wishes stay."""

    def each(worker: Worker) -> list[tuple[set[str], bool]]:
        clock, done = Clock(), list[tuple[set[str], bool]]()
        monkeypatch.setattr(agreement, "time", clock)
        asked = Agreement(worker, asked_to_stop=lambda: worker.rank == 0 and 3 <= len(done) < 6)
        for _ in range(6):
            clock.now += 0.125 if worker.rank == 1 else 0.001
            wishes = ({"end"}, {"save"})[worker.rank]
            done.append((asked.after_step(wishes), asked.stopping))
        return [*done, (asked.meet(set()), asked.stopping)]

    both = together(tmp_path, 2, each)
    of_both = {"save", "end"}
    expected = [
        (of_both, False), (NONE, False), (of_both, False), (NONE, False), (of_both, True),
        (NONE, True),
    ]  # fmt: skip
    assert both == [[*expected, (NONE, True)]] * 2


def test_fast_steps_do_not_put_a_meeting_off_for_ever(tmp_path: Path, monkeypatch: Patch) -> None:
    def each(worker: Worker) -> list[int]:
        monkeypatch.setattr(agreement, "time", Clock())  # a step takes no time at all
        asked = Agreement(worker, asked_to_stop=lambda: False)
        return [step for step in range(1, 2002) if asked.after_step({"save"})]

    assert together(tmp_path, 2, each) == [[1, 1001, 2001]] * 2


def naps_until_a_hang(beats_after: set[int], *, most: int = 5 * TICKS) -> int | None:
    """Return after how many naps `on_hang` is called, or None if not within `most`."""
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
