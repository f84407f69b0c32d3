"""Settings that each go on exactly, together: a run that is stopped within an epoch ends as one
that was not."""

from __future__ import annotations

import pytest
import torch

from expt.runs import checkpoint
from expt.worker.run import Run
from tests.conftest import as_typed
from tests.worker.conftest import TrainAlone
from tests.worker.test_callbacks import words
from tests.worker.test_run import values

FEW = ("dataset.train_limit=384", "tensorboard.images=false", "log_every=2")
MIXTURES = {
    "mixup, average, parts, groups, plateau, early stop, class weights, a fold": (
        *(
            "mixup=0.4",
            "ema=0.8",
            "optimizer.groups=[{match: '^3', lr_scale: 0.1, weight_decay: 0.1}]",
        ),
        *(
            *as_typed("scheduler=plateau scheduler.patience=0 scheduler.min_delta=0.05"),
            *as_typed("scheduler.metric=accuracy/val"),
        ),
        *(
            "early_stop={metric: accuracy/val, patience: 2, min_delta: 0.03}",
            "task.class_weights=balanced",
        ),
        *("dataset.folds=3", "dataset.fold=1", "epochs=9", "seed=7", "gradient_accumulation=2"),
    ),
    "cutmix, parts, transforms, balanced sampling, a callback": (
        *(
            *as_typed("cutmix=1.0 gradient_accumulation=2 dataset.sampling=balanced"),
            *as_typed("drop_last=false epochs=3"),
        ),
        *(
            "dataset.transforms=[{_target_: torchvision.transforms.v2.RandAugment, num_ops: 1}]",
            "threads=1",
        ),
        words("Busy"),
    ),
    "muon, a schedule of one's own, both clips, frozen parameters": (
        *(
            "optimizer=muon",
            "optimizer.lr=0.01",
            "model.hidden=[16,16]",
            "model.dropout=0.2",
            "freeze=['1.bias']",
        ),
        *(
            (
                "scheduler={_target_: torch.optim.lr_scheduler.PolynomialLR, total_iters: 9,"
                " interval: step}"
            ),
            "epochs=3",
        ),
        *("gradient_clip=1.0", "gradient_clip_value=0.05"),
    ),
}


@pytest.mark.parametrize(
    "name", [*[*MIXTURES][:-1], pytest.param([*MIXTURES][-1], marks=pytest.mark.slow)]
)
def test_a_mixture_goes_on_to_the_same_bits(name: str, train_alone: TrainAlone) -> None:
    settings = (*FEW, *MIXTURES[name])
    whole = train_alone(*settings, name="whole")

    def stop(run: Run) -> None:
        run.agreement._asked_to_stop = lambda: run.position.step == run.position.steps_per_epoch + 2

    stopped = train_alone(*settings, name="stopped", before=stop)
    assert stopped.status == "interrupted"
    again = train_alone(
        *settings, name="stopped", source=stopped.folder / "checkpoints" / "last.pt"
    )
    assert values(again) == values(whole)
    assert again.result["stopped_early"] == whole.result["stopped_early"]
    assert bool(whole.result["stopped_early"]) == ("early stop" in name)
    states = [checkpoint.load(run.folder / "checkpoints" / "last.pt") for run in (whole, again)]
    for part in ("model", "ema"):
        for key, weights in states[0].get(part, {}).items():
            assert torch.equal(weights, states[1][part][key]), (part, key)
