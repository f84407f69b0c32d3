"""From a task's configuration to the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from expt.config import tasks, user_class
from expt.errors import ConfigError
from expt.tasks.classification import Classification
from expt.tasks.language_model import LanguageModel
from expt.tasks.multilabel import Multilabel
from expt.tasks.regression import Regression
from expt.tasks.segmentation import Segmentation
from expt.tasks.task import Task

NO_SHAPES: Mapping[str, Any] = MappingProxyType({})
_CLASSES: dict[type, type[Task]] = {
    tasks.Multilabel: Multilabel,
    tasks.LanguageModel: LanguageModel,
}


def build(
    config: Any,
    shapes: Mapping[str, Any] = NO_SHAPES,
    *,
    label_smoothing: float = 0.0,
    class_counts: Sequence[int] = (),
    class_names: Sequence[str] = (),
    target_origin: float = 0.0,
) -> Task:
    """The task, for data of these `shapes`, counts and names of classes and origin of targets (see
    DataInfo).

    Raises ConfigError for a class of a person's own that is no Task or does not take its
    arguments."""
    if isinstance(config, tasks.Classification):
        return Classification(
            label_smoothing, _class_weights(config.class_weights, class_counts, class_names)
        )
    if isinstance(config, tasks.TargetTask):
        own: Task = user_class.build(config.target, Task, **config.kwargs)  # type: ignore[type-abstract]
        own.metrics = config.own_metrics
        return own
    if isinstance(config, tasks.Regression):
        return Regression(config.loss, target_origin)
    if isinstance(config, tasks.Segmentation):
        return Segmentation(shapes["num_classes"], config.ignore_index)
    names = (
        field.name for field in dataclasses.fields(config) if field.name not in ("name", "metrics")
    )
    return _CLASSES[type(config)](**{name: getattr(config, name) for name in names})


def _class_weights(
    wanted: Any, counts: Sequence[int], names: Sequence[str]
) -> Sequence[float] | None:
    """Those that are given; of `balanced` N / (K * n), of N samples in K classes n of which have
    the class.
    """
    if wanted is None:
        return None
    if wanted != "balanced":
        if len(wanted) != len(names):
            raise ConfigError(
                f"task.class_weights: has {len(wanted)} weights, and there are {len(names)}"
                " classes; give one for each"
            )
        weights: Sequence[float] = wanted
        return weights
    if not counts:
        raise ConfigError(
            "task.class_weights=balanced: needs the class of each sample before it is read; give"
            " the dataset an attribute `targets`, a list of them, or weights by hand"
        )
    if 0 in counts:
        raise ConfigError(
            f"task.class_weights=balanced: of class {names[counts.index(0)]} there is no sample to"
            " train on; add some, or give weights by hand"
        )
    return [sum(counts) / len(counts) / count for count in counts]
