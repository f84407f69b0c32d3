"""A language model's loss and metrics: every token counts alike, and padding for nothing.

Curves and metrics on any number of workers are tested with those of all tasks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from expt.data.loading import Batch
from expt.data.memory import NO_TARGET
from expt.errors import DataError
from expt.tasks.language_model import LanguageModel

VOCAB = 11


def test_padding_counts_nothing() -> None:
    task, logits = (
        LanguageModel(),
        torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0)),
    )
    targets = torch.tensor([[1, 2, 3, 4, 5], [6, 7, NO_TARGET, NO_TARGET, NO_TARGET]])
    total, weight = task.loss(logits, Batch(None, targets, 2))
    kept = torch.cat([logits[0], logits[1, :2]]), torch.cat([targets[0], targets[1, :2]])
    assert total.item() == pytest.approx(
        functional.cross_entropy(*kept, reduction="sum").item(), rel=1e-6
    )
    assert int(weight) == 7
    hits, of = task.measure(logits, Batch(None, targets, 2))["accuracy"]
    assert (int(hits), int(of)) == (int((kept[0].argmax(-1) == kept[1]).sum()), 7)
    nothing, of_none = task.loss(logits, Batch(None, torch.full_like(targets, NO_TARGET), 2))
    assert (nothing.item(), int(of_none)) == (0.0, 0)


def test_a_model_for_other_targets_is_told() -> None:
    with pytest.raises(
        DataError, match=r"gives float32 \[2, 7\] for targets int64 \[2, 5\]; let it give logits"
    ):
        LanguageModel().loss(
            torch.zeros(2, 7), Batch(None, torch.zeros(2, 5, dtype=torch.int64), 2)
        )


def test_a_loss_beyond_measure_has_an_infinite_perplexity() -> None:
    assert LanguageModel().derive({"loss": 1000.0})["perplexity"] == math.inf
    assert math.isnan(LanguageModel().derive({"loss": math.nan})["perplexity"])
