"""The GAN that comes with expt: the same on any number of workers, resumed, and drawn."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expt.runs import checkpoint
from expt.worker.run import Run
from tests.conftest import as_typed
from tests.worker.conftest import TrainAlone, TrainTogether, train_alone, train_together
from tests.worker.test_run import values

__all__ = ["train_alone", "train_together"]

WORDS = as_typed(
    "experiment=gan epochs=2 +dataset.val_fraction=0.5 batch_size=120 log_every=1 drop_last=false"
)


def test_it_is_the_same_on_any_number_of_workers_resumed_and_drawn(
    train_alone: TrainAlone, train_together: TrainTogether
) -> None:
    """Of the 718 images that are trained on the last batch has 118, which are not the same number
    for each worker."""
    words = (*WORDS, "callbacks=[{_target_: expt.training.callback.Generated, noise: 32}]")
    one = train_alone(*words, name="one")
    several = train_together(3, *words, name="several")
    for tag in ("running/loss", "running/generator", "loss/val", "generator/test"):
        assert dict(several.curve(tag)) == pytest.approx(dict(one.curve(tag)), abs=1e-4), tag

    def stop(run: Run) -> None:
        run.agreement._asked_to_stop = lambda: run.position.step == 8

    last = train_alone(*words, name="stopped", before=stop).folder / "checkpoints" / "last.pt"
    again = train_alone(*words, name="stopped", source=last)
    assert values(again) == values(one)
    states = [checkpoint.load(run.folder / "checkpoints" / "last.pt") for run in (one, again)]
    assert [state["position"]["step"] for state in states] == [12, 12]
    for name, weights in states[0]["model"].items():
        assert torch.equal(weights, states[1]["model"][name]), name
    drawn = EventAccumulator(str(one.folder), {"images": 0})
    drawn.Reload()
    assert [image.step for image in drawn.Images("generated/images")] == [6, 12]
