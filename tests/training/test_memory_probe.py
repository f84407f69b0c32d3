"""How large a batch fits, with a model that has room for a few images only."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from expt.data.loading import Batch
from expt.training.loop import largest_that_fits
from tests.training.test_loop import SHAPE, learner


class Narrow(nn.Module):
    def __init__(self, room: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.linear, self.room, self.error = nn.Linear(18, 4), room, error

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.room:
            raise self.error("no room")
        logits: torch.Tensor = self.linear(images.flatten(1))
        return logits


@pytest.mark.parametrize(
    ("room", "parts", "expected"),
    [(8, 1, 8), (31, 1, 16), (5, 1, 4), (8, 2, 8), (16, 2, 8), (1, 1, 1), (0, 1, None)],
)
def test_halves_until_it_fits(room: int, parts: int, expected: int | None) -> None:
    batch = Batch(torch.zeros(32, *SHAPE), torch.zeros(32, dtype=torch.long), 32)
    assert largest_that_fits(learner(Narrow(room), gradient_accumulation=parts), batch) == expected


def test_another_error_ends_the_question() -> None:
    batch = Batch(torch.zeros(32, *SHAPE), torch.zeros(32, dtype=torch.long), 32)
    assert largest_that_fits(learner(Narrow(1, ValueError)), batch) is None


@pytest.mark.parametrize("asks_others", ["SyncBatchNorm", "DataParallel"])
def test_where_the_trial_would_hang_or_mislead_there_is_none(asks_others: str) -> None:
    module: nn.Module = Narrow(8)
    if asks_others == "SyncBatchNorm":
        module.norm = nn.SyncBatchNorm(4)
    subject = learner(module)
    if asks_others == "DataParallel":
        subject = dataclasses.replace(subject, parallel=nn.DataParallel(module))
    batch = Batch(torch.zeros(32, *SHAPE), torch.zeros(32, dtype=torch.long), 32)
    assert largest_that_fits(subject, batch) is None
