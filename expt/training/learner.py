"""What a training step changes, and how far a run has come."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from expt.config import secrets
from expt.data.loading import Batch
from expt.errors import ConfigError, did_you_mean
from expt.tasks.extra_metrics import ExtraMetrics
from expt.tasks.task import Sum, Task
from expt.training.precision import Precision

Add = Callable[[Sum, Any, Batch, bool], None]
"""Gets of a batch, or a part of it, the loss, the model's outputs, and whether it is a step's
first.
"""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """What an evaluation looks at, and how."""

    module: nn.Module
    """The bare model: saved, and without `ema` evaluated."""
    precision: Precision
    task: Task
    """What a step computes, and what is measured."""
    extra_metrics: ExtraMetrics = dataclasses.field(default_factory=lambda: ExtraMetrics({}))
    """What evaluations measure beside the task's own."""
    in_step: Callable[[Iterable[Batch]], Iterable[Batch]] = iter
    """From this worker's batches of an evaluation to those that it computes: where a forward pass
    is a collective, as
    many as any other worker has."""

    @property
    def evaluated(self) -> nn.Module:
        """The model whose numbers count."""
        return self.module


@dataclass(frozen=True, kw_only=True)
class Learner(Evaluator):
    """What a training step changes, and how."""

    parallel: nn.Module
    """The model that is trained: `module`, or DistributedDataParallel around it."""
    optimizer: Optimizer
    scheduler: LRScheduler
    world_size: int
    scheduler_interval: Literal["epoch", "step"] = "step"
    """After what the schedule advances: after an epoch, that is when it has been evaluated."""
    compiled: bool = False
    gradient_accumulation: int = 1
    average_statistics: Callable[[], None] = lambda: None
    """Ends a step where buffers that the next one reads are to be alike on all workers; a
    collective.
    """
    all_reduce_s: Callable[[int], float | None] = lambda _: None
    """Seconds that its first N steps have spent on averaging gradients, waiting for the others'
    included; None where
    that is not known."""
    ema: AveragedModel | None = None
    """The moving average of `module`: evaluated, and saved beside."""
    shards: int = 1
    """Workers that share one replica of the weights; with 1 each has all of them.

    Else `parallel` is `module`.
    """
    drop_unused: Callable[[], None] = lambda: None
    """Leaves parameters of a sharded model without a gradient that no worker has used in the step;
    a collective.
    """
    copy_evaluated: Callable[[], nn.Module] | None = None
    """Gives rank 0 the whole of the sharded model that is evaluated, where that is asked for; a
    collective.
    """
    reduces_each_part: bool = False
    """Whether shards average gradients after each part of a batch, so that no worker ever has all
    of them.
    """
    phases: Phases = dataclasses.field(default_factory=dict)
    """The updates that a step is made of, and the parameters of each; empty where it is one of all.
    """

    @property
    def evaluated(self) -> nn.Module:
        """The model whose numbers count."""
        return self.module if self.ema is None else self.ema.module


@dataclass
class Position:
    """How far a run has come."""

    steps_per_epoch: int
    total_steps: int
    """Optimiser steps of the whole run, which may end within an epoch."""
    epoch: int = 0
    """Epochs begun."""
    step: int = 0
    """Optimiser steps done since the start of the run."""
    step_in_epoch: int = 0
    epochs: int = 0
    max_steps: int | None = None
    """What `total_steps` is made of."""
    offset: int = 0
    """Of a fork: steps done more than its epochs would have taken, had they always had as many as
    now.
    """
    began_at: int = 0
    """Of a fork: the steps that the other run has done of them."""

    @property
    def length(self) -> dict[str, int]:
        """That of the run, and of its epochs."""
        return {"steps_per_epoch": self.steps_per_epoch, "total_steps": self.total_steps}

    @property
    def is_run_done(self) -> bool:
        """Whether every step of the run is done."""
        return self.step >= self.total_steps

    @property
    def is_within_epoch(self) -> bool:
        """Whether some of an epoch's batches were trained on, and some were not."""
        return 0 < self.step_in_epoch < self.steps_per_epoch

    @property
    def steps_left_in_epoch(self) -> int:
        """Steps until the epoch ends, or the run."""
        return min(self.steps_per_epoch - self.step_in_epoch, max(0, self.total_steps - self.step))

    def samples(self, batch_size: int, size: int) -> int:
        """How many this run has trained on, each epoch on as many as its batches hold of the `size`
        of the set.
        """
        whole, rest = divmod(self.step - self.began_at, self.steps_per_epoch)
        of_epoch = min(
            self.steps_per_epoch * batch_size, size
        )  # an epoch's last batch may be smaller
        return whole * of_epoch + rest * batch_size

    def begin_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def advance(self) -> None:
        """A step is done."""
        self.step, self.step_in_epoch = self.step + 1, self.step_in_epoch + 1

    def state_dict(self) -> dict[str, int]:
        """How far it has come, without how far it is to go."""
        of_fork = {"offset": self.offset, "began_at": self.began_at} if self.began_at else {}
        return {
            "epoch": self.epoch,
            "step": self.step,
            "step_in_epoch": self.step_in_epoch,
            **of_fork,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Be where `state_dict` was called."""
        self.epoch, self.step, self.step_in_epoch = (
            state["epoch"],
            state["step"],
            state["step_in_epoch"],
        )
        self.began_at = state.get("began_at", 0)
        self._move(state.get("offset", 0))

    def begin_fork(self, steps_per_epoch: int) -> None:
        """Begin as a fork here, where another run with so many steps in an epoch has come."""
        self.began_at = self.step
        if self.step_in_epoch and self.step_in_epoch < steps_per_epoch:
            done = (self.epoch - 1) * self.steps_per_epoch + self.step_in_epoch
        else:
            done, self.step_in_epoch = self.epoch * self.steps_per_epoch, self.steps_per_epoch
        self._move(self.step - done)

    def _move(self, offset: int) -> None:
        if offset != self.offset:
            self.offset, total = offset, self.epochs * self.steps_per_epoch + offset
            self.total_steps = total if self.max_steps is None else min(total, self.max_steps)


Phases = Mapping[str, frozenset[nn.Parameter]]


def parameters_of(phases: Mapping[str, str], module: nn.Module) -> Phases:
    """The parameters of each phase, which a regular expression finds by name.

    Raises ConfigError for one that finds nothing, and for a parameter that is trained in no phase.
    """
    named = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    found: dict[str, frozenset[nn.Parameter]] = {}
    for phase, pattern in phases.items():
        try:
            names = [name for name in named if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(
                f"phases: {phase}: {pattern!r} is no regular expression: {error}"
            ) from error
        if not names:
            hint = did_you_mean(pattern.strip("^$.*"), {name.partition(".")[0] for name in named})
            raise ConfigError(
                f"phases: {phase}: {pattern!r} is in no trained parameter's name.{hint}"
            )
        found[phase] = frozenset(named[name] for name in names)
    left = [
        name
        for name, parameter in named.items()
        if not any(parameter in own for own in found.values())
    ]
    if left and phases:
        raise ConfigError(
            f"phases: no phase trains {', '.join(left[:3])}; let one find it, or freeze it"
        )
    return found


@contextlib.contextmanager
def training_only(
    trained: frozenset[nn.Parameter], all_trained: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Within it no gradient reaches another parameter than the `trained`."""
    others = [parameter for parameter in all_trained if parameter not in trained]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def ema_of(
    module: nn.Module,
    decay: float,
    before: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> AveragedModel:
    """A copy of `module` whose update after each step keeps `decay` of its weights; it begins with
    those of the first.

    Buffers, such as a batch norm's statistics, are copied. The copy is of what `before` makes of
    it. Raises ConfigError where the model can't be copied."""
    try:
        average = AveragedModel(before(module), multi_avg_fn=get_ema_multi_avg_fn(decay))
    except (
        Exception
    ) as error:  # of a person's own model: what copying its attributes raises is of many kinds
        told = secrets.said(error)
        raise ConfigError(
            f"ema={decay}: the model can't be copied ({told}); use ema=null"
        ) from error
    return average.requires_grad_(False)
