"""The contract of tasks and datasets with the configuration. Free of torch."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from expt import registry
from expt.config.constraints import IS_SET, STRICT, Count, Key, Target, kind, plain
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

    @property
    def own_metrics(self) -> dict[str, Better]:
        """Those of `metrics` that the task itself measures."""
        return own_metrics(self.metrics)

    def problems(self, config: RunConfig) -> list[str]:
        """Return a line for each of the run's other settings that does not go with the task."""
        return []

    def outputs(self, targets: Feature) -> Feature:
        """Return the feature that decodes predictions of a run with such `targets`."""
        return targets

    def build(self, facts: Any) -> Any:
        """Return the Task for such data, given as Facts."""
        raise NotImplementedError


def conf_dir() -> Path:
    """Return the folder of expt's YAML: in the package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file, interpolations as they are written."""
    import yaml  # late: most runs need none

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 15 times as fast
    return yaml.load(path.read_bytes(), loader)


def metrics_of(task: Any) -> dict[str, Better]:
    """Return the loss and the metrics of a task or its record, and which way each is better."""
    more = task.get("metrics") if isinstance(task, Mapping) else getattr(task, "metrics", {})
    more = more if isinstance(more, Mapping) else {}  # which is refused later
    return {
        "loss": "min",
        **getattr(_kind(task), "METRICS", {}),
        **{name: _better(metric) for name, metric in more.items()},
    }


def _kind(task: Any) -> Any:
    if not isinstance(task, Mapping):
        return type(task)
    return registry.groups()["task"].get(
        "_target_" if "_target_" in task else str(task.get("name"))
    )


def _better(metric: Any) -> Better:
    """Return which way is better of a metric as a task, its YAML or a record has it."""
    if isinstance(metric, Mapping):
        return cast(Better, metric.get("better"))
    return cast(Better, getattr(metric, "better", metric))


def own_metrics(metrics: Mapping[str, Any]) -> dict[str, Better]:
    """Return the metrics that the task itself measures, and which way each is better."""
    own = {name: one for name, one in metrics.items() if not isinstance(one, TargetMetric)}
    return {name: _better(metric) for name, metric in own.items()}


def every_of(task: Any) -> dict[str, int]:
    """Return the metrics of a task, or of its YAML, that are not of training, and their `every`."""
    found, settings = dict[str, int](), plain(getattr(task, "metrics", task))
    metrics = settings.get("metrics", settings) if isinstance(settings, Mapping) else {}
    for name, one in metrics.items() if isinstance(metrics, Mapping) else ():
        if isinstance(one, Mapping):
            number, is_own = one.get("every", 1), {"_target_", "target"}.isdisjoint(one)
            if number != 1 or not one.get("train", is_own):
                found[name] = number
    return found


def only_in_evaluations(task: Any) -> dict[str, TargetMetric]:
    """Return the task's metrics that are torchmetrics'."""
    return {
        name: metric for name, metric in task.metrics.items() if isinstance(metric, TargetMetric)
    }


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
    return getattr(_kind(task), "OBJECTIVE", chosen_metric(task))


CUSTOM_DATASET_KEYS = frozenset(
    "num_classes num_workers val_fraction val_split train_limit mean std augment folds fold"
    " group sampling shuffle".split()
)
"""Keys that every custom dataset has, named in its YAML or not."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    """How training images are moved; conf/dataset has the meaning of each key."""

    crop_padding: Annotated[int, Field(ge=0)] = 0
    padding_mode: Annotated[
        Literal["constant", "reflect"], Key(only_if={"dataset.augment.crop_padding": IS_SET})
    ] = "constant"
    flip: bool | Literal["alternate"] = False
    cutout: Annotated[int, Field(ge=0)] = 0

    @property
    def is_set(self) -> bool:
        """True if images are changed at all."""
        return any(getattr(self, field.name) != field.default for field in dataclasses.fields(self))
