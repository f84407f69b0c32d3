"""A run with a moving average of its weights: what is evaluated, saved and tested, and how it goes
on."""

from __future__ import annotations

import pytest

from expt.runs import checkpoint
from expt.worker.run import Run
from tests.conftest import Trained as TrainInWorkers
from tests.conftest import as_typed
from tests.worker.conftest import TrainAlone
from tests.worker.test_run import TURNING, measured, values

EMA = (*TURNING, "ema=0.9", "model=convnet", "model.dropout=0.2")


def test_the_average_is_evaluated_saved_tested_and_resumed(train_alone: TrainAlone) -> None:
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

    def stop(run: Run) -> None:
        run.agreement._asked_to_stop = lambda: run.position.step == 12

    stopped = train_alone(*EMA, name="stopped", before=stop)
    assert stopped.status == "interrupted"
    resumed = train_alone(*EMA, name="stopped", source=stopped.folder / "checkpoints" / "last.pt")
    assert values(resumed) == values(done)


def test_two_workers_have_one_average(trained: TrainInWorkers) -> None:
    same = (
        *as_typed("model=convnet model.dropout=0 batch_norm=groups batch_norm_group=16"),
    )  # whatever the workers

    def losses(*words: str, name: str) -> list[float]:
        done = trained(*same, "dataset.train_limit=320", "epochs=2", *words, name=name)
        return [value for _, value in done.curve("loss/val")]

    one, two = (losses("ema=0.9", f"world_size={size}", name=str(size)) for size in (1, 2))
    assert one == pytest.approx(two, abs=1e-5)
    assert losses("world_size=2", name="plain") != pytest.approx(two, abs=1e-2)
