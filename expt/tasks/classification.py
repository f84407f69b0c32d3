"""One class for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from expt.data.loading import Batch
from expt.tasks.task import Sum, Task


class Classification(Task):
    """Cross-entropy of logits [B, num_classes] and labels [B]; accuracy is the share whose highest
    logit is right.

    Labels of mixed samples (mixup, cutmix) are shares [B, num_classes]. In the accuracy such a
    sample counts as right by the share of the class that has the highest logit; its class weight is
    the mean of its classes', by their shares.

    With `class_weights`, one for each class, the training loss is the sum of each sample's loss by
    the weight of its class, divided by the sum of these weights over the global batch, as torch's
    CrossEntropyLoss(weight) of all of it; but where labels are shares, torch divides by the number
    of samples. What an evaluation reports, and every accuracy, has no such weights."""

    metrics = {"accuracy": "max"}

    def __init__(
        self, label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
    ) -> None:
        self.label_smoothing = label_smoothing
        self.class_weights = (
            None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        )
        self.weight_is_samples = class_weights is None

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """In float32."""
        return (
            functional.cross_entropy(outputs.float(), batch.targets, reduction="sum"),
            outputs.shape[0],
        )

    def training_loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """With label smoothing and class weights."""
        logits, labels = outputs.float(), batch.targets
        weights = self._weights_on(logits.device)
        total = functional.cross_entropy(
            logits, labels, weights, reduction="sum", label_smoothing=self.label_smoothing
        )
        if weights is None:
            return total, outputs.shape[0]
        return total, (labels @ weights if labels.dim() == 2 else weights[labels]).sum()

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """How many are right."""
        highest, labels = outputs.argmax(1), batch.targets
        if labels.dim() == 2:
            return {"accuracy": (labels.gather(1, highest[:, None]).sum(), outputs.shape[0])}
        return {"accuracy": ((highest == labels).sum(), outputs.shape[0])}

    def predict(self, outputs: Tensor) -> Tensor:
        """Probabilities [B, num_classes]."""
        return outputs.float().softmax(1)

    def predictions(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Probabilities [B, num_classes] and labels."""
        return self.predict(outputs), batch.targets

    def _weights_on(self, device: torch.device) -> Tensor | None:
        if self.class_weights is not None and self.class_weights.device != device:
            self.class_weights = self.class_weights.to(device)  # once
        return self.class_weights
