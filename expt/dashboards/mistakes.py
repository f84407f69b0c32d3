"""What a model gets wrong: gathered batch by batch while it is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from expt.data.loading import Batch


class Mistakes(NamedTuple):
    """Wrongly classified samples, the most costly first."""

    losses: Tensor
    """[K], cross-entropy"""
    labels: Tensor
    """int64 [K]"""
    predicted: Tensor
    """int64 [K]"""
    probabilities: Tensor
    """[K], which the model gave to the predicted class"""
    images: Tensor
    """[K, C, H, W] as the model saw them"""


class Review:
    """Observes an evaluation; holds this worker's confusion matrix and its `keep` worst mistakes."""

    def __init__(self, num_classes: int, *, keep: int) -> None:
        self._num_classes, self._keep = num_classes, keep
        self.confusion: Tensor | None = None
        """int64 [true class, predicted class]; None before the first batch"""
        self._parts: list[Mistakes] = []

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        """Take in a batch, whose labels must all count, and its logits [B, num_classes].

        Waits for no device.
        """
        classes, labels = self._num_classes, batch.targets
        chances = logits.float().log_softmax(1)
        highest, predicted = chances.max(1)
        if self.confusion is None:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=labels.device)
        # Not bincount, which asks the device how many cells there are.
        self.confusion.view(-1).index_add_(0, labels * classes + predicted, torch.ones_like(labels))
        losses = chances.gather(1, labels[:, None])[:, 0].neg()
        losses = losses.masked_fill(predicted == labels, -1.0)
        worst = losses.topk(min(self._keep, len(losses))).indices
        picked = (
            part.index_select(0, worst)
            for part in (losses, labels, predicted, highest.exp(), batch.inputs)
        )
        self._parts.append(Mistakes(*picked))

    def mistakes(self) -> Mistakes | None:
        """The worst of all batches, on the CPU; None where there was no batch."""
        return worst_of(self._parts, self._keep)


def worst_of(parts: Sequence[Mistakes], keep: int) -> Mistakes | None:
    """The `keep` most costly mistakes of all `parts`, on the CPU."""
    if not parts:
        return None
    joined = Mistakes(*(torch.cat(column) for column in zip(*parts, strict=True)))
    order = joined.losses.argsort(descending=True, stable=True)[:keep]
    found = Mistakes(*(column.index_select(0, order).cpu() for column in joined))
    wrong = int((found.losses >= 0).sum())  # those that are right come last, see Review
    return Mistakes(*(column[:wrong] for column in found))
