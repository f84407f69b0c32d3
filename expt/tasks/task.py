"""A task: from a model's outputs to the loss that is minimised, and to the metrics that are
reported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from expt.data.loading import Batch

Sum = tuple[Tensor, "Tensor | float"]
"""A sum over the samples of a batch, on its device, and what to divide it by: number of samples,
tokens, pixels, ...
"""


class Task(ABC):
    """What a step computes and what is measured.

    One's own is a subclass, with its metrics named in YAML: in conf/task/robust.yaml

        _target_: tasks.Robust
        metrics: {mae: min}

    and in tasks.py

        class Robust(expt.Task):
            def loss(self, outputs, batch):
                return functional.huber_loss(outputs, batch.targets, reduction="sum"), len(outputs)

            def measure(self, outputs, batch):
                return {"mae": ((outputs - batch.targets).abs().sum(), len(outputs))}

    Whatever the number of workers and of parts of gradient accumulation, what is minimised is the
    sum of the losses of the *global* batch by the sum of their weights, and a metric is the sum
    over a split by the sum of its weights."""

    metrics: Mapping[str, str] = {}
    """What is reported beside the loss, and which way each is better, `min` or `max`; of a task of
    one's own, its
    YAML says it."""
    weight_is_samples = False
    """Whether the loss's weight is the number of samples. It is known before the step then, and not
    summed over all
    workers."""

    @property
    def sums(self) -> Mapping[str, int]:
        """What `measure` gives, and of how many values each sum is: one for each metric, if nothing
        else is said.
        """
        return dict.fromkeys(self.metrics, 1)

    def forward(self, model: Callable[..., Any], batch: Batch) -> Any:
        """What the model makes of a batch."""
        return model(batch.inputs)

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Sum:
        """The summed loss [] and its weight."""

    def training_loss(self, outputs: Any, batch: Batch) -> Sum:
        """What is differentiated, where that is not the loss that is reported of an evaluation.

        A loss that looks at the whole global batch, as SimCLR's, gathers the outputs here, where
        each worker has as many (`drop_last=true`): torch.distributed.nn.functional.all_gather hands
        the gradients back."""
        return self.loss(outputs, batch)

    def measure(self, outputs: Any, batch: Batch) -> Mapping[str, Sum]:
        """The sums of the other metrics, without gradients; each of as many values as `sums` says."""
        return {}

    def predict(self, outputs: Any) -> Any:
        """What a person is told of samples by a model's outputs, as `expt predict` does: the
        outputs, if nothing else.

        A tensor [B, ...], or containers of such.
        """
        return outputs

    def predictions(self, outputs: Any, batch: Batch) -> tuple[Any, Any]:
        """What a torchmetrics.Metric of `task.metrics` gets: predictions and targets."""
        return outputs, batch.targets

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Metrics that are no averages, from the quotients of all sums, lists where a sum has
        several values.
        """
        return {}
