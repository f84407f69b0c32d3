"""The keys of every kind of task, and the metrics that a task has by them. Free of torch."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from expt import registry
from expt.config.constraints import STRICT, Count, Key, Target, kind, plain
from expt.features import Feature

if TYPE_CHECKING:
    from expt.config.schema import RunConfig


Better = Literal["min", "max"]
"""Which way a metric is better."""
Every = Count
"""Evaluations from one that measures a metric to the next; beyond 1 training does not."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetMetric(Target):
    """A torchmetrics.Metric, measured in evaluations, and which way it is better."""

    better: Better
    every: Every = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OwnMetric:
    """A metric of the task itself, when it is measured, and which way it is better."""

    better: Better
    train: bool = True
    every: Every = 1


def _form(metric: Any) -> str:
    """Return which form of a metric is written."""
    return kind(metric) or "own" if isinstance(metric, Mapping) else "better"


Metric = Annotated[
    Annotated[Better, Tag("better")]
    | Annotated[OwnMetric, Tag("own")]
    | Annotated[TargetMetric, Tag("_target_")],
    Discriminator(_form),
]


MetricName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskConfig:
    """The keys of every task; a subclass adds its own, its `name` among them."""

    takes: ClassVar[type[Feature]]
    """The targets that it trains on."""
    METRICS: ClassVar[Mapping[str, Better]] = {}
    MORE: ClassVar[Mapping[str, Better]] = {}
    """More metrics of its own that `metrics` may name, such as {f1: max}."""
    OBJECTIVE: ClassVar[str]
    """The metric by which runs are compared where nothing else is asked for."""
    metrics: Annotated[
        dict[MetricName, Metric],
        Key(example="task.metrics={auroc: {_target_: torchmetrics.AUROC, better: max}}"),
    ] = dataclasses.field(default_factory=dict)

    def problems(self, config: RunConfig) -> list[str]:
        """Return a line for each of the run's other settings that does not go with the task."""
        return []

    def outputs(self, targets: Feature) -> Feature:
        """Return the feature that decodes predictions of a run with such `targets`."""
        return targets

    def build(self, facts: Any) -> Any:
        """Return the Task for such data, given as Facts."""
        raise NotImplementedError


def _added(task: Any) -> dict[str, Any]:
    """Return the keys of each metric that a task's configuration, its YAML or its record adds."""
    is_yaml = isinstance(task, Mapping)
    metrics = plain(task.get("metrics") if is_yaml else getattr(task, "metrics", None))
    every = metrics.items() if isinstance(metrics, Mapping) else ()  # or refused later
    return {name: one if isinstance(one, Mapping) else {"better": one} for name, one in every}


def _is_own(metric: Mapping[str, Any]) -> bool:
    """Return whether the task measures a metric, and no class of torchmetrics."""
    return {"_target_", "target"}.isdisjoint(metric)


def metrics_of(task: Any) -> dict[str, Better]:
    """Return the loss and the metrics of a task or its record, and which way each is better."""
    added = {name: one.get("better") for name, one in _added(task).items()}
    return {"loss": "min", **getattr(_class_of(task), "METRICS", {}), **added}


def _class_of(task: Any) -> Any:
    if not isinstance(task, Mapping):
        return type(task)
    name = "_target_" if "_target_" in task else str(task.get("name"))
    return registry.groups()["task"].get(name)


def own_metrics(task: Any) -> dict[str, Better]:
    """Return those of `metrics` that the task itself measures, and which way each is better."""
    return {name: one.get("better") for name, one in _added(task).items() if _is_own(one)}


def every_of(task: Any) -> dict[str, int]:
    """Return the metrics of a task, or of its YAML, that are not of training, and their `every`."""
    added = _added(task).items()
    every = {name: one.get("every", 1) for name, one in added}
    in_training = {name for name, one in added if one.get("train", _is_own(one))}
    return {name: n for name, n in every.items() if n != 1 or name not in in_training}


def only_in_evaluations(task: Any) -> dict[str, TargetMetric]:
    """Return the task's metrics that are torchmetrics'."""
    return {name: one for name, one in task.metrics.items() if isinstance(one, TargetMetric)}


def added_by(task: Any, tag: str) -> str:
    """Return ` Or measure it: ...`, or an empty string for no name of a metric, or a known one."""
    name, _, split = tag.partition("/")
    if split not in ("val", "test") or name in metrics_of(task) or not name.isidentifier():
        return ""
    better = getattr(task, "MORE", {}).get(name)
    value = better or "{_target_: torchmetrics.CLASS, better: max}"
    return f" Or measure it: {shlex.quote(f'+task.metrics.{name}={value}')}"


def chosen_metric(task: Any) -> str:
    """Return the metric to show next to the loss; the loss where there is no other."""
    return next(iter(list(metrics_of(task))[1:]), "loss")


def objective_of(task: Any) -> str:
    """Return the metric by which the runs of a task are chosen where nothing else is asked for."""
    return getattr(_class_of(task), "OBJECTIVE", chosen_metric(task))
