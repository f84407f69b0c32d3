"""Regression on a table: the numbers are those of a plain single-process loop, whatever the number
of workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from expt.config.identity import REPEATED, identity
from expt.data import indexing
from expt.data.kinds import table
from expt.models.vision import MLP
from tests.conftest import Configured, Trained, as_typed

SEED, BATCH, EPOCHS, LR = 3, 36, 2, 0.01


def _plain_loop() -> tuple[list[float], dict[str, float]]:
    """Loss of each step, and metrics of the test set, of a loop without expt's training code."""
    raw = np.loadtxt(table.DIABETES, delimiter=",", skiprows=1)
    rest, test = indexing.split(len(raw), 0.2, None)
    train, _ = indexing.split_fold(torch.zeros(len(rest)), 5, 1, None)
    chosen = raw[rest[train]]
    values = torch.from_numpy((raw - chosen.mean(0)) / chosen.std(0)).float()
    torch.manual_seed(SEED)
    net = MLP(channels=1, image_size=(1, 10), num_classes=1, hidden=(8,))
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    losses: list[float] = []
    for epoch in range(1, EPOCHS + 1):
        order = rest[train][indexing.permutation(len(train), SEED, epoch)]
        for batch in order.split(BATCH):
            loss = functional.mse_loss(net(values[batch, :10]), values[batch, 10:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        error = (net(values[test, :10]) - values[test, 10:]).double()
    mse, variance = (
        float(error.square().mean()),
        float(values[test, 10].double().var(unbiased=False)),
    )
    metrics = {
        "loss": mse,
        "mae": float(error.abs().mean()),
        "rmse": mse**0.5,
        "r2": 1 - mse / variance,
    }
    return losses, metrics


def test_the_loss_curve_is_that_of_a_plain_loop(trained: Trained) -> None:
    losses, metrics = _plain_loop()
    done = trained(
        *as_typed("dataset=diabetes task=regression dataset.standardise_targets=true"),
        *as_typed("dataset.folds=5 dataset.fold=1 model.hidden=[8] log_every=1 threads=1"),
        *as_typed(f"optimizer.lr={LR} batch_size={BATCH} epochs={EPOCHS} seed={SEED}"),
        *as_typed("world_size=2 gradient_accumulation=3 drop_last=false"),
    )
    curve = dict(done.curve("running/loss"))
    assert [curve[step] for step in range(1, len(losses) + 1)] == pytest.approx(losses, abs=1e-4)
    assert len(curve) == len(losses)
    found = done.result["metrics"]
    best_is_last = done.result["best"]["epoch"] == EPOCHS
    assert best_is_last, "else the test set is seen by another model"
    assert {name: found[f"{name}/test"] for name in metrics} == pytest.approx(metrics, abs=1e-4)
    assert (done.result["data"]["train_size"], done.result["data"]["val_size"]) == (283, 71)
    assert len(done.result["data"]["standardised"]) == 11


def test_folds_are_other_runs_that_repeat_one_measurement(configured: Configured) -> None:
    first, second = (
        configured("dataset.folds=5", f"dataset.fold={fold}", f"seed={fold}") for fold in range(2)
    )
    assert identity(first) != identity(second)
    assert identity(first, but=("seed",)) != identity(second, but=("seed",))
    assert identity(first, but=REPEATED) == identity(second, but=REPEATED)
    assert identity(first, but=REPEATED) != identity(configured("seed=0"), but=REPEATED)
