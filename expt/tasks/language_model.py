"""The next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key
from expt.config.kinds import Better, TaskConfig
from expt.errors import DataError, described
from expt.features import NO_TARGET, Feature, Tokens, at_least_single
from expt.late import functional
from expt.tasks.task import Facts, Sum, Task, mean_of_logits

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.loading import Batch


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(TaskConfig):
    """See conf/task/language_model.yaml."""

    takes: ClassVar[type[Feature]] = Tokens
    METRICS: ClassVar[Mapping[str, Better]] = {
        "perplexity": "min",
        "bits_per_token": "min",
        "accuracy": "max",
    }
    OBJECTIVE: ClassVar[str] = "loss"
    name: Annotated[Literal["language_model"], Key(fork=False)]

    def build(self, facts: Facts) -> Task:
        """Return the task."""
        return LanguageModel()


class LanguageModel(Task):
    """Cross-entropy of logits [B, T, V] and targets [B, T], the token that follows each.

    NO_TARGET does not count, and every other token counts once, whatever the lengths: loss and
    metrics are means over the tokens of the global batch, or of the split. `perplexity` is
    exp(loss), `bits_per_token` loss / ln 2; where tokens are bytes, bits per byte.
    """

    metrics = Config.METRICS
    sums = {"accuracy": 1}

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """Return it in float32 or float64, nats."""
        logits, targets = _flat(outputs, batch.targets)
        total = functional.cross_entropy(
            at_least_single(logits), targets, ignore_index=NO_TARGET, reduction="sum"
        )
        return total, (targets != NO_TARGET).sum()

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """Return how many tokens have the highest logit."""
        logits, targets = _flat(outputs, batch.targets)
        return {"accuracy": ((logits.argmax(-1) == targets).sum(), (targets != NO_TARGET).sum())}

    def mean_outputs(self, several: Sequence[Tensor]) -> Tensor:
        """See Task."""
        return mean_of_logits(several, -1)

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Return metrics of the loss; a perplexity too large for a float is infinite."""
        loss = means["loss"]
        return {
            "perplexity": math.inf if loss > 709 else math.exp(loss),
            "bits_per_token": loss / math.log(2),
        }


def _flat(logits: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Return logits [B * T, V] and targets [B * T].

    Raises DataError where they are not of the same tokens.
    """
    if getattr(logits, "shape", ())[:-1] != getattr(targets, "shape", None):
        raise DataError(
            f"the model gives {described(logits)} for targets {described(targets)}; let it give"
            " logits [samples, tokens, vocabulary], and a sample have a target for each token"
        )
    if targets.is_floating_point():
        raise DataError(f"a sample's targets are {targets.dtype}; let them be tokens, int64")
    return logits.flatten(0, -2), targets.flatten().long()
