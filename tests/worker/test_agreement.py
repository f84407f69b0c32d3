"""When workers meet, and what they agree on."""

from __future__ import annotations

from pathlib import Path

from expt.training.collectives import Worker
from expt.worker import steps as agreement
from expt.worker.steps import Agreement
from tests.facade import Patch
from tests.ranks import together

NONE = set[str]()


class Clock:
    """Stands until it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_all_save_and_stop_after_the_same_step(tmp_path: Path, monkeypatch: Patch) -> None:
    """The slower's step takes 0.125 s: they meet after the first, then after each second. What they
    agreed on stays."""

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
        (of_both, False),
        (NONE, False),
        (of_both, False),
        (NONE, False),
        (of_both, True),
        (NONE, True),
    ]
    assert both == [[*expected, (NONE, True)]] * 2


def test_fast_steps_do_not_put_a_meeting_off_for_ever(tmp_path: Path, monkeypatch: Patch) -> None:
    def each(worker: Worker) -> list[int]:
        monkeypatch.setattr(agreement, "time", Clock())  # a step takes no time at all
        asked = Agreement(worker, asked_to_stop=lambda: False)
        return [step for step in range(1, 2002) if asked.after_step({"save"})]

    assert together(tmp_path, 2, each) == [[1, 1001, 2001]] * 2
