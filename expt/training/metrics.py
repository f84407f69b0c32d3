"""Loss and accuracy as sums over samples: added on the device, reduced over all workers once, divided once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from expt.data.loading import IGNORE_INDEX
from expt.errors import Diverged

MAX_RECENT = 1024
"""Batches whose losses are kept until the next log point."""
MAX_KEPT, MAX_KEPT_LOGITS = 64, 2**20
"""Batches, and their numbers, that are kept to be counted together: a step of a small model feels each kernel."""


class Averages(NamedTuple):
    """What a log point shows; `samples` are those of all workers."""

    loss: float
    accuracy: float
    samples: int


class Sums:
    """Running sums of loss, correct predictions and samples, on `device`; nothing here waits for the device."""

    def __init__(self, device: torch.device, *, finite_only: bool = False, at_once: bool = False) -> None:
        """With `at_once` a batch's logits are used up before the next, which may overwrite them (CUDA graphs do)."""
        # float64: a float32 sum over a large set would lose the last samples. MPS has none.
        self._values = torch.zeros(3, dtype=torch.float64, device=device)
        self.logged = self._values.clone()
        """The sums at the last log point."""
        self._finite_only, self._at_once = finite_only, at_once
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._kept_logits = 0
        self._recent: deque[torch.Tensor] = deque(maxlen=MAX_RECENT)

    @property
    def values(self) -> torch.Tensor:
        """Loss, correct predictions and samples so far, [3]."""
        self._count()
        return self._values

    def add(self, logits: torch.Tensor, labels: torch.Tensor, loss_sum: torch.Tensor) -> None:
        """Count a batch: `logits` [B, num_classes], `labels` [B] (-100 counts for nothing), summed loss [].

        With `finite_only`, one whose loss is not finite is left out.
        """
        loss_sum = loss_sum.detach()
        self._recent.append(loss_sum)
        if self._finite_only:
            finite = loss_sum.isfinite()
            loss_sum, labels = torch.where(finite, loss_sum, 0.0), torch.where(finite, labels, IGNORE_INDEX)
        self._kept.append((logits.detach(), labels, loss_sum))
        self._kept_logits += logits.numel()
        if self._at_once or len(self._kept) == MAX_KEPT or self._kept_logits >= MAX_KEPT_LOGITS:
            self._count()

    def _count(self) -> None:
        """Add up what was kept."""
        if not self._kept:
            return
        logits, labels, losses = zip(*self._kept, strict=True)
        total, all_labels = self._values[0], torch.cat(labels)
        for loss_sum in losses:  # one by one: the order is in a sum's last digits
            total += loss_sum
        correct = torch.cat(logits).argmax(1) == all_labels
        self._values[1:] += torch.stack((correct.sum(), (all_labels >= 0).sum()))
        self._forget()

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_logits = 0

    def mark_logged(self) -> None:
        """Begin the next stretch between log points."""
        self.logged.copy_(self.values)
        self._recent.clear()

    def first_not_finite(self) -> tuple[int, float] | None:
        """How many batches ago since the last log point a loss was first nan or infinite, and which. Waits."""
        losses = [loss.item() for loss in self._recent]
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        return (len(losses) - 1 - bad[0], losses[bad[0]]) if bad else None

    def reset(self) -> None:
        """Start again from zero."""
        self._values.zero_()
        self.logged.zero_()
        self._forget()
        self._recent.clear()

    def state_dict(self) -> dict[str, list[float]]:
        """What was counted so far, and of it what was logged. Waits for the device."""
        return {"sums": self.values.tolist(), "logged": self.logged.tolist()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from what `state_dict` found."""
        self._forget()
        self._values.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self.logged.copy_(torch.tensor(state["logged"], dtype=torch.float64))


def averages(values: torch.Tensor) -> Averages:
    """Mean loss and accuracy from summed values [3]. Waits for the device.

    Raises Diverged if no sample was counted.
    """
    loss_sum, correct, count = values.tolist()
    if not count:
        raise Diverged("no sample was counted since the last log point: every loss was nan or infinite")
    return Averages(loss_sum / count, correct / count, int(count))


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Cross-entropy of `logits` [B, num_classes] summed over the batch, in float32."""
    return functional.cross_entropy(
        logits.float(), labels, reduction="sum", ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
    )
