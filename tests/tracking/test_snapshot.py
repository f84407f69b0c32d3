"""What is sent, computed from a run's folder alone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from expt.runs.metrics_file import Point
from expt.runs.paths import RunPaths
from expt.tracking.snapshot import (
    Snapshot,
    marked,
    runs_of,
    snapshot,
    sweep_status,
    unsent,
    with_epochs,
)
from tests.tracking.folders import measure, record, sweep


def test_a_snapshot_says_what_the_record_says(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "grid") / "lr=0.1"
    paths = record(
        folder, status="failed", error="RuntimeError: no", command="expt -m", git={"commit": "abc", "diff": ""},
        objective={"name": "loss/val", "value": 0.5}, best={"metric": "loss/val", "value": 0.5, "epoch": 2}, steps=7,
    )  # fmt: skip
    run = snapshot(paths)
    assert run is not None
    assert (run.name, run.status, run.has_ended, run.last_step) == ("lr=0.1", "failed", True, 7)
    assert run.settings == {
        "model": "mlp",
        "optimizer.lr": 0.1,
    }, "where a copy goes is no setting of the run"
    assert run.sweep == tmp_path / "grid"
    said = {
        "git.commit": "abc",
        "expt.sweep": "grid",
        "expt.error": "RuntimeError: no",
        "expt.command": "expt -m",
    }
    assert said.items() <= run.tags.items()
    assert run.summary == {"objective": 0.5, "best/epoch": 2.0}
    before = run.digest(checkpoints=False)
    assert run.digest(checkpoints=True) != before
    measure(paths, 1)
    assert run.digest(checkpoints=False) != before, "something new is to be sent"
    assert [found.name for found in runs_of(tmp_path / "grid")] == ["lr=0.1"]


def test_a_snapshot_says_whose_fork_it_is_and_at_which_rung_it_waits(tmp_path: Path) -> None:
    forked = {
        "given": "a@40",
        "run": "/runs/a",
        "identity": "0a",
        "seedless_identity": "0b",
        "step": 40,
        "epoch": 2,
    }
    forked |= {"arguments": [], "changed": {}}
    search = {"number": 5, "replaces": 1, "parent": 3}
    about = {"forked_from": forked, "search": search, "config": {"epochs": 9}}
    paths = record(tmp_path / "run", status="paused", until_epoch=3, epoch_s=[1.0], **about)
    said = {
        "expt.fork.run": "/runs/a",
        "expt.fork.identity": "0a",
        "expt.fork.step": "40",
        "expt.fork.epoch": "2",
        "expt.search.number": "5",
        "expt.search.replaces": "1",
        "expt.search.parent": "3",
        "expt.status": "paused",
        "expt.until_epoch": "3",
        "expt.epochs_done": "3",
    }
    assert said.items() <= (run := _snapshot(paths)).tags.items()
    assert "expt.weights.run" not in run.tags
    promoted = _snapshot(record(tmp_path / "run", status="running", **about))
    assert promoted.tags["expt.until_epoch"] == "9", "what was sent before is no longer true"
    weights = {"file": "/runs/b/checkpoints/best.pt", "identity": "0b", "run": "/runs/b"}
    alone = _snapshot(record(tmp_path / "other", weights_from=weights))
    assert alone.tags["expt.weights.run"] == "/runs/b"
    assert not {"expt.until_epoch", "expt.fork.run", "expt.search.number"} & alone.tags.keys()


def _snapshot(paths: RunPaths) -> Snapshot:
    found = snapshot(paths, even_lost=False)
    assert found is not None
    return found


def test_a_run_whose_command_was_killed_has_ended(tmp_path: Path) -> None:
    paths = record(tmp_path / "run", node=socket.gethostname())
    run, lost = snapshot(paths, even_lost=False), snapshot(paths)
    assert run is not None
    assert lost is not None
    assert (run.status, lost.status, lost.has_ended) == ("running", "lost", True)


def test_no_run_is_no_snapshot(tmp_path: Path) -> None:
    assert snapshot(record(tmp_path / "other", status="of another program")) is None


def test_a_tag_only_goes_forward() -> None:
    points = [
        Point(1, 1, "a", 0.1),
        Point(1, 1, "b", 0.2),
        Point(2, 1, "a", 0.3),
        Point(2, 1, "a", 0.4),
    ]
    assert unsent(points, {}) == points[:3], "a tag has one value at a step"
    marks = {"a": 1}
    assert unsent(points, marks) == [points[1], points[2]]
    marked(points[:2], marks)
    assert marks == {"a": 1, "b": 1}


def test_each_step_tells_its_epoch_once() -> None:
    points = [Point(1, 1, "a", 0.1), Point(1, 1, "b", 0.2), Point(20, 3, "a", 0.3)]
    assert [point for point in with_epochs(points) if point.tag == "epoch"] == [
        Point(1, 1, "epoch", 1.0),
        Point(20, 3, "epoch", 3.0),
    ]


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ((), "completed"),
        (("completed", "failed"), "failed"),
        (("failed", "running"), "running"),
        (("completed", "interrupted"), "interrupted"),
    ],
)
def test_a_sweep_is_as_the_worst_of_its_runs(statuses: tuple[str, ...], said: str) -> None:
    assert sweep_status(statuses) == said
