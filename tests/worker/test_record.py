"""What a run writes down as it goes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expt.runs.paths import RunPaths
from expt.runs.result import create_result, read_result, update_result
from expt.training.learner import Position
from expt.worker.record import History, Record
from tests.facade import Patch
from tests.worker.sharded import Observer


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    create_result(RunPaths(tmp_path))
    position = Position(steps_per_epoch=2, total_steps=2)
    record = Record(
        RunPaths(tmp_path), position, History("loss/val", "min"), Observer(), writes=True
    )
    yield record
    with contextlib.suppress(OSError):
        record.end("interrupted", {})


def test_first_record_is_written_aside(record: Record, tmp_path: Path, monkeypatch: Patch) -> None:
    disk_is_free = threading.Event()

    def slowly(paths: RunPaths, **fields: Any) -> None:
        assert disk_is_free.wait(60)
        update_result(paths, **fields)

    monkeypatch.setattr("expt.worker.record.update_result", slowly)
    record.begin(total_steps=2)
    assert "total_steps" not in read_result(RunPaths(tmp_path)), "nobody has waited for the disk"
    threading.Timer(0.05, disk_is_free.set).start()
    record.log({"loss/train": 0.5})
    assert read_result(RunPaths(tmp_path))["total_steps"] == 2


def test_full_disk_is_told_when_measuring(record: Record, monkeypatch: Patch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("expt.worker.record.update_result", full)
    record.begin(total_steps=2)
    with pytest.raises(OSError, match="No space left"):
        record.log({"loss/train": 0.5})
