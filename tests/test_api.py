"""What a notebook shows of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import expt
from expt.api import Result


def test_a_result_is_shown_in_five_lines() -> None:
    record: Any = {
        "status": "completed",
        "config": {f"key{number}": number for number in range(100)},
        "metrics": {"loss/val": 0.25, "accuracy/val": 0.875, "lr": 0.1, "best/accuracy/val": 0.9},
        "best": {"metric": "accuracy/val", "value": 0.9, "epoch": 3},
        "epoch_s": [1.5, 2.0],
    }
    assert repr(Result(Path("outputs/a"), record)).splitlines() == [
        "expt.Result completed",
        "  folder   outputs/a",
        "  metrics  loss/val 0.2500, accuracy/val 0.8750",
        "  best     accuracy/val 0.9000 in epoch 3",
        "  trained  3.5 s; more in .record",
    ]


def test_a_result_says_where_its_folder_is_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text('{"status": "completed"}')
    monkeypatch.chdir(tmp_path)
    assert Result.of(Path("run")).folder == tmp_path / "run"


def test_quiet_is_a_word_of_functions_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (result,) = expt.sweep("-q", "epochs=1", "max_steps=1", "world_size=1")
    assert result.record["steps"] == 1
    assert not capsys.readouterr().out
