"""Points that were added to a sweep, in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import expt
from expt.runs import added
from expt.runs.added import Added

SMALL = ("epochs=1", "world_size=1", "dataset.train_limit=64")


def test_what_is_added_is_kept_and_what_is_dropped_forgotten(tmp_path: Path) -> None:
    first, second = Added(["a=1", "b=2"], ["a"], 0), Added(["a=2"], ["a"], 1)
    assert added.next_place(tmp_path) == 0
    added.keep(tmp_path, [first])
    added.keep(tmp_path, [second])
    added.forget(tmp_path, [["a=3"]])
    assert added.read(tmp_path) == [first, second]
    added.forget(tmp_path, [["b=2", "a=1"]])
    assert added.read(tmp_path) == [second]
    assert added.next_place(tmp_path) == 2, "it keeps its place"
    added.forget(tmp_path, [["a=2"]])
    assert not any(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / added.NAME).write_text('[{"words": 1}]')
    assert added.read(tmp_path) == []
    assert capsys.readouterr().err.startswith(
        f"warning: {tmp_path / added.NAME}: cannot be read; points that were"
    )


def test_a_grid_that_is_typed_again_has_what_was_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for what the grid names itself, and what is made of a file that is gone."""
    for words in (["seed=1"], ["seed=2"], ["model=gone"]):
        added.keep(tmp_path, [Added([*SMALL, *words], ["seed"])])
    runs = expt.sweep(*SMALL, "seed=0,1", folder=tmp_path)
    told = capsys.readouterr()
    assert "sweep of 4 runs in" in told.out
    assert "named twice" not in told.out
    assert sorted(run.config["seed"] for run in runs) == [0, 1, 2]
    assert (
        "model=gone: was added to the sweep, and is left out: model=gone: not one of " in told.err
    )
