"""Any number of labels for each sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from expt.data.loading import Batch
from expt.errors import DataError
from expt.tasks.regression import aligned
from expt.tasks.task import Sum, Task


class Multilabel(Task):
    """Binary cross-entropy of logits [B, labels] and targets [B, labels] of 0 and 1.

    `accuracy` is the share of all single labels that are right, `f1` the harmonic mean of precision
    and recall over all labels together (micro average)."""

    metrics = {"accuracy": "max", "f1": "max"}
    sums = {"accuracy": 1, "hits": 1, "predicted": 1, "given": 1, "other": 1}
    weight_is_samples = True

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        self._logit = math.log(threshold / (1 - threshold))

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """The mean over a sample's labels, summed over the samples."""
        logits, targets = aligned(outputs, batch.targets)
        total = functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        return total / (targets[:1].numel() or 1), len(targets)

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """Labels that are right, and those of F1."""
        logits, targets = aligned(outputs, batch.targets)
        predicted, given = logits >= self._logit, targets > 0.5
        return {
            "accuracy": ((predicted == given).sum(), targets.numel()),
            "hits": ((predicted & given).sum(), 1),
            "predicted": (predicted.sum(), 1),
            "given": (given.sum(), 1),
            "other": (((targets != 0) & (targets != 1)).sum(), 1),
        }

    def predict(self, outputs: Tensor) -> Tensor:
        """Probabilities [B, labels]."""
        return outputs.float().sigmoid()

    def predictions(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Probabilities and int64 targets, both [B, labels]."""
        logits, targets = aligned(outputs, batch.targets)
        return logits.sigmoid(), (targets > 0.5).long()

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """F1; 0 where there is neither a label nor a prediction of one.

        Raises DataError for what is no label.
        """
        if means["other"]:
            raise DataError(
                "some targets are neither 0 nor 1; task=multilabel takes no others, task=regression"
                " does"
            )
        of_either = means["predicted"] + means["given"]
        return {"f1": 2 * means["hits"] / of_either if of_either else 0.0}
