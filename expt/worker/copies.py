"""Copies of a model, a task and samples, on which custom code is tried that may change them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from expt.data import changes
from expt.data.changes import Watched
from expt.data.loading import Batch, leaves
from expt.tasks.task import Task
from expt.training import batch_norm, random_state
from expt.training.learner import Learner
from expt.training.strategy import can_be_cut, copied, part_of

SAMPLES = 8
"""Samples on which a custom model or task is tried."""
T = TypeVar("T")


@dataclass(frozen=True)
class Copies:
    """Copies of the model, the task and samples, on which code is tried that may change them."""

    learner: Learner
    device: torch.device

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Run the body in the learner's precision, without gradients and compiled code.

        Random numbers are restored after it.
        """
        autocast = self.learner.precision.autocast()
        eager: Any = contextlib.nullcontext()
        if self.learner.compiled:
            eager = torch.compiler.set_stance("force_eager")
        with random_state.kept(self.device), torch.no_grad(), eager, autocast:
            yield

    def make(self, batch: T, seed: int) -> tuple[nn.Module, Task, T]:
        """Return all that custom code may change in place, after seeding random numbers."""
        learner = self.learner
        parts = (*learner.module.modules(), learner.task)
        kept = (one for part in parts for one in leaves(vars(part)) if not one.is_leaf)
        # torch refuses to copy tensors that the last step has computed
        memo: Any = {id(one): one.detach().clone() for one in kept}
        module, task, batch = copy.deepcopy((learner.module, learner.task, batch), memo)
        batch_norm.part_from_workers(module)
        random_state.seed(seed)
        return module, task, batch


class Look:
    """A few samples of a batch before it is used, and the state of custom modules then."""

    def __init__(self, batch: Batch) -> None:
        self._few = first_samples(batch) if can_be_cut(batch) and not batch.weightless else None
        self._watched = [Watched(one, {}) for one in changes.own_modules_and_classes().values()]

    def samples(self) -> Batch | None:
        """Return them; None if the batch can't be cut, or if its use has changed the state."""
        return None if any(each.lost({}) for each in self._watched) else self._few


def first_samples(batch: Batch, number: int = SAMPLES) -> Batch:
    """Return a copy of the first samples, which a step may change."""
    few = copied(part_of(batch, slice(number)))
    return few._replace(global_size=few.size)
