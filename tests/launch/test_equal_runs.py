"""Of runs in a sweep that are equally long, and else the same, one is trained."""

from pathlib import Path

import pytest

import expt
from tests.facade import Patch


def test_one_of_several_that_are_equally_long_is_trained(tmp_path: Path) -> None:
    """Digits have 21 batches of 60: runs of at most 100 and 500 steps are the same."""
    given = ("model=mlp", "epochs=1", "batch_size=60", "world_size=1", "max_steps=10,100,500")
    runs = expt.sweep(*given, f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    assert [run.record["steps"] for run in runs] == [10, 21, 21]
    assert [run.record.get("resumed_from", {}).get("step") for run in runs] == [None, None, 21]
    assert runs[1].record["metrics"] == runs[2].record["metrics"]


STREAM = """
import torch
class Both(torch.utils.data.IterableDataset):
    def __init__(self, first=0):
        self.first = first
    def __iter__(self):
        return ((torch.full((1, 8, 8), (self.first + n) % 2.0), n % 2) for n in range(640))
"""


def test_runs_of_a_stream_are_as_long_as_their_steps(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "streams.py").write_text(STREAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    about = "_target_: streams.Both, num_classes: 2, num_workers: 0"
    data = f"dataset={{{about}, train: {{}}, val: {{first: 1}}, test: {{first: 1}}}}"
    runs = expt.sweep(data, "model=mlp", "epochs=1", "world_size=1", "max_steps=3,6")
    assert [run.record["steps"] for run in runs] == [3, 6]
    assert not any("resumed_from" in run.record for run in runs)


def test_runs_that_differ_beyond_their_end_are_one(tmp_path: Path) -> None:
    """Of 4 steps: evaluations each 6 and 9 come at the end alone, each 3 after the third too."""
    given = ("model=mlp", "epochs=1", "max_steps=4", "world_size=1", "eval_every_steps=6,3,9")
    stop = "early_stop={metric: loss/val, patience: 9}, {metric: loss/val, patience: 10}"
    runs = expt.sweep(*given, stop, f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    trained = [run for run in runs if "resumed_from" not in run.record]
    assert [run.config["eval_every_steps"] for run in trained] == [6, 3]
    assert len(runs) == 6


def test_a_schedule_may_change_until_it_falls(tmp_path: Path) -> None:
    given = ("model=mlp", "world_size=1", "max_steps=6", "batch_size=400", "scheduler=step")
    whole = expt.run(*given, "epochs=2", "scheduler.every_epochs=3", folder=tmp_path / "whole")
    sooner = (*given, "epochs=2", f"resume='{whole.folder}'")
    later = expt.run(*sooner, "scheduler.every_epochs=7", folder=tmp_path / "later")
    assert later.metrics["loss/val"] == whole.metrics["loss/val"]
    with pytest.raises(expt.ConfigError, match="must keep that value"):
        expt.run(*sooner, "scheduler.every_epochs=1", folder=tmp_path / "too_late")


def test_one_that_was_not_trained_goes_on_as_if_it_had_been(tmp_path: Path) -> None:
    """It has the state before the end, at which the plateau sees no further evaluation."""
    given = ("model=mlp", "world_size=1", "batch_size=100", "dataset.train_limit=300")
    plateau = ("scheduler=plateau", "scheduler.patience=0", "scheduler.min_delta=10")
    sweep = tmp_path / "sweep"
    expt.sweep(*given, *plateau, "max_steps=5", "epochs=2,3", f"hydra.sweep.dir='{sweep}'")
    whole = expt.run(*given, *plateau, "epochs=3", folder=tmp_path / "whole")
    for number, name in enumerate(("epochs=2", "epochs=3")):
        words = (*given, *plateau, "epochs=3", f"resume='{sweep / name}'")
        longer = expt.run(*words, folder=tmp_path / f"longer{number}")
        assert longer.metrics["loss/val"] == whole.metrics["loss/val"]
        assert longer.record["best"] == whole.record["best"]


def test_a_plan_of_another_length_is_another_run(tmp_path: Path) -> None:
    given = ("model=mlp", "max_steps=5", "world_size=1", "scheduler=cosine", "epochs=2")
    runs = expt.sweep(*given, "scheduler.epochs=1,3", f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    assert not any("resumed_from" in run.record for run in runs)
