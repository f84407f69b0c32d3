"""Of a moving average, and of an optimizer that trains at other weights than those to be used,
these are evaluated and saved."""

import pytest
import torch

from expt.training.loop import evaluate
from tests.facade import as_typed
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether
from tests.worker.test_run import TURNING, measured

OWN = "tests.worker.odd_optimizers"
TOGGLED = ("~optimizer", f"+optimizer={{_target_: {OWN}.Toggled, lr: 0.05}}", "epochs=3")


def test_the_weights_to_use_are_evaluated_and_saved(train_alone: TrainAlone) -> None:
    done = train_alone(*TURNING, *TOGGLED)
    run = done.run
    assert not run.learner.optimizer.trains  # type: ignore[attr-defined]
    last = done.state()["model"]
    for name, weight in run.learner.module.named_parameters():
        assert torch.equal(last[name], weight.cpu())
    assert run.data.val is not None
    found = evaluate(run.learner, run.data.val.evaluation(), ALONE.device)
    assert found.loss == pytest.approx(done.curve("loss/val")[-1][1], rel=1e-6)


EMA = (*TURNING, "ema=0.9", "model=convnet", "model.dropout=0.2")


def test_the_average_is_evaluated_saved_and_tested(train_alone: TrainAlone) -> None:
    done = train_alone(*EMA)
    learner, losses = done.run.learner, dict(done.curve("loss/val"))
    assert learner.ema
    best, last = (done.state(name) for name in ("best", "last"))
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
