"""A language model's loss and metrics: every token counts alike, and padding for nothing.

Curves and metrics on any number of workers are tested with those of all tasks."""

from __future__ import annotations

import math

import pytest
import torch

from expt.data.loading import Batch
from expt.errors import DataError
from expt.tasks.language_model import LanguageModel

VOCAB = 11


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
