"""A run that pauses after an epoch, and goes on: it is then what it would have been at once, to the
bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from expt.worker.run import Run
from tests.conftest import Configured
from tests.facade import continued
from tests.worker.conftest import TrainAlone, Trained
from tests.worker.test_callbacks import words as with_callbacks
from tests.worker.test_continue import ALL_AT_ONCE, SHORT, _assert_same

CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    # the words of the run, and the epochs after which it pauses
    "all that draws and averages, by a cosine that sees all epochs": (
        (*ALL_AT_ONCE, "scheduler=cosine",
            "scheduler.warmup_epochs=1.5", "epochs=3",
         "checkpoint.every_epochs=null", "tensorboard.images=false", with_callbacks("Busy")),
        (1, 2),
    ),
    "a plateau, an early stop, and half precision": (
        ("scheduler=plateau", "scheduler.patience=0", "early_stop={metric: loss/val, patience: 2}",
            "optimizer.lr=3",
         "amp=bf16", "objective=loss/val", "checkpoint.every_epochs=null", "epochs=9",
         "tensorboard.images=false"),
        (1, 2, 3),
    ),
}  # fmt: skip


def pruned_after(
    epoch: int, train_alone: TrainAlone, *words: str, source: Path | None = None
) -> Trained:
    def until(run: Run) -> None:
        run.until_epoch = epoch

    return train_alone(*words, name="pruned", source=source, before=until)


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_has_paused_goes_on_to_the_same_bits(
    name: str,
    train_alone: TrainAlone,
    configured: Configured,
    tmp_path: Path,
) -> None:
    words, pauses = (*SHORT, *CASES[name][0]), CASES[name][1]
    for folder in ("pruned", "at_once"):
        create_result(RunPaths(tmp_path / folder))
    paths, source = RunPaths(tmp_path / "pruned"), None
    for epoch in pauses:
        pruned = pruned_after(epoch, train_alone, *words, source=source)
        assert pruned.status == pruned.result["status"] == "pruned"
        assert len(pruned.result["epoch_s"]) == epoch == len(pruned.curve("loss/val"))
        assert pruned.result["objective"]["value"] is not None
        assert (pruned.result["stopped_early"], pruned.curve("loss/test")) == (None, [])
        source = continued(configured(*words), paths)
        assert source is not None
        assert checkpoint.load(source)["position"]["epoch"] == epoch
    done = train_alone(*words, name="pruned", source=source)
    assert done.status == "completed"
    _assert_same(done, train_alone(*words, name="at_once"))


def test_a_run_that_ends_before_completes(train_alone: TrainAlone) -> None:
    early = ("early_stop={metric: loss/val, patience: 1}", "optimizer.lr=3", "epochs=9")
    for words in (("epochs=2",), ("max_steps=15",), early):
        ended = pruned_after(9 if words == early else 2, train_alone, *SHORT, *words)
        assert ended.status == "completed"
        assert ended.curve("loss/test")


def test_asked_for_an_epoch_that_is_behind_it_pauses_where_it_is(train_alone: TrainAlone) -> None:
    first = pruned_after(2, train_alone, *SHORT, "epochs=3")
    again = pruned_after(1, train_alone, *SHORT, "epochs=3", source=first.paths.last)
    assert (again.status, len(again.result["epoch_s"])) == ("pruned", 2)
    assert again.result["metrics"] == first.result["metrics"]


def test_what_is_stopped_within_the_epoch_is_interrupted(train_alone: TrainAlone) -> None:
    def stop(run: Run) -> None:
        run.until_epoch = 2
        run.agreement._asked_to_stop = lambda: run.position.step >= 15

    assert train_alone(*SHORT, "epochs=3", before=stop).status == "interrupted"
