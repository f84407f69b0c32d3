"""One class for each sample."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from expt.data.loading import Batch
from expt.tasks.task import Sum, Task


class Classification(Task):
    """Cross-entropy of logits [B, num_classes] and labels [B]; accuracy is the share whose highest logit is right."""

    metrics = {"accuracy": "max"}
    weight_is_samples = True
    measures_jointly = True

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """In float32."""
        return _cross_entropy(outputs, batch.targets, 0.0), len(outputs)

    def training_loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """With label smoothing."""
        return _cross_entropy(outputs, batch.targets, self.label_smoothing), len(outputs)

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """How many are right."""
        return {"accuracy": ((outputs.argmax(1) == batch.targets).sum(), len(outputs))}

    def predictions(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Probabilities [B, num_classes] and labels."""
        return outputs.float().softmax(1), batch.targets


def _cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=label_smoothing)
