"""One class for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key, NonNegative
from expt.config.kinds import Better, TaskConfig, own_metrics
from expt.errors import ConfigError
from expt.features import Classes, Feature, at_least_single
from expt.late import functional, torch
from expt.tasks.task import Facts, Sum, Task, mean_of, mean_of_logits

if TYPE_CHECKING:
    from torch import Tensor

    from expt.config.schema import RunConfig
    from expt.data.loading import Batch

ClassWeights = Literal["balanced"] | Annotated[tuple[NonNegative, ...], Field(min_length=2)] | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(TaskConfig):
    """See conf/task/classification.yaml."""

    takes: ClassVar[type[Feature]] = Classes
    METRICS: ClassVar[Mapping[str, Better]] = {"accuracy": "max"}
    MORE: ClassVar[Mapping[str, Better]] = {"balanced_accuracy": "max", "f1": "max"}
    OBJECTIVE: ClassVar[str] = "accuracy"
    name: Annotated[Literal["classification"], Key(fork=False)] = "classification"
    class_weights: ClassWeights = None

    def problems(self, config: RunConfig) -> list[str]:
        """Return the problem of weights of classes."""
        if isinstance(self.class_weights, tuple) and not any(self.class_weights):
            return ["task.class_weights: all are 0, which trains nothing; give a class a weight"]
        if config.dataset.sampling and self.class_weights == "balanced":
            return [
                f"task.class_weights=balanced: dataset.sampling={config.dataset.sampling} evens the"
                " classes out too; use one of them"
            ]
        return []

    def build(self, facts: Facts) -> Task:
        """Return the task, its weights one for each class."""
        number = max(2, facts.targets.shapes.get("num_classes", 0))
        weights, metrics = self._weights(facts), {**self.METRICS, **own_metrics(self)}
        return Classification(facts.label_smoothing, weights, metrics, number)

    def _weights(self, facts: Facts) -> Sequence[float] | None:
        """Return the weights; `balanced` is N / (K * n) for n of N samples and K classes."""
        counts, names = facts.class_counts, facts.targets.names
        if self.class_weights is None or not facts.trains:
            return None
        if self.class_weights != "balanced":
            number = facts.targets.shapes.get("num_classes")
            if number and len(self.class_weights) != number:
                has = f"has {len(self.class_weights)} weights, and there are {number} classes"
                raise ConfigError(f"task.class_weights: {has}; give one for each")
            return self.class_weights
        if not counts:
            raise ConfigError(
                "task.class_weights=balanced: needs the class of each sample before it is read;"
                " give the dataset an attribute `targets`, a list of them, or weights by hand"
            )
        if 0 in counts:
            raise ConfigError(
                f"task.class_weights=balanced: of class {names[counts.index(0)]} there is no sample"
                " to train on; add some, or give weights by hand"
            )
        return [sum(counts) / len(counts) / count for count in counts]


def _compared(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, and the labels or shares of classes in the type that cross-entropy wants."""
    logits, labels = at_least_single(outputs), batch.targets
    return logits, labels if labels.dim() == 1 else labels.to(logits)


class Classification(Task):
    """Cross-entropy of logits [B, num_classes] and labels [B], and accuracy.

    Labels of mixed samples (mixup, cutmix) are shares [B, num_classes]. In the accuracy such a
    sample counts as right by the share of the class that has the highest logit; its class weight is
    the mean of its classes', by their shares.

    With `class_weights`, one for each class, the training loss is the sum of each sample's loss by
    the weight of its class, divided by the sum of these weights over the global batch, as torch's
    CrossEntropyLoss(weight) of all of it; but where labels are shares, torch divides by the number
    of samples. Evaluations and accuracies have no such weights.

    `f1` and `balanced_accuracy`, measured if `metrics` has them, are scikit-learn's: the mean F1 of
    the classes that are a label or a prediction (average="macro"), and the mean recall of those
    that are a label.
    """

    metrics: Mapping[str, str] = Config.METRICS

    def __init__(
        self,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        metrics: Mapping[str, str] = Config.METRICS,
        num_classes: int = 2,
    ) -> None:
        self.metrics = metrics
        self._counted_classes = num_classes if len(metrics) > 1 else 0
        """The classes whose hits are counted; 0 if no metric needs that."""
        self.label_smoothing = label_smoothing
        self.class_weights = (
            None if class_weights is None else torch.tensor(class_weights, dtype=torch.float64)
        )
        self.weight_is_samples = class_weights is None

    @property
    def sums(self) -> Mapping[str, int]:
        """See Task."""
        each = ("hits", "predicted", "given") if self._counted_classes else ()
        return {"accuracy": 1, **dict.fromkeys(each, self._counted_classes)}

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """Return it in float32 or float64."""
        logits, labels = _compared(outputs, batch)
        return functional.cross_entropy(logits, labels, reduction="sum"), outputs.shape[0]

    def training_loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """Return it with label smoothing and class weights."""
        logits, labels = _compared(outputs, batch)
        weights = self.class_weights
        if weights is not None:
            weights = self.class_weights = weights.to(logits)  # once
        total = functional.cross_entropy(
            logits, labels, weights, reduction="sum", label_smoothing=self.label_smoothing
        )
        if weights is None:
            return total, outputs.shape[0]
        return total, (labels @ weights if labels.dim() == 2 else weights[labels]).sum()

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Sum]:
        """Return how many are right, and how many of each class where a metric needs that."""
        highest, labels, size = outputs.argmax(1), batch.targets, outputs.shape[0]
        are_shares = labels.dim() == 2
        if are_shares:
            right = labels.gather(1, highest[:, None]).sum()
        else:
            right = (highest == labels).sum()
        if not self._counted_classes:
            return {"accuracy": (right, size)}
        # By comparison: no kernel waits for the device, or adds up in another order.
        classes = torch.arange(self._counted_classes, device=outputs.device)
        predicted = highest[:, None] == classes
        given = labels if are_shares else labels[:, None] == classes
        each = {"hits": predicted * given, "predicted": predicted, "given": given}
        counts = {name: (values.sum(0), size) for name, values in each.items()}
        return {"accuracy": (right, size), **counts}

    def derive(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the metrics by class; nan where no sample was counted."""
        if not self._counted_classes:
            return {}
        each = [*zip(means["hits"], means["predicted"], means["given"], strict=True)]
        recalls = [hits / given for hits, _, given in each if given]
        f1 = [2 * hits / (more + given) for hits, more, given in each if more + given]
        return {"balanced_accuracy": mean_of(recalls), "f1": mean_of(f1)}

    def predict(self, outputs: Tensor) -> Tensor:
        """Return probabilities [B, num_classes]."""
        return at_least_single(outputs).softmax(1)

    def mean_outputs(self, several: Sequence[Tensor]) -> Tensor:
        """See Task."""
        return mean_of_logits(several, 1)

    def predictions(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return probabilities [B, num_classes] and labels."""
        return self.predict(outputs), batch.targets
