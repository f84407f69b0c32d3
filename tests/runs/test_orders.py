"""Orders to the command that is at work in a sweep's folder."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from expt.runs import orders
from expt.runs.paths import RunPaths


def test_who_gives_the_last_order_of_a_sweep_reads_its_answer(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as other:
        with FileLock(RunPaths(tmp_path).lock):
            told = other.submit(orders.give, tmp_path, "drop", ("a",))
            deadline = time.monotonic() + 30
            while not (waiting := orders.given(tmp_path)) and time.monotonic() < deadline:
                pass
            waiting[0].answer("dropped 1 run: a")
            orders.clear(tmp_path)
        assert told.result() == ["dropped 1 run: a"]
    assert not (tmp_path / orders.FOLDER).exists()
