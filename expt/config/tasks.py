"""The keys of the group `task`: what a run computes and measures; expt/tasks/ has the classes.

Free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key, NonNegative, Target

Better = Literal["min", "max"]
"""Which way a metric is better."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetMetric(Target):
    """A torchmetrics.Metric, measured in evaluations, and which way it is better."""

    better: Better


MetricName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Task:
    metrics: Annotated[
        dict[MetricName, TargetMetric],
        Key(example="task.metrics={auroc: {_target_: torchmetrics.AUROC, better: max}}"),
    ] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Classification(_Task):
    METRICS: ClassVar[Mapping[str, Better]] = {"accuracy": "max"}
    OBJECTIVE: ClassVar[str] = "accuracy"
    name: Annotated[Literal["classification"], Key(fork=False)] = "classification"
    class_weights: (
        Literal["balanced"] | Annotated[tuple[NonNegative, ...], Field(min_length=2)] | None
    ) = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Multilabel(_Task):
    METRICS: ClassVar[Mapping[str, Better]] = {"accuracy": "max", "f1": "max"}
    OBJECTIVE: ClassVar[str] = "f1"
    name: Annotated[Literal["multilabel"], Key(fork=False)]
    threshold: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Regression(_Task):
    METRICS: ClassVar[Mapping[str, Better]] = {"mae": "min", "rmse": "min", "r2": "max"}
    OBJECTIVE: ClassVar[str] = "loss"
    name: Annotated[Literal["regression"], Key(fork=False)]
    loss: Literal["mse", "mae", "huber"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LanguageModel(_Task):
    METRICS: ClassVar[Mapping[str, Better]] = {
        "perplexity": "min",
        "bits_per_token": "min",
        "accuracy": "max",
    }
    OBJECTIVE: ClassVar[str] = "loss"
    name: Annotated[Literal["language_model"], Key(fork=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Segmentation(_Task):
    METRICS: ClassVar[Mapping[str, Better]] = {"mean_iou": "max", "accuracy": "max", "dice": "max"}
    OBJECTIVE: ClassVar[str] = "mean_iou"
    name: Annotated[Literal["segmentation"], Key(fork=False)]
    ignore_index: int
    num_classes: Annotated[int, Field(ge=2)] | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetTask(Target):
    """A custom Task, with the names of its metrics and which way each is better."""

    metrics: Annotated[
        dict[str, Better | TargetMetric], Key(example="'task.metrics={near: max}'")
    ] = dataclasses.field(default_factory=dict)

    @property
    def own_metrics(self) -> dict[str, Better]:
        """The metrics that the task itself measures."""
        return {name: better for name, better in self.metrics.items() if isinstance(better, str)}


TASKS: dict[str, Any] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "language_model": LanguageModel,
    "segmentation": Segmentation,
    "_target_": TargetTask,
}


def metrics_of(task: Any) -> dict[str, Better]:
    """Return the metrics of a task, or of a record of one, and which way each is better."""
    if isinstance(task, Mapping):
        kind, more = _kind(task), task.get("metrics")
        more = more if isinstance(more, Mapping) else {}  # which is refused later
    else:
        kind, more = type(task) if task else Classification, getattr(task, "metrics", {})
    return {
        "loss": "min",
        **getattr(kind, "METRICS", {}),
        **{name: _better(metric) for name, metric in more.items()},
    }


def _kind(task: Mapping[str, Any]) -> Any:
    """Return the class of a task in YAML or a record."""
    return TargetTask if "_target_" in task else TASKS.get(str(task.get("name")), Classification)


def _better(metric: Any) -> Better:
    """Return which way a metric is better, as a task, its YAML or a record has it."""
    found: Any = (
        metric.get("better") if isinstance(metric, Mapping) else getattr(metric, "better", metric)
    )
    return cast(Better, found)


def in_evaluations_alone(task: Any) -> dict[str, TargetMetric]:
    """Return the metrics that are torchmetrics'."""
    return {
        name: metric for name, metric in task.metrics.items() if isinstance(metric, TargetMetric)
    }


def chosen_metric(task: Any) -> str:
    """Return the metric to show besides the loss; the loss itself where there is no other."""
    return next(iter(list(metrics_of(task))[1:]), "loss")


def objective_of(task: Any) -> str:
    """Return the metric by which runs of a task are chosen, unless another is asked for."""
    kind = _kind(task) if isinstance(task, Mapping) else type(task)
    return getattr(kind, "OBJECTIVE", chosen_metric(task))
