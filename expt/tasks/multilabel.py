"""Any number of labels for each sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key
from expt.config.kinds import Better, TaskConfig
from expt.errors import DataError
from expt.features import Feature, Labels, at_least_single
from expt.late import functional, torch
from expt.tasks.regression import aligned
from expt.tasks.task import Facts, Sum, Task

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.loading import Batch


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(TaskConfig):
    """See conf/task/multilabel.yaml."""

    takes: ClassVar[type[Feature]] = Labels
    METRICS: ClassVar[Mapping[str, Better]] = {"accuracy": "max", "f1": "max"}
    OBJECTIVE: ClassVar[str] = "f1"
    name: Annotated[Literal["multilabel"], Key(fork=False)]
    threshold: Annotated[float, Field(gt=0, lt=1)]

    def outputs(self, targets: Feature) -> Feature:
        """Return the labels with the threshold."""
        return dataclasses.replace(targets, threshold=self.threshold)  # type: ignore[call-arg]

    def build(self, facts: Facts) -> Task:
        """Return the task."""
        return Multilabel(self.threshold)


class Multilabel(Task):
    """Binary cross-entropy of logits [B, labels] and targets [B, labels] of 0 and 1.

    `accuracy` is the share of all single labels that are right, `f1` the harmonic mean of precision
    and recall over all labels together (micro average).
    """

    metrics = Config.METRICS
    sums = {"accuracy": 1, "hits": 1, "predicted": 1, "given": 1, "other": 1}
    weight_is_samples = True

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        self._logit = math.log(threshold / (1 - threshold))

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """Return the mean over a sample's labels, summed over the samples."""
        logits, targets = aligned(outputs, batch.targets)
        total = functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        return total / (targets[:1].numel() or 1), len(targets)

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """Return labels that are right, and those of F1."""
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
        """Return probabilities [B, labels]."""
        return at_least_single(outputs).sigmoid()

    def mean_outputs(self, several: Sequence[Tensor]) -> Tensor:
        """See Task."""
        logsigmoid = functional.logsigmoid
        logits = at_least_single(torch.stack([*several]))
        return logsigmoid(logits).logsumexp(0) - logsigmoid(-logits).logsumexp(0)

    def predictions(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return probabilities and int64 targets, both [B, labels]."""
        logits, targets = aligned(outputs, batch.targets)
        return logits.sigmoid(), (targets > 0.5).long()

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Return F1; 0 where there is neither a label nor a prediction of one.

        Raises DataError for a target that is no label.
        """
        if means["other"]:
            raise DataError(
                "some targets are neither 0 nor 1; task=multilabel takes no others, task=regression"
                " does"
            )
        of_either = means["predicted"] + means["given"]
        return {"f1": 2 * means["hits"] / of_either if of_either else 0.0}
