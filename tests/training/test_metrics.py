"""Sums over samples, and the averages they make, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expt.errors import Diverged
from expt.training.metrics import Sums, averages

CPU = torch.device("cpu")


def test_averages_of_unequal_batches() -> None:
    rng = np.random.default_rng(0)
    sums = Sums(CPU)
    losses, hits = [], []
    for size in (64, 64, 7):
        logits, labels, loss = rng.normal(size=(size, 10)), rng.integers(0, 10, size), rng.random(size)
        sums.add(torch.from_numpy(logits), torch.from_numpy(labels), torch.tensor(loss.sum()))
        losses.append(loss)
        hits.append(logits.argmax(1) == labels)
    found = averages(sums.values)
    assert found.loss == pytest.approx(np.concatenate(losses).mean())
    assert (found.accuracy, found.samples) == (np.concatenate(hits).mean(), 135)


def test_an_ignored_label_counts_for_nothing() -> None:
    sums = Sums(CPU)
    logits = torch.eye(4)
    sums.add(logits, torch.tensor([0, -100, 3, -100]), torch.tensor(6.0))
    assert averages(sums.values) == (3.0, 0.5, 2)


def test_a_large_set_loses_no_sample() -> None:
    sums = Sums(CPU)
    sums.values[:] = 2**24
    sums.add(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor(1.0))
    assert averages(sums.values) == (1.0, 1.0, 2**24 + 1)


@pytest.mark.parametrize("labels", [[], [-100, -100]], ids=["no batch", "all ignored"])
def test_nothing_counted_has_no_average(labels: list[int]) -> None:
    sums = Sums(CPU)
    if labels:
        sums.add(torch.zeros(len(labels), 3), torch.tensor(labels), torch.tensor(0.0))
    with pytest.raises(Diverged, match="no sample was counted"):
        averages(sums.values)


def test_reset_starts_again() -> None:
    sums = Sums(CPU)
    sums.add(torch.eye(2), torch.tensor([0, 0]), torch.tensor(8.0))
    sums.reset()
    sums.add(torch.eye(2), torch.tensor([0, 1]), torch.tensor(1.0))
    assert averages(sums.values) == (0.5, 1.0, 2)
