"""A run with a moving average of its weights: what is evaluated, saved and tested."""

from __future__ import annotations

import pytest

from expt.runs import checkpoint
from tests.conftest import as_typed
from tests.worker.conftest import TrainAlone, TrainTogether
from tests.worker.test_run import TURNING, measured

EMA = (*TURNING, "ema=0.9", "model=convnet", "model.dropout=0.2")


def test_the_average_is_evaluated_saved_and_tested(train_alone: TrainAlone) -> None:
    done = train_alone(*EMA)
    learner, losses = done.run.learner, dict(done.curve("loss/val"))
    assert learner.ema
    best, last = (
        checkpoint.load(done.folder / "checkpoints" / name) for name in ("best.pt", "last.pt")
    )
    tested = measured(learner.ema.module, done.run, "test")[0]
    for state in (best, last):
        done.run.snapshot.load_weights(state)
        step = state["position"]["step"]
        assert measured(learner.ema.module, done.run, "val")[0] == pytest.approx(
            losses[step], abs=1e-6
        )
        assert measured(learner.module, done.run, "val")[0] != pytest.approx(losses[step], abs=1e-3)
        assert int(state["ema"]["n_averaged"]) == step
    done.run.snapshot.load_weights(best)
    assert done.result["metrics"]["loss/test"] == pytest.approx(tested, abs=1e-6)
    assert tested == measured(learner.ema.module, done.run, "test")[0], "of the best"


def test_two_workers_have_one_average(train_together: TrainTogether) -> None:
    same = as_typed("model=mlp model.hidden=[8] dataset.train_limit=128 epochs=2")

    def losses(size: int, *words: str) -> list[float]:
        done = train_together(size, *same, *words, name=f"{size} {len(words)}")
        return [value for _, value in done.curve("loss/val")]

    one, two = losses(1, "ema=0.9"), losses(2, "ema=0.9")
    assert one == pytest.approx(two, abs=1e-5)
    assert losses(1) != pytest.approx(two, abs=1e-2)
