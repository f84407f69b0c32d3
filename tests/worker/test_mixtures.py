"""Settings that each go on exactly, together: a run that is stopped within an epoch ends as one
that was not."""

from __future__ import annotations

import pytest

from tests import on_cards
from tests.facade import as_typed
from tests.worker.conftest import TrainAlone, assert_same, stopped_and_resumed
from tests.worker.test_callbacks import words

FEW = ("dataset.train_limit=384", "tensorboard.images=false", "log_every=2")
MIXTURES = {
    "mixup, average, parts, groups, plateau, early stop, class weights, a fold": (
        *as_typed("mixup=0.4 ema=0.8 gradient_accumulation=2 model.hidden=[32] model.dropout=0.2"),
        *as_typed("dataset.folds=3 dataset.fold=1 epochs=9 seed=7 task.class_weights=balanced"),
        *as_typed("scheduler=plateau scheduler.patience=0 scheduler.min_delta=0.05"),
        "scheduler.metric=accuracy/val",
        "early_stop={metric: accuracy/val, patience: 2, min_delta: 0.03}",
        "optimizer.groups=[{match: '^4', lr_scale: 0.1, weight_decay: 0.1}]",
    ),
    "cutmix, parts, transforms, balanced sampling, a callback": (
        *as_typed("cutmix=1.0 gradient_accumulation=2 dataset.sampling=balanced drop_last=false"),
        *as_typed("epochs=2 threads=1 model.hidden=[32]"),
        "dataset.transforms=[{_target_: torchvision.transforms.v2.RandAugment, num_ops: 1}]",
        words("Busy"),
    ),
    "a task with a state, an optimizer that trains at other weights": (
        *as_typed("~task +task._target_=tests.worker.stateful.Saved objective=loss/val epochs=3"),
        "model.hidden=[32]",
        "~optimizer",
        "+optimizer={_target_: tests.worker.odd_optimizers.Toggled, lr: 0.05}",
    ),
    "muon, a schedule of one's own, both clips, frozen parameters": (
        *as_typed("optimizer=muon optimizer.lr=0.01 model.hidden=[16,16] model.dropout=0.2"),
        *as_typed("gradient_clip=1.0 gradient_clip_value=0.05 epochs=3 freeze=['1.bias']"),
        "scheduler={_target_: torch.optim.lr_scheduler.PolynomialLR, total_iters: 9,"
        " interval: step}",
    ),
}


@pytest.mark.parametrize(
    "name",
    [*[*MIXTURES][:1], *(pytest.param(each, marks=pytest.mark.slow) for each in [*MIXTURES][1:])],
)
def test_a_mixture_goes_on_to_the_same_bits(name: str, train_alone: TrainAlone) -> None:
    settings = (*FEW, *MIXTURES[name])
    whole = train_alone(*settings, name="whole")
    step = whole.run.position.steps_per_epoch + 2
    again = stopped_and_resumed(train_alone, *settings, step=step)
    assert_same(again, whole)
    assert again.result["stopped_early"] == whole.result["stopped_early"]
    assert on_cards.ON or bool(whole.result["stopped_early"]) == ("early stop" in name)
