"""The GAN that comes with expt: the same on any number of workers, and drawn."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.facade import as_typed
from tests.worker.conftest import TrainAlone, TrainTogether, train_alone, train_together

__all__ = ["train_alone", "train_together"]

WORDS = as_typed(
    "experiment=gan epochs=1 +dataset.val_fraction=0.5 batch_size=120 log_every=1 drop_last=false"
)


@pytest.mark.slow
def test_gan_on_any_workers(train_alone: TrainAlone, train_together: TrainTogether) -> None:
    """Of the 718 images that are trained on the last batch has 118, which are not the same number
    for each worker."""
    words = (*WORDS, "callbacks=[{_target_: expt.training.callback.Generated, noise: 32}]")
    several = train_together(3, *words, name="several")
    one = train_alone(*words, name="one")
    for tag in ("running/loss", "running/generator", "loss/val", "generator/test"):
        assert dict(several.curve(tag)) == pytest.approx(dict(one.curve(tag)), abs=1e-4), tag
    drawn = EventAccumulator(str(one.folder), {"images": 0})
    drawn.Reload()
    assert [image.step for image in drawn.Images("generated/images")] == [6]
