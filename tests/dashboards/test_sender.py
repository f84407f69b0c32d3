"""A run's copy in a dashboard: when it is made, left and made again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic.dataclasses import dataclass

from expt import registry
from expt.config.constraints import STRICT
from expt.dashboards import sender as module
from expt.dashboards import snapshot
from expt.dashboards.sender import Sender, runs_in
from expt.dashboards.snapshot import Snapshot
from expt.dashboards.trackers import Copy, Tracker
from expt.runs.metrics_file import Point
from expt.runs.paths import RunPaths
from expt.runs.result import Record, read_result
from tests.dashboards.folders import measure, record, sweep
from tests.facade import Patch

statuses = list[str]()
"""The statuses of the sweep at the ends of its runs."""


@pytest.fixture
def done(monkeypatch: Patch) -> list[str]:
    """The calls of the copies in a dashboard that refuses the first points."""
    calls = list[str]()

    class Noted(Copy):
        address = "there"

        def __init__(self) -> None:
            calls.append("made")

        def add(self, points: Sequence[Point], at: float) -> None:
            calls.append("added")
            if calls.count("added") == 1:
                raise ConnectionError("no answer")

        def end(self, run: Snapshot, sweep_status: str) -> None:
            calls.append("ended")
            statuses.append(sweep_status)

        def leave(self) -> None:
            calls.append("left")

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Dashboard(Tracker):
        checkpoints: bool = False

        def copy(self, run: Snapshot, state: dict[str, Any], key_of: Callable[[Path], str]) -> Copy:
            return Noted()

    kinds: Any = {"noted": lambda **_: Dashboard()}
    monkeypatch.setattr(registry, "trackers", lambda: kinds)
    return calls


def test_a_copy_is_left_before_another_is_made_after_an_error(
    done: list[str], tmp_path: Path
) -> None:
    paths, sender = record(tmp_path / "run"), Sender("noted")
    measure(paths, 1)
    with pytest.raises(ConnectionError):
        sender.send([paths], last=True)
    assert done == ["made", "added", "left"]
    sender.send([paths], last=True)
    assert done[3:] == ["made", "added"]
    record(tmp_path / "run", status="completed")
    sender.send([paths], last=True)
    sender.end()
    assert done[5:] == ["added", "ended"], "it is not left, too"


def test_records_are_read_a_few_times_however_many_runs_a_sweep_has(
    done: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    folder, reads = sweep(tmp_path / "sweep"), list[RunPaths]()
    runs = [record(folder / f"seed={seed}", status="completed") for seed in range(20)]
    for each in runs:
        measure(each, 1)

    def read(paths: RunPaths) -> Record:
        reads.append(paths)
        return read_result(paths)

    for reader in (module, snapshot):
        monkeypatch.setattr(reader, "read_result", read)
    done.append("added")  # no point is refused
    sender = Sender("noted")
    statuses.clear()
    sender.send(runs_in(folder))
    assert {*statuses} == {"completed"}
    assert len(reads) <= 3 * len(runs)
    reads.clear()
    sender.send(runs_in(folder))
    assert not reads, "nothing has changed"
    record(runs[3].folder)
    sender.send(runs_in(folder))
    record(runs[4].folder, status="completed", steps=7)
    sender.send(runs_in(folder))
    assert statuses[-1] == "running", "one has begun again"
    record(runs[3].folder, status="failed")
    sender.send(runs_in(folder))
    sender.end()
    assert statuses[-1] == "failed"
