"""Sums over samples, and the averages they make, against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from expt.errors import Diverged
from expt.training.metrics import MAX_KEPT, MAX_KEPT_LOGITS, Sums, averages

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


def test_sums_are_those_of_single_additions_to_the_bit() -> None:
    """However many batches are counted together, and whenever somebody looks."""
    generator = torch.Generator().manual_seed(0)
    sums, watched, at_once, expected = Sums(CPU), Sums(CPU), Sums(CPU, at_once=True), torch.zeros(3).double()
    for _ in range(2 * MAX_KEPT + 3):
        logits, labels = torch.randn(5, 4, generator=generator), torch.randint(4, (5,), generator=generator)
        loss = torch.rand((), generator=generator) * 10 ** torch.randint(-9, 9, (), generator=generator)
        for each in (sums, watched, at_once):
            each.add(logits, labels, loss)
        expected[0] += loss.double()
        expected[1:] += torch.tensor([int((logits.argmax(1) == labels).sum()), 5])
        assert torch.equal(watched.values, expected)
    assert torch.equal(sums.values, expected)
    assert torch.equal(at_once.values, expected)


def test_a_batch_that_may_be_overwritten_is_counted_before() -> None:
    sums, logits, loss = Sums(CPU, at_once=True), torch.eye(2), torch.tensor(1.0)
    sums.add(logits, torch.tensor([0, 1]), loss)
    logits.zero_()
    assert averages(sums.values) == (0.5, 1.0, 2)


def test_a_step_computes_nothing_for_the_sums() -> None:
    """A small model feels each kernel."""
    sums, logits, labels, loss = Sums(CPU), torch.eye(2), torch.tensor([0, 1]), torch.tensor(1.0)
    sums.add(logits, labels, loss)
    with Operators() as found:
        sums.add(logits, labels, loss)
    assert set(found.names) == {"detach"}


def test_a_loss_that_is_not_finite_is_left_out_with_its_batch() -> None:
    sums = Sums(CPU, finite_only=True)
    for loss in (1.0, math.nan, math.inf, 3.0):
        sums.add(torch.eye(2), torch.tensor([0, 0]), torch.tensor(loss))
    assert averages(sums.values) == (1.0, 0.5, 4)
    assert sums.first_not_finite() is not None


def test_large_logits_are_not_kept() -> None:
    sums, logits = Sums(CPU), torch.zeros(1, MAX_KEPT_LOGITS // 2)
    sums.add(logits, torch.tensor([0]), torch.tensor(1.0))
    with Operators() as found:
        sums.add(logits, torch.tensor([0]), torch.tensor(1.0))
    assert "argmax" in found.names


def test_what_is_kept_is_forgotten_where_another_state_is_loaded() -> None:
    sums = Sums(CPU)
    sums.add(torch.eye(2), torch.tensor([0, 1]), torch.tensor(1.0))
    sums.load_state_dict({"sums": [4.0, 1.0, 2.0], "logged": [0.0, 0.0, 0.0]})
    assert averages(sums.values) == (2.0, 0.5, 2)


class Operators(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
