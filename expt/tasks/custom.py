"""A task of a custom class."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key, Target
from expt.config.kinds import Metric, own_metrics
from expt.errors import ConfigError
from expt.features import Anything, Feature
from expt.runs import tags
from expt.tasks.task import Facts, Task

if TYPE_CHECKING:
    from expt.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(Target):
    """A custom Task, with the names of its metrics and which way each is better."""

    takes: ClassVar[type[Feature]] = Anything
    metrics: Annotated[dict[str, Metric], Key(example="task.metrics={near: max}")] = (
        dataclasses.field(default_factory=dict)
    )

    def problems(self, config: RunConfig) -> list[str]:
        """Return the names of metrics that can't be tags."""
        return [
            f"task.metrics.{name}: is not a name for a metric; use letters, digits and underscores,"
            " and not loss or another tag that expt writes"
            for name in self.metrics
            if name == "loss" or name in tags.OF_EXPT or not name.isidentifier()
        ]

    def outputs(self, targets: Feature) -> Feature:
        """Return the feature of the task's predictions."""
        return Anything()

    def build(self, facts: Facts) -> Task:
        """Return an instance of the class.

        Raises ConfigError where it is not a Task, or does not take its arguments.
        """
        from expt.config import user_class  # late: it imports the configuration of all kinds

        cls = user_class.resolve(self.target, Task)  # type: ignore[type-abstract]
        task = user_class.construct(f"task._target_={self.target}", cls, (), self.kwargs)
        task.metrics = own_metrics(self)
        for name, how in task.reductions.items():
            if how not in ("last", "max", "min"):
                raise ConfigError(
                    f"{type(task).__name__}.reductions: {name}: {how!r} is none of last, max, min"
                )
        return task
