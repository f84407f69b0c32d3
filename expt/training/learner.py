"""The parts that a training step needs, and how far a run has come."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from expt.config import secrets
from expt.data.loading import Batch, Progress
from expt.errors import ConfigError, did_you_mean
from expt.tasks.extra_metrics import ExtraMetrics
from expt.tasks.task import Sum, Task
from expt.training.precision import Precision
from expt.training.sharding import local
from expt.training.strategy import Strategy

Add = Callable[[Sum, Any, Batch, bool], None]
"""Gets a micro-batch's loss, the outputs, the batch, and whether it is the first of a step."""
Phases = Mapping[str, tuple[nn.Parameter, ...]]
"""The parameters that each update of a step trains, by its name."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A model and all that an evaluation of it needs."""

    module: nn.Module
    """The bare model: saved, and without `ema` evaluated."""
    precision: Precision
    task: Task
    """The loss of a step, and the metrics."""
    strategy: Strategy
    """The way in which one device, or several together, compute a step."""
    extra_metrics: ExtraMetrics = dataclasses.field(default_factory=lambda: ExtraMetrics({}))
    """Metrics that only evaluations measure."""
    ema: AveragedModel | None = None
    """The moving average of `module`: evaluated and saved, too."""

    @property
    def evaluated(self) -> nn.Module:
        """The model whose numbers count."""
        return self.module if self.ema is None else self.ema.module

    def outputs(self, task: Task, batch: Batch) -> tuple[Any, Batch]:
        """Return the outputs that are evaluated, and the batch with which `task` measures them."""
        return task.forward(self.evaluated, batch), batch


@dataclass(frozen=True, kw_only=True)
class Learner(Evaluator):
    """A model and all that trains it."""

    optimizer: Optimizer
    scheduler: LRScheduler
    scheduler_interval: Literal["epoch", "step"] = "step"
    """The end of a step, or of an epoch once it has been evaluated, advances the schedule."""
    compiled: bool = False
    trained: frozenset[str] = frozenset()
    """The names of the parameters that were not frozen when the model was built."""
    has_closure: bool = False
    """True if the optimizer computes the loss and its gradients itself, once or several times."""
    phases: Phases = dataclasses.field(default_factory=dict)
    """The updates of a step, and the parameters of each; empty where it is one of all."""


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
    """The limit in `total_steps`."""
    offset: int = 0
    """The steps that a fork has done more than its epochs take at their present length."""
    began_at: int = 0
    """The steps of a fork that the other run has done."""
    is_planned: bool = False
    """True if the task has read `total_steps`."""

    @property
    def length(self) -> dict[str, int]:
        """The number of steps of the run, and of its epochs."""
        return {"steps_per_epoch": self.steps_per_epoch, "total_steps": self.total_steps}

    @property
    def is_run_done(self) -> bool:
        """True if every step of the run is done."""
        return self.step >= self.total_steps

    @property
    def ends_by(self) -> str:
        """The key that says when the run ends."""
        return "epochs" if self.max_steps != self.total_steps else "max_steps"

    @property
    def is_within_epoch(self) -> bool:
        """True if some of an epoch's batches were trained on, and some were not."""
        return 0 < self.step_in_epoch < self.steps_per_epoch

    @property
    def steps_left_in_epoch(self) -> int:
        """Steps until the epoch ends, or the run."""
        return min(self.steps_per_epoch - self.step_in_epoch, max(0, self.total_steps - self.step))

    def progress(self, **more: Any) -> Progress:
        """Return where the run is, as tasks and callbacks see it."""

        def note() -> None:
            self.is_planned = True

        at = Progress(epoch=self.epoch, step=self.step, planned=self.total_steps, on_plan=note)
        return dataclasses.replace(at, **more)

    def marked(self, batches: Iterable[Batch], left_out: Collection[str]) -> Iterator[Batch]:
        """Yield the next training batches, each with its progress, however far they are read."""
        now = self.progress(left_out=tuple(left_out))
        for step, batch in enumerate(batches, now.step):
            yield batch._replace(progress=dataclasses.replace(now, step=step))

    def samples(self, batch_size: int, size: int) -> int:
        """Return how many samples of a set of `size` this run has trained on."""
        whole, rest = divmod(self.step - self.began_at, self.steps_per_epoch)
        # An epoch's last batch may be smaller
        of_epoch = min(self.steps_per_epoch * batch_size, size)
        return whole * of_epoch + rest * batch_size

    def begin_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def advance(self) -> None:
        """Count a step."""
        self.step, self.step_in_epoch = self.step + 1, self.step_in_epoch + 1

    def state_dict(self) -> dict[str, int]:
        """Return how far it has come, and how far it is to go if the task has read that."""
        of_fork = ("offset", "began_at") if self.began_at else ()
        planned = {"planned": self.total_steps} if self.is_planned else {}
        keys = "epoch", "step", "step_in_epoch", *of_fork
        return {key: getattr(self, key) for key in keys} | planned

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Be where `state_dict` was called."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.step_in_epoch = state["step_in_epoch"]
        self.began_at, self.is_planned = state.get("began_at", 0), "planned" in state
        self._move(state.get("offset", 0))

    def begin_fork(self, steps_per_epoch: int) -> None:
        """Begin as a fork, where another run with this many steps in an epoch has come."""
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


def trained_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are not frozen."""
    return frozenset(name for name, one in module.named_parameters() if one.requires_grad)


def parameters_of(phases: Mapping[str, str], module: nn.Module) -> Phases:
    """Return each phase's parameters; raise ConfigError for one of none, or one in no phase."""
    named = {name: one for name, one in module.named_parameters() if one.requires_grad}
    found: dict[str, tuple[nn.Parameter, ...]] = {}
    for phase, pattern in phases.items():
        names = [name for name in named if re.search(pattern, name)]
        if not names:
            hint = did_you_mean(pattern.strip("^$.*"), {name.partition(".")[0] for name in named})
            problem = f"{pattern!r} is in no trained parameter's name.{hint}"
            raise ConfigError(f"phases: {phase}: {problem}")
        found[phase] = tuple(named[name] for name in names)
    trained = {parameter for own in found.values() for parameter in own}
    if left := [name for name, parameter in named.items() if parameter not in trained]:
        raise ConfigError(
            f"phases: no phase trains {', '.join(left[:3])}; let one find it, or freeze it"
        )
    return found


class MovingAverage(AveragedModel):
    """torch's, without its copy of `n_averaged` to the device, which the host would wait for."""

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average the weights of `model` in, and copy its buffers."""
        both = zip(self.module.parameters(), model.parameters(), strict=True)
        weights = [(local(own), local(given)) for own, given in both]
        copied = [*zip(self.module.buffers(), model.buffers(), strict=True)]
        average: Any = self.multi_avg_fn
        if self.n_averaged:
            for dtype in {own.dtype for own, _ in weights}:
                alike = (pair for pair in weights if pair[0].dtype == dtype)
                average(*zip(*alike, strict=True), self.n_averaged)
        else:
            copied += weights
        for own, given in copied:
            own.copy_(given)
        self.n_averaged += 1


def ema_of(
    module: nn.Module,
    decay: float,
    before: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> MovingAverage:
    """Return a moving average of `module`, which keeps `decay` of its weights in each update.

    It begins with the weights of the first update; buffers, such as a batch norm's statistics, are
    copied. `before` is applied to the model first. Raises ConfigError if it can't be copied.
    """
    try:
        average = MovingAverage(before(module), multi_avg_fn=get_ema_multi_avg_fn(decay))
    except Exception as error:  # a custom model's attributes may raise anything
        why = f"the model can't be copied ({secrets.said(error)})"
        raise ConfigError(f"ema={decay}: {why}; use ema=null") from error
    return average.requires_grad_(False)
