"""Searches with rungs as people type them: runs that pause, go on in a later command, and survive
kills.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import expt
from expt.runs import checkpoint
from tests.conftest import Trained
from tests.facade import RunFolder, as_typed, run, same

SHORT = as_typed(
    "dataset.train_limit=320 batch_size=32 optimizer.momentum=0.9 model.dropout=0.3 ema=0.9"
)
ALONE = ("world_size=1", "threads=1", "tensorboard.images=false", "hydra.launcher.max_concurrent=1")
SHARDED = ("strategy=fsdp", "checkpoint.sharded=true", "world_size=2")
LR = "optimizer.lr=tag(log,interval(1e-3,3))"


def weights(folder: Path) -> dict[str, Any]:
    state = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    return {key: state[key] for key in ("model", "ema", "optimizer", "scheduler")}


def assert_same(promoted: RunFolder, whole: RunFolder) -> None:
    assert promoted.points == whole.points
    assert same(weights(promoted.folder), weights(whole.folder))


@pytest.mark.parametrize(
    "strategy", [(), pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["ddp", "fsdp in parts"]
)
def test_pruned_run_resumes(strategy: tuple[str, ...], tmp_path: Path, trained: Trained) -> None:
    folder = tmp_path / "search"
    search = "search=random search.rungs=asha search.reduction=2 search.keep_checkpoints=true"
    size = "epochs=2 threads=1 tensorboard.images=false"
    words = (*as_typed(f"{search} {size}"), LR, *SHORT, *(strategy or ("world_size=1",)))
    first = expt.sweep(*words, "search.runs=1", folder=folder)
    assert [run.status for run in first] == ["pruned"]
    (waits,) = first.pruned
    assert (waits.record["until_epoch"], len(waits.history)) == (1, 1)
    later = expt.sweep(*words, "search.runs=2", folder=folder)
    assert {run.status for run in later} == {"completed", "pruned"}
    (done,) = later.completed
    assert done.record["attempts"] == 2
    assert later.best.folder == done.folder
    arguments = [word for word in done.record["arguments"] if not word.startswith("hydra.")]
    assert_same(RunFolder(done.folder), trained(*arguments, name="whole"))


def test_longer_run_resumes_its_shorter_self_past_a_rung(
    tmp_path: Path,
) -> None:
    """It pauses at once, without a step, and has a checkpoint all the same: that of the shorter
    one.
    """
    words = ("search=random", "search.runs=1", LR, *SHORT, *ALONE)
    (short,) = expt.sweep(*words, "epochs=1", folder=tmp_path / "search")
    (waits,) = expt.sweep(
        *words, "search.rungs=asha", "epochs=4", "resume=auto", folder=tmp_path / "search"
    )
    assert (short.status, waits.status, len(waits.history)) == ("completed", "pruned", 1)
    typed = run("resume=auto", f"hydra.run.dir='{waits.folder}'", cwd=tmp_path)
    assert (typed.returncode, typed.stderr) == (0, "")
    assert [line.split()[1] for line in typed.stdout.splitlines() if line.startswith("epoch ")] == [
        "2/4",
        "3/4",
        "4/4",
    ]
