"""Loss and accuracy as sums over samples: added on the device, reduced over all workers once, divided once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Averages(NamedTuple):
    """What a log point shows; `samples` are those of all workers."""

    loss: float
    accuracy: float
    samples: int


class Sums:
    """Running sums of loss, correct predictions and samples, on `device`; nothing here waits for the device."""

    def __init__(self, device: torch.device) -> None:
        # float64: a float32 sum over a large set would lose the last samples. MPS has none.
        self.values = torch.zeros(3, dtype=torch.float64, device=device)
        self.logged = self.values.clone()
        """The sums at the last log point."""

    def add(self, logits: torch.Tensor, labels: torch.Tensor, loss_sum: torch.Tensor) -> None:
        """Count a batch: `logits` [B, num_classes], `labels` [B] (-100 counts for nothing), summed loss []."""
        correct = (logits.argmax(1) == labels).sum()
        self.values += torch.stack((loss_sum.double(), correct.double(), (labels >= 0).sum().double()))

    def reset(self) -> None:
        """Start again from zero."""
        self.values.zero_()
        self.logged.zero_()

    def put_back(self, values: Sequence[float], logged: Sequence[float]) -> None:
        """Go on from earlier sums."""
        self.values.copy_(torch.tensor(values, dtype=torch.float64))
        self.logged.copy_(torch.tensor(logged, dtype=torch.float64))


def averages(values: torch.Tensor) -> Averages:
    """Mean loss and accuracy from summed values [3]. Waits for the device.

    Raises ValueError if no sample was counted.
    """
    loss_sum, correct, count = values.tolist()
    if not count:
        raise ValueError("no sample was counted")
    return Averages(loss_sum / count, correct / count, int(count))
