"""The optimizer, and the learning rate of each step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from expt.config import groups, user_class
from expt.config.constraints import Unit
from expt.config.kinds import Better
from expt.config.length import Length, Unreached
from expt.errors import ConfigError
from expt.training.parameter_groups import (
    LR_SCALE,
    TRAINED_EPOCHS,
    Groups,
    members,
    parameter_groups,
    rate_of,
    scale_rates,
)
from expt.training.patches import without_guards
from expt.training.sharding import is_sharded

OF_GROUPS = {"name", "groups", "decay_biases_and_norms", "layer_decay"}
"""Settings that say which parameters an optimizer gets; the others it gets by their names."""
MAX_TRIED = 2_000
"""Steps of the longest schedule that is tried; each takes 10 us."""
ONLY_LOSS: Mapping[str, Better] = MappingProxyType({"loss": "min"})
Guard = Callable[[type[Any]], type[Any]]
"""Returns an optimizer's class with or without torch's guards."""


def build_optimizer(
    config: groups.Optimizer, module: nn.Module, *, unguarded: bool = True
) -> Optimizer:
    """Return the optimizer of `module`; if `unguarded` without torch's guards, see `patches`."""
    chosen = parameter_groups(module, config)
    guard: Guard = without_guards if unguarded else lambda cls: cls
    if isinstance(config, groups.Muon):
        optimizer = build_muon(config, module, chosen, guard)
    elif isinstance(config, groups.TargetOptimizer):
        is_plain = [list(group) for group in chosen] == [["params"]]
        given = chosen[0]["params"] if is_plain else chosen
        optimizer = user_class.build(config.target, Optimizer, given, **config.kwargs)
        refuse_fused(optimizer)
    else:
        optimizer = _of_torch(config, chosen, guard)
    scale_rates(optimizer)
    return optimizer


def _of_torch(
    config: groups.SGD | groups.Adam | groups.LBFGS, chosen: Groups, guard: Guard
) -> Optimizer:
    """Return torch's optimizer, fused where it can be: one kernel for each group."""
    settings = {key: value for key, value in vars(config).items() if key not in OF_GROUPS}
    if isinstance(config, groups.LBFGS):
        settings["line_search_fn"] = settings.pop("line_search")
        return cast(Optimizer, guard(optim.LBFGS)(chosen, **settings))
    every = [*members(chosen)]
    is_sharded_sgd = config.name == "sgd" and any(map(is_sharded, every))  # torch has none fused
    settings |= {"foreach": True} if is_sharded_sgd else fused_or_foreach(every)
    cls = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}[config.name]
    optimizer: Optimizer = guard(cls)(chosen, **settings)
    fill_momentum(optimizer)
    return optimizer


def fill_momentum(optimizer: Optimizer) -> None:
    """Give SGD its buffers just where it has a momentum.

    torch makes them in the first step, and leaves their memory unset where that step is skipped.
    """
    if not isinstance(optimizer, optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not group["momentum"]:
                optimizer.state.pop(parameter, None)
            elif optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def scale_lr(optimizer: Optimizer, rule: Literal["none", "linear", "sqrt"], ratio: float) -> None:
    """Change the learning rate with the batch, which is `ratio` times that for which it was chosen.

    linear: Goyal et al., 2017, to go with a warm-up; sqrt: Krizhevsky, 2014, which keeps the
    gradient's variance.
    """
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
    for group in optimizer.param_groups:
        group["lr"] *= factor


def build_scheduler(
    config: groups.Scheduler,
    optimizer: Optimizer,
    *,
    steps_per_epoch: int,
    total_steps: int,
    better: Mapping[str, Better] = ONLY_LOSS,
) -> LRScheduler:
    """Return the schedule; `better` has the direction of each metric."""
    length = {"steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    if isinstance(config, groups.TargetScheduler):
        return _custom_scheduler(config, optimizer, **length)
    if isinstance(config, groups.Plateau):
        return Plateau(config, optimizer, better[config.metric.partition("/")[0]])
    length["total_steps"] = groups.planned_steps(config, **length) or total_steps
    ends = [group.get(TRAINED_EPOCHS, math.inf) for group in optimizer.param_groups]
    ends = [end if end == math.inf else round(end * steps_per_epoch) for end in ends]
    if not isinstance(config, groups.OneCycle):
        factor = lr_factor(config, rate_of(optimizer), **length)
        return Schedule(optimizer, [_until(end, factor) for end in ends])
    defaults = optimizer.defaults
    return OneCycle(
        optimizer,
        ends,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=max(length["total_steps"], 2),
        pct_start=config.rise_fraction * (1 - 1e-9),  # torch divides by 0 in a rise of one step
        div_factor=1 / config.start_factor,
        final_div_factor=config.start_factor / config.end_factor,
        cycle_momentum=bool(defaults.get("momentum") or defaults.get("betas")),
    )


def _until(end: float, factor: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: factor(step) if step < end else 0.0


class RisingRate(LambdaLR):
    """A rate that rises by the same factor in each step, in all by `factor`."""

    def __init__(self, optimizer: Optimizer, factor: float, total_steps: int) -> None:
        super().__init__(optimizer, lambda step: factor ** (step / max(1, total_steps - 1)))


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

    def __init__(self, optimizer: Optimizer, ends: Sequence[float], **settings: Any) -> None:
        self._ends = [*ends]  # first, for torch's takes the first step
        super().__init__(optimizer, **settings)

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
        super().__init__(
            optimizer,
            mode=better,
            factor=config.factor,
            patience=config.patience,
            threshold=config.min_delta,
            threshold_mode="abs",
            cooldown=config.cooldown,
            min_lr=[config.min_lr * group.get(LR_SCALE, 1.0) for group in optimizer.param_groups],
            eps=0.0,  # torch's 1e-8 would leave small rates, as of a low layer, as they are
        )
        self.metric = config.metric


def _custom_scheduler(
    config: groups.TargetScheduler, optimizer: Optimizer, **length: int
) -> LRScheduler:
    """Build a custom schedule; refuse an interval that does not fit its class."""
    counts = _step_counts(config, **length)
    scheduler = user_class.build(config.target, LRScheduler, optimizer, **counts, **config.kwargs)
    where = f"scheduler.interval={config.interval}: {type(scheduler).__name__}"
    if config.interval == "step" and isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(f"{where} needs the metrics of an evaluation; use interval: epoch")
    epochs = math.ceil(length["total_steps"] / length["steps_per_epoch"])
    given = scheduler.total_steps if isinstance(scheduler, OneCycleLR) else epochs
    if config.interval == "epoch" and given != epochs:
        raise ConfigError(
            f"{where} has total_steps={given}, but the run has {epochs} epochs; if total_steps"
            " counts optimiser steps, use interval: step"
        )
    return scheduler


def _step_counts(
    config: groups.TargetScheduler, *, steps_per_epoch: int, total_steps: int
) -> dict[str, int]:
    """Return the numbers of steps that its constructor names, and its YAML does not give."""
    known = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    if config.interval == "epoch":
        known = {"total_steps": math.ceil(total_steps / steps_per_epoch), "steps_per_epoch": 1}
    parameters = inspect.signature(user_class.resolve(config.target, LRScheduler)).parameters
    open_ = {name for name, one in parameters.items() if one.default in (one.empty, None)}
    return {key: known[key] for key in known if key in open_ and not known.keys() & config.kwargs}


def beyond_the_end(config: groups.Scheduler, length: Length) -> Unreached:
    """Return the numbers by which one of torch's schedules changes no rate of so short a run.

    The schedule is tried with other numbers, on an optimizer of its own.
    """
    if not isinstance(config, groups.TargetScheduler):
        return {}
    cls = user_class.resolve(config.target, LRScheduler)
    looks = issubclass(cls, ReduceLROnPlateau)
    unit: Unit = "evaluations" if looks else "epochs" if config.interval == "epoch" else "steps"
    times = math.ceil(min(length.has(unit), MAX_TRIED + 1))
    if cls.__module__ != LRScheduler.__module__ or times > MAX_TRIED:
        return {}
    counts = _step_counts(config, steps_per_epoch=length.per_epoch, total_steps=length.steps)

    def rates(changed: Mapping[str, Any]) -> list[Any]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        schedule: Any = cls(optimizer, **{**counts, **config.kwargs, **changed})
        found = []
        for _ in range(times):
            found.append({**optimizer.param_groups[0], "params": ()})
            optimizer.step()
            if looks:
                schedule.step(1.0)
            else:
                schedule.step()
        return found

    def are_idle(name: str, other: Any) -> bool:
        with contextlib.suppress(ValueError, TypeError):
            return rates({name: other}) == rates({})
        return False

    found: dict[str, tuple[Unit, Any]] = {}
    for name, value in config.kwargs.items():
        if type(value) is int and value > 1 and are_idle(name, value + 1):
            found[f"scheduler.{name}"] = unit, value
        elif isinstance(value, list) and all(type(each) is int for each in value):
            reached = next((n for n in range(len(value)) if are_idle(name, value[:n])), None)
            if reached is not None:
                found[f"scheduler.{name}"] = unit, value[reached:]
    return found


def plan(config: groups.Scheduler, **length: int) -> int | None:
    """Return how often the schedule is advanced to the end of its plan; None without an end."""
    if not isinstance(config, groups.TargetScheduler):
        return groups.planned_steps(config, **length)
    total: int | None = {**config.kwargs, **_step_counts(config, **length)}.get("total_steps")
    return total


def advance_after_evaluation(
    scheduler: LRScheduler,
    values: Mapping[str, float],
    better: Mapping[str, Better],
    measured: Mapping[str, float],
) -> None:
    """Advance a schedule that looks at metrics, by the `values` that an evaluation gave.

    A plateau gets its metric from `measured`, by tag; a custom ReduceLROnPlateau the loss, with
    mode=max the first metric that is better when higher. Raises ConfigError if none is.
    """
    if isinstance(scheduler, Plateau):
        scheduler.step(measured[scheduler.metric])
    elif isinstance(scheduler, ReduceLROnPlateau):
        metric = next((name for name in values if better[name] == scheduler.mode), None)
        if metric is None:
            raise ConfigError(
                f"scheduler.mode={scheduler.mode}: no metric of this task is better when it is"
                " higher; use mode=min"
            )
        scheduler.step(values[metric])


def lr_factor(
    config: groups.Constant | groups.Cosine | groups.Linear | groups.Step,
    peak_lr: float,
    *,
    steps_per_epoch: int,
    total_steps: int,
) -> Callable[[int], float]:
    """Return the function from steps done to the fraction of `peak_lr` that the next step uses."""
    if isinstance(config, groups.Linear):
        return functools.partial(_linear, _warmup_of(config, total_steps), total_steps)
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


def _warmup_of(config: groups.Linear, total_steps: int) -> int:
    """Return the steps of the warm-up; a fraction of all is rounded up, as in transformers."""
    share = config.warmup_steps
    return math.ceil(share * total_steps) if share < 1 else int(share)


def _linear(warmup: int, total: int, step: int) -> float:
    """Return the fraction of the peak as get_linear_schedule_with_warmup of transformers does."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def build_muon(config: groups.Muon, module: nn.Module, chosen: Groups, guard: Guard) -> Optimizer:
    """Return Muon and AdamW over the `chosen` groups of the parameters of `module`.

    Muon's update is as large as AdamW's, so one learning rate and weight decay serve both (Liu et
    al., 2025). Raises ConfigError where there is nothing for Muon to do.
    """
    matrices = hidden_matrices(module)
    if not matrices:
        raise ConfigError(
            "optimizer=muon: the model has no weight matrix but for its last layer and embeddings;"
            " use optimizer=adamw"
        )
    of_muon, of_adamw = (_only(chosen, matrices, among) for among in (True, False))
    both = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon = {"momentum": config.momentum, "nesterov": config.nesterov}
    adamw = {"betas": config.betas, "eps": config.eps, **fused_or_foreach(members(of_adamw))}
    combined: Optimizer = guard(MuonWithAdamW)(
        guard(optim.Muon)(of_muon, **both, **muon, adjust_lr_fn="match_rms_adamw"),
        guard(optim.AdamW)(of_adamw, **both, **adamw),
    )
    return combined


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the weights with two dimensions, without embeddings and the last layer."""
    layers = [one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {parameter for layer in layers for parameter in layer.parameters()}
    # A last layer may share its weights with an embedding
    named = module.named_parameters(remove_duplicate=False)
    matrices = [one for name, one in named if name.endswith("weight") and one.dim() == 2]
    return {*matrices} - embeddings - {*matrices[-1:]}


def _only(chosen: Groups, parameters: set[nn.Parameter], among: bool) -> Groups:
    """Return the groups with those of their members that are `among` the parameters, or not."""
    every = (
        {**group, "params": [one for one in group["params"] if (one in parameters) == among]}
        for group in chosen
    )
    return [group for group in every if group["params"]]


class MuonWithAdamW(Optimizer):
    """The groups of both, Muon's first, and one state, saved and loaded as any optimizer's."""

    def __init__(self, muon: optim.Muon, adamw: optim.AdamW) -> None:
        self._parts: Sequence[Optimizer] = (muon, adamw)
        shared = {key: muon.defaults[key] for key in ("lr", "weight_decay")}
        super().__init__([*muon.param_groups, *adamw.param_groups], shared)
        self._share()

    def _share(self) -> None:
        """Let both work on the groups and the state that are here."""
        (muon, adamw), first = self._parts, len(self._parts[0].param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:first], self.param_groups[first:]
        muon.state = adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        super().load_state_dict(dict(state_dict))
        self._share()


def fused_or_foreach(parameters: Iterable[Tensor]) -> dict[str, bool]:
    """Return the setting that updates `parameters` by one kernel, or by a few if torch has none."""
    fits = all(is_sharded(one) or (is_dense(one) and not one.is_complex()) for one in parameters)
    return {"fused": True} if fits else {"foreach": True}


def is_dense(tensor: Tensor) -> bool:
    """Return whether its memory has no gaps: torch's fused updates on a CPU take it so (2.14)."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def refuse_fused(optimizer: Optimizer) -> None:
    """Raise ConfigError where a fused update would be wrong without a word."""
    for group in optimizer.param_groups:
        gaps = [one for one in group["params"] if not is_sharded(one) and not is_dense(one)]
        if group.get("fused") and gaps:
            raise ConfigError(
                f"optimizer.fused=true: a parameter of the shape {list(gaps[0].shape)} has gaps in"
                " its memory, and torch's fused update is wrong for it; leave fused out"
            )
