"""The mean outputs of several trained models, or of one on images and their mirror images."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from expt.data.build import EvaluationData
from expt.data.loading import Batch, mapped
from expt.features import at_least_single
from expt.inference.load import TrainedModel
from expt.tasks.task import Task


class Member(NamedTuple):
    """A trained model and its task."""

    trained: TrainedModel
    task: Task
    way: int
    """The key of its inputs in a batch; models with equally prepared samples share one."""


@dataclass(frozen=True)
class Ensemble:
    """Models whose outputs are averaged as their task does; with `flips` also of flipped images."""

    members: Sequence[Member]
    flips: bool = False

    def __call__(self, task: Task, batch: Batch) -> tuple[Any, Batch]:
        """Return the mean outputs, and the batch as the first model's `task` measures it.

        The inputs of `batch` are a mapping with those of each way in which they are prepared; a
        model whose way is not there has no part in the mean.
        """
        there = [one for one in self.members if one.way in batch.inputs]
        found = list[Any]()
        for member in there:
            its_task = copy.copy(member.task) if batch.weightless else member.task
            its_task = task if member is self.members[0] else its_task
            for outputs in self._outputs(member, its_task, batch):
                found.append(self._in_scale(outputs, member))
        inputs, targets = batch.inputs[there[0].way], self._in_scale(batch.targets, there[0])
        outputs = found[0] if len(found) == 1 else task.mean_outputs([*map(_wide, found)])
        return outputs, batch._replace(inputs=inputs, targets=targets)

    def _in_scale(self, tree: Any, member: Member) -> Any:
        """Return values that are standardised as a model's targets as if by the first one's."""
        own, wanted = (x.trained.features.targets for x in (member, self.members[0]))
        if own.scales == wanted.scales:
            return tree

        def moved(each: torch.Tensor) -> torch.Tensor:
            # A number that is rounded twice would be written with its errors.
            units = torch.as_tensor(own.as_written(each), device=each.device)
            return wanted.from_units(units)  # in float64, which keeps its digits

        return mapped(moved, tree)

    def _outputs(self, member: Member, task: Task, batch: Batch) -> Iterator[Any]:
        trained, inputs = member.trained, batch.inputs[member.way]
        with torch.autocast(trained.preprocess.device.type, enabled=False), trained.autocast():
            yield task.forward(trained.model, batch._replace(inputs=inputs))
            if self.flips:
                flipped = task.forward(trained.model, batch._replace(inputs=_flipped(inputs)))
                is_mask = trained.features.targets.each == "pixel"
                yield _flipped(flipped) if is_mask else flipped


def _wide(tree: Any) -> Any:
    """Return outputs of 16 bits as float32, else their mean would be rounded again."""
    return mapped(lambda one: at_least_single(one) if one.is_floating_point() else one, tree)


def _flipped(tree: Any) -> Any:
    """Return images, or the outputs for their pixels, from right to left."""
    return mapped(lambda one: one.flip(-1), tree)


@dataclass(frozen=True)
class Together:
    """The samples of an evaluation as each model takes them, see `plan.shared`."""

    rounds: Sequence[Mapping[int, EvaluationData]]
    """The same samples in several ways; then others."""

    @property
    def size(self) -> int:
        """Samples over all workers."""
        return sum(next(iter(data.values())).size for data in self.rounds)

    def evaluation(self) -> Iterator[Batch]:
        """Yield this worker's samples, as EvaluationData does."""
        for data in self.rounds:
            for batches in zip(*(each.evaluation() for each in data.values()), strict=True):
                inputs = dict(zip(data, (one.inputs for one in batches), strict=True))
                yield batches[0]._replace(inputs=inputs)
