"""The next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from expt.data.loading import Batch
from expt.data.windows import NO_TARGET
from expt.errors import DataError
from expt.tasks.task import Sum, Task


class LanguageModel(Task):
    """Cross-entropy of logits [B, T, V] and targets [B, T], the token that follows each; NO_TARGET
    counts for nothing.

    Every other token counts alike, whatever the lengths: loss and metrics are by the tokens of the
    global batch, or of the split. `perplexity` is exp(loss), `bits_per_token` loss / ln 2; where
    tokens are bytes, bits per byte."""

    metrics = {"perplexity": "min", "bits_per_token": "min", "accuracy": "max"}
    sums = {"accuracy": 1}

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """In float32, nats."""
        logits, targets = _flat(outputs, batch.targets)
        total = functional.cross_entropy(
            logits.float(), targets, ignore_index=NO_TARGET, reduction="sum"
        )
        return total, (targets != NO_TARGET).sum()

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """How many tokens have the highest logit."""
        logits, targets = _flat(outputs, batch.targets)
        return {"accuracy": ((logits.argmax(-1) == targets).sum(), (targets != NO_TARGET).sum())}

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Of the loss; a perplexity beyond what a float holds is infinite."""
        loss = means["loss"]
        return {
            "perplexity": math.inf if loss > 709 else math.exp(loss),
            "bits_per_token": loss / math.log(2),
        }


def _flat(logits: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Logits [B * T, V] and targets [B * T].

    Raises DataError where they are not of the same tokens.
    """
    if (
        not isinstance(logits, Tensor)
        or not isinstance(targets, Tensor)
        or logits.shape[:-1] != targets.shape
    ):
        gives, wanted = (
            list(each.shape) if isinstance(each, Tensor) else None for each in (logits, targets)
        )
        raise DataError(
            f"the model gives {gives} for targets {wanted}; let it give logits [samples, tokens,"
            " vocabulary], and a sample have a target for each token"
        )
    if targets.is_floating_point():
        raise DataError(f"a sample's targets are {targets.dtype}; let them be tokens, int64")
    return logits.flatten(0, -2), targets.flatten().long()
