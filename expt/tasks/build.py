"""From a task's configuration to the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from expt.config import tasks, user_class
from expt.tasks.classification import Classification
from expt.tasks.language_model import LanguageModel
from expt.tasks.multilabel import Multilabel
from expt.tasks.regression import Regression
from expt.tasks.segmentation import Segmentation
from expt.tasks.task import Task

NO_SHAPES: Mapping[str, Any] = MappingProxyType({})
_CLASSES: dict[type, type[Task]] = {
    tasks.Multilabel: Multilabel,
    tasks.Regression: Regression,
    tasks.LanguageModel: LanguageModel,
}


def build(config: Any, shapes: Mapping[str, Any] = NO_SHAPES, *, label_smoothing: float = 0.0) -> Task:
    """The task, for data of these `shapes` (see DataInfo).

    Raises ConfigError for a class of a person's own that is no Task or does not take its arguments."""
    if isinstance(config, tasks.Classification):
        return Classification(label_smoothing)
    if isinstance(config, tasks.TargetTask):
        own: Task = user_class.build(config.target, Task, **config.kwargs)  # type: ignore[type-abstract]
        own.metrics = config.own_metrics
        return own
    if isinstance(config, tasks.Segmentation):
        return Segmentation(shapes["num_classes"], config.ignore_index)
    names = (field.name for field in dataclasses.fields(config) if field.name not in ("name", "metrics"))
    return _CLASSES[type(config)](**{name: getattr(config, name) for name in names})
