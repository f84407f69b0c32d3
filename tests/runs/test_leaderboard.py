"""The summary of a sweep, from records as runs leave them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, create_result, update_result
from expt.runs.view import leaderboard


def leave_run(folder: Path, name: str, value: float | None = None, **fields: Any) -> None:
    """The result.json of a run called `name`: completed with `value`, or as `fields` say."""
    objective = fields.pop("objective", "accuracy/val")
    overrides = fields.pop("overrides", dict(pair.split("=") for pair in name.split(",")))
    outcome: dict[str, Any] = {}
    if value is not None:
        metrics = {objective: value, "loss/train": 0.5}
        outcome = {"status": COMPLETED, "metrics": metrics, "epoch_s": [1.0, 2.0]}
        outcome["objective"] = {"name": objective, "value": value}
    arguments = [f"{key}={setting}" for key, setting in overrides.items()]
    about = {"identity": f"id-{name}", "overrides": overrides, "arguments": arguments}
    create_result(RunPaths(folder / name), **about, **{"command": "python -m expt -m seed=0,1", **fields})
    update_result(RunPaths(folder / name), **outcome, **{key: fields[key] for key in fields if key == "status"})


def names(folder: Path) -> list[list[str]]:
    return [[run["folder"].name for run in row.runs] for row in leaderboard.rows(leaderboard.read_runs(folder))]


def lines_of(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines()


@pytest.mark.parametrize(("objective", "best"), [("accuracy/val", "lr=3"), ("loss/val", "lr=1")])
def test_the_best_comes_first_whichever_way_the_objective_goes(tmp_path: Path, objective: str, best: str) -> None:
    for name, value in {"lr=2": 0.5, "lr=3": 0.9, "lr=1": 0.1}.items():
        leave_run(tmp_path, name, value, objective=objective)
    leave_run(tmp_path, "lr=4", status=FAILED, error="rank 0 raised\n\nTraceback\nValueError: bad\n\nlog: x")
    leave_run(tmp_path, "lr=5", float("nan"), objective=objective)
    found = names(tmp_path)
    assert found[0] == [best]
    assert found[1] == ["lr=2"]
    assert sorted(found[3:]) == [["lr=4"], ["lr=5"]], "what has no value comes last"


def test_seeds_are_joined_as_mean_and_standard_deviation(tmp_path: Path) -> None:
    for seed, value in enumerate((0.1, 0.2, 0.6)):
        leave_run(tmp_path, f"lr=1,seed={seed}", value)
    leave_run(tmp_path, "lr=2,seed=0", 0.2)
    leave_run(tmp_path, "lr=2,seed=1", status=FAILED, error="gone")
    first, second = leaderboard.rows(leaderboard.read_runs(tmp_path))
    assert (first.settings, first.status) == ({"lr": "1"}, "completed")
    assert first.mean == pytest.approx(0.3)
    assert first.std == pytest.approx(0.07**0.5)  # of a sample: the squares of 0.2, 0.1 and 0.3, over 2
    assert (second.status, second.mean, second.std) == ("1 of 2 completed", 0.2, 0.0)
    leaderboard.write_summary(tmp_path, leaderboard.read_runs(tmp_path))
    assert lines_of(tmp_path, "summary.md") == [
        "| lr | accuracy/val | status | train_s |",
        "|---|---|---|---|",
        "| 1 | 0.3000 ± 0.2646 (3) | completed | 3.0 |",
        "| 2 | 0.2000 | 1 of 2 completed | 1.5 |",
    ]


def test_summary_csv_has_a_line_for_each_run(tmp_path: Path) -> None:
    leave_run(tmp_path, "lr=1", 0.25)
    leave_run(tmp_path, "lr=2", status=FAILED, error="rank 1 of 2 raised\n\nTrace\nValueError: a, b\n\nlog: l.log")
    leave_run(tmp_path, "lr=3")  # running
    leaderboard.write_summary(tmp_path, leaderboard.read_runs(tmp_path))
    with (tmp_path / "summary.csv").open() as file:
        found = {row["run"]: row for row in csv.DictReader(file)}
    assert list(found) == ["lr=1", "lr=2", "lr=3"]
    assert [row["status"] for row in found.values()] == ["completed", "failed", "running"]
    good = found["lr=1"]
    assert (good["lr"], good["objective"], good["accuracy/val"], good["loss/train"]) == ("1", "0.25", "0.25", "0.5")
    assert (good["identity"], good["train_s"], good["error"]) == ("id-lr=1", "3", "")
    assert found["lr=2"]["error"] == "rank 1 of 2 raised: ValueError: a, b  (log: l.log)"
    assert found["lr=3"]["objective"] == ""


def test_a_default_stands_where_others_were_given_a_value(tmp_path: Path) -> None:
    config = {"optimizer": {"name": "sgd", "lr": 0.05}}
    leave_run(tmp_path, "a=1", 0.5, overrides={}, config=config)
    leave_run(tmp_path, "b=1", 0.4, overrides={"optimizer.lr": 0.1}, config=config)
    assert [row.settings for row in leaderboard.rows(leaderboard.read_runs(tmp_path))] == [
        {"optimizer.lr": 0.05},
        {"optimizer.lr": 0.1},
    ]


def test_a_bar_in_a_value_does_not_break_the_table(tmp_path: Path) -> None:
    leave_run(tmp_path, "note=a|b", 0.5)
    leaderboard.write_summary(tmp_path, leaderboard.read_runs(tmp_path))
    assert lines_of(tmp_path, "summary.md")[2].startswith("| a\\|b | 0.5000")
