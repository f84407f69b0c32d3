"""Optimizers that train at other weights than those to be used: evaluated and saved are these."""

from __future__ import annotations

import pytest
import torch

from expt.runs import checkpoint
from expt.training.loop import evaluate
from tests.worker.conftest import ALONE, TrainAlone
from tests.worker.test_run import TURNING

OWN = "tests.worker.odd_optimizers"
TOGGLED = ("~optimizer", f"+optimizer={{_target_: {OWN}.Toggled, lr: 0.05}}", "epochs=3")


def test_the_weights_to_use_are_evaluated_and_saved(train_alone: TrainAlone) -> None:
    done = train_alone(*TURNING, *TOGGLED)
    run = done.run
    assert not run.learner.optimizer.trains  # type: ignore[attr-defined]
    last = checkpoint.load(done.folder / "checkpoints" / "last.pt")["model"]
    for name, weight in run.learner.module.named_parameters():
        assert torch.equal(last[name], weight)
    assert run.data.val is not None
    found = evaluate(run.learner, run.data.val.evaluation(), ALONE.device)
    assert found.loss == pytest.approx(done.curve("loss/val")[-1][1], rel=1e-6)
