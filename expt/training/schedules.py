"""The schedule: the learning rate of each step."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from expt.config import groups, user_class
from expt.config.constraints import Unit
from expt.config.kinds import Better
from expt.config.length import Length, Unreached
from expt.errors import ConfigError
from expt.training.parameter_groups import LR_SCALE, OWN, TRAINED_EPOCHS, own_numbers, rate_of

COUNTS: Mapping[type, tuple[str, int]] = MappingProxyType(
    {StepLR: ("step_size", 0), MultiStepLR: ("milestones", 0), ReduceLROnPlateau: ("patience", 2)}
)
"""The argument of torch's schedules after which a rate changes, and how much later it does."""
ONLY_LOSS: Mapping[str, Better] = MappingProxyType({"loss": "min"})


def build_scheduler(
    config: groups.Scheduler,
    optimizer: Optimizer,
    *,
    steps_per_epoch: int,
    total_steps: int,
    better: Mapping[str, Better] = ONLY_LOSS,
    own: Sequence[groups.ParameterGroup] = (),
) -> LRScheduler:
    """Return the schedule; `better` has the direction of each metric, `own` may have schedules."""
    length = {"steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    if isinstance(config, groups.TargetScheduler):
        return _custom_scheduler(config, optimizer, **length)
    if isinstance(config, groups.Plateau):
        return Plateau(config, optimizer, better[config.metric.partition("/")[0]])
    planned = {**length, "total_steps": groups.planned_steps(config, **length) or total_steps}
    ends = [
        round(group[TRAINED_EPOCHS] * steps_per_epoch) if TRAINED_EPOCHS in group else math.inf
        for group in optimizer.param_groups
    ]
    if isinstance(config, groups.OneCycle):
        return OneCycle(config, optimizer, ends, planned["total_steps"])
    shared = lr_factor(config, rate_of(optimizer), **planned)
    factors = dict.fromkeys((None, *own_numbers(optimizer)), shared)
    for number, schedule in ((n, one.scheduler) for n, one in enumerate(own) if one.scheduler):
        total = groups.planned_steps(schedule, **planned) or planned["total_steps"]
        own_plan = {**planned, "total_steps": total}
        factors[number] = lr_factor(schedule, rate_of(optimizer, number), **own_plan)
    of_groups = [factors[group.get(OWN)] for group in optimizer.param_groups]
    return Schedule(optimizer, [*map(_until, ends, of_groups)])


def _until(end: float, factor: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: factor(step) if step < end else 0.0


class RisingRate(LambdaLR):
    """A rate that rises by the same factor in each step, in all by `factor`; others stay."""

    def __init__(self, optimizer: Optimizer, factor: float, total_steps: int) -> None:
        def rising(factor: float) -> Callable[[int], float]:
            return lambda step: factor ** (step / max(1, total_steps - 1))

        groups = optimizer.param_groups
        super().__init__(optimizer, [rising(1.0 if OWN in group else factor) for group in groups])


class Schedule(LambdaLR):
    """torch's, without the checks in each step."""

    def step(self, epoch: int | None = None) -> None:
        """Set the next step's learning rate."""
        self.last_epoch += 1
        groups = self.optimizer.param_groups
        for group, base_lr, factor in zip(groups, self.base_lrs, self.lr_lambdas, strict=True):
            rate = base_lr * factor(self.last_epoch)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]


class OneCycle(OneCycleLR):
    """torch's, which stays at its end when the run continues, and ends sooner for some groups."""

    def __init__(
        self, config: groups.OneCycle, optimizer: Optimizer, ends: Sequence[float], total_steps: int
    ) -> None:
        self._ends = [*ends]  # first, for torch's takes the first step
        every, cycled = optimizer.param_groups, ("momentum", "betas")
        super().__init__(
            optimizer,
            max_lr=[group["lr"] for group in every],
            total_steps=max(total_steps, 2),
            pct_start=config.rise_fraction * (1 - 1e-9),  # torch divides by 0 in a rise of one step
            div_factor=1 / config.start_factor,
            final_div_factor=config.start_factor / config.end_factor,
            cycle_momentum=any(all(group.get(key) for group in every) for key in cycled),
        )

    def step(self, epoch: int | None = None) -> None:
        """Set the next step's learning rate and momentum."""
        if self.last_epoch + 1 < self.total_steps:
            super().step()
        else:
            self.last_epoch += 1
        for group, end in zip(self.optimizer.param_groups, self._ends, strict=True):
            if self.last_epoch >= end:
                group["lr"] = 0.0


class Plateau(ReduceLROnPlateau):
    """torch's, which knows its metric."""

    def __init__(self, config: groups.Plateau, optimizer: Optimizer, better: Better) -> None:
        lr = rate_of(optimizer)
        super().__init__(
            optimizer,
            mode=better,
            factor=config.factor,
            patience=config.patience,
            threshold=config.min_delta,
            threshold_mode="abs",
            cooldown=config.cooldown,
            min_lr=[
                config.min_lr * group.get(LR_SCALE, 1.0) * (rate_of(optimizer, group.get(OWN)) / lr)
                for group in optimizer.param_groups
            ],
            eps=0.0,  # torch's 1e-8 would leave small rates, as of a low layer, as they are
        )
        self.metric = config.metric


def _custom_scheduler(
    config: groups.TargetScheduler, optimizer: Optimizer, **length: int
) -> LRScheduler:
    """Build a custom schedule; refuse an interval that does not fit its class."""
    cls = user_class.resolve(config.target, LRScheduler)
    whose, counts = f"scheduler._target_={config.target}", _step_counts(cls, config, **length)
    scheduler = user_class.construct(whose, cls, (optimizer,), {**config.kwargs, **counts})
    where = f"scheduler.interval={config.interval}: {type(scheduler).__name__}"
    if config.interval == "step" and isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(f"{where} needs the metrics of an evaluation; use interval: epoch")
    if not isinstance(scheduler, OneCycleLR):
        return scheduler
    planned, steps = scheduler.total_steps, length["total_steps"]
    epochs = math.ceil(steps / length["steps_per_epoch"])
    if config.interval == "epoch" and planned != epochs:
        raise ConfigError(
            f"{where} has total_steps={planned}, but the run has {epochs} epochs; leave out its"
            " length, or use interval: step if it counts optimiser steps"
        )
    if config.interval == "step" and planned < steps:  # torch would raise after the last
        fix = "leave out its length, or give it more"
        raise ConfigError(f"{where} has total_steps={planned}, but the run has {steps}; {fix}")
    return scheduler


def _step_counts(cls: type, config: groups.TargetScheduler, **length: int) -> dict[str, int]:
    """Return the numbers of steps that a schedule's class takes, and its YAML does not give."""
    known = config.step_counts(**length)
    parameters = inspect.signature(cls).parameters
    open_ = {name for name, one in parameters.items() if one.default in (one.empty, None)}
    given = any(config.kwargs.get(key) is not None for key in known)
    return {} if given else {key: known[key] for key in known if key in open_}


def beyond_the_end(config: groups.Scheduler, length: Length) -> Unreached:
    """Return the numbers by which one of torch's schedules changes no rate of so short a run."""
    if not isinstance(config, groups.TargetScheduler):
        return {}
    cls = user_class.resolve(config.target, LRScheduler)
    unit: Unit = "epochs" if config.interval == "epoch" else "steps"
    unit = "evaluations" if cls is ReduceLROnPlateau else unit
    key, more = COUNTS.get(cls, ("", 0))
    given = config.kwargs.get(key, [])
    counts = given if isinstance(given, list) else [given]
    late = [each for each in counts if type(each) is int and each + more >= length.has(unit)]
    return {f"scheduler.{key}": (unit, late if isinstance(given, list) else given)} if late else {}


def plan(config: groups.Scheduler, **length: int) -> int | None:
    """Return how often the schedule is advanced to the end of its plan; None without an end."""
    if not isinstance(config, groups.TargetScheduler):
        return groups.planned_steps(config, **length)
    counts = _step_counts(user_class.resolve(config.target, LRScheduler), config, **length)
    total: int | None = {**config.kwargs, **counts}.get("total_steps")
    return total


def advance_after_evaluation(
    scheduler: LRScheduler, measured: Mapping[str, float], better: Mapping[str, Better], split: str
) -> None:
    """Advance a schedule that looks at metrics, by those `measured` now, by their tags.

    A plateau gets its own metric; a custom ReduceLROnPlateau the loss of `split`, with mode=max the
    first metric that is `better` when higher. Raises ConfigError if none is.
    """
    if isinstance(scheduler, Plateau):
        if scheduler.metric in measured:
            scheduler.step(measured[scheduler.metric])
    elif isinstance(scheduler, ReduceLROnPlateau):
        found = [f"{name}/{split}" for name, way in better.items() if way == scheduler.mode]
        if not (known := [measured[tag] for tag in found if tag in measured]):
            raise ConfigError(
                f"scheduler.mode={scheduler.mode}: no metric of this task is better when it is"
                " higher; use mode=min"
            )
        scheduler.step(known[0])


def lr_factor(
    config: groups.Constant | groups.Cosine | groups.Linear | groups.Step,
    peak_lr: float,
    *,
    steps_per_epoch: int,
    total_steps: int,
) -> Callable[[int], float]:
    """Return the function from steps done to the fraction of `peak_lr` that the next step uses."""
    if isinstance(config, groups.Linear):
        share = config.warmup_steps  # a fraction of all steps is rounded up, as in transformers
        warmup = math.ceil(share * total_steps) if share < 1 else int(share)
        return functools.partial(_linear, warmup, total_steps)
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if isinstance(config, groups.Cosine):
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            floor = config.min_lr / peak_lr
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        if isinstance(config, groups.Step):
            # An epoch's fraction of a step must not move the drop: 0.1 * 10 steps is one step.
            return config.gamma ** math.floor(step / (config.every_epochs * steps_per_epoch) + 1e-9)
        return 1.0

    return factor


def _linear(warmup: int, total: int, step: int) -> float:
    """Return the fraction of the peak as get_linear_schedule_with_warmup of transformers does."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))
