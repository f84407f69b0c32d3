"""The optimizer, and the learning rate of each step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from expt.config import constraints, groups, user_class
from expt.config.constraints import Unit
from expt.config.kinds import Better
from expt.config.length import Length, Unreached
from expt.errors import ConfigError
from expt.training.parameter_groups import (
    LR_SCALE,
    OWN,
    TRAINED_EPOCHS,
    Groups,
    members,
    own_numbers,
    parameter_groups,
    rate_of,
    scale_rates,
    sparse_weights,
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
    chosen, parts = parameter_groups(module, config), list[Optimizer]()
    guard: Guard = without_guards if unguarded else lambda cls: cls
    own: dict[int | None, Any] = {
        number: group.optimizer for number, group in enumerate(config.groups) if group.optimizer
    }
    for number, each in {None: config, **own}.items():
        its = [one for one in chosen if (one[OWN] if one.get(OWN) in own else None) == number]
        where = "optimizer" if number is None else f"optimizer.groups.{number}.optimizer"
        if its or not own:
            parts += _parts(each, module, its, guard, where)
    if len(parts) == 1:
        return parts[0]
    if closed := [type(part).__name__ for part in parts if needs_closure(part)]:
        raise ConfigError(
            f"optimizer: {closed[0]} computes losses itself, for all parameters; use it without"
            " another optimizer in optimizer.groups"
        )
    combined: Optimizer = guard(Combined)(parts)
    return combined


def _parts(
    config: Any, module: nn.Module, chosen: Groups, guard: Guard, where: str
) -> list[Optimizer]:
    """Return torch's optimizers of the `chosen` parameters that one, named at `where`, stands for.

    Raises ConfigError where it can't have their settings.
    """
    if isinstance(config, groups.MuonRule):
        parts = muon(config, module, chosen, guard, where)
    elif isinstance(config, constraints.Target):
        is_plain = [list(group) for group in chosen] == [["params"]]
        given, whose = chosen[0]["params"] if is_plain else chosen, f"{where}._target_"
        cls = user_class.resolve(config.target, Optimizer)
        parts = [user_class.construct(f"{whose}={config.target}", cls, (given,), config.kwargs)]
        refuse_fused(parts[0])
    else:
        parts = [_of_torch(config, chosen, guard, sparse_weights(module))]
    for part in parts:
        scale_rates(part)
    return parts


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether its step computes the loss itself, once or several times."""
    given = inspect.signature(type(optimizer).step).parameters.get("closure")
    return given is not None and given.default is inspect.Parameter.empty


def _of_torch(
    config: groups.SGDRule | groups.AdamRule | groups.LBFGS,
    chosen: Groups,
    guard: Guard,
    sparse: Collection[Tensor],
) -> Optimizer:
    """Return torch's optimizer, fused where it can be: one kernel for each group."""
    settings = {key: value for key, value in vars(config).items() if key not in OF_GROUPS}
    if isinstance(config, groups.LBFGS):
        settings["line_search_fn"] = settings.pop("line_search")
        return cast(Optimizer, guard(optim.LBFGS)(chosen, **settings))
    every = [*members(chosen)]
    # torch has no fused SGD for them
    is_other_sgd = config.name == "sgd" and any(is_sharded(one) or one in sparse for one in every)
    settings |= {"foreach": True} if is_other_sgd else fused_or_foreach(every)
    cls = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}[config.name]
    optimizer: Optimizer = guard(cls)(chosen, **settings)
    fill_momentum(optimizer)
    return optimizer


def fill_momentum(optimizer: Optimizer) -> None:
    """Give SGD its buffers just where it has a momentum.

    torch makes them in the first step, and leaves their memory unset where that step is skipped.
    """
    for part in parts_of(optimizer):
        for group in part.param_groups if isinstance(part, optim.SGD) else ():
            for parameter in group["params"]:
                if not group["momentum"]:
                    part.state.pop(parameter, None)
                elif part.state[parameter].get("momentum_buffer") is None:
                    part.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


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
    own: Sequence[groups.ParameterGroup] = (),
) -> LRScheduler:
    """Return the schedule; `better` has the direction of each metric, `own` may have schedules."""
    length = {"steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    if isinstance(config, groups.TargetScheduler):
        return _custom_scheduler(config, optimizer, **length)
    if isinstance(config, groups.Plateau):
        return Plateau(config, optimizer, better[config.metric.partition("/")[0]])
    length["total_steps"] = groups.planned_steps(config, **length) or total_steps
    ends = [group.get(TRAINED_EPOCHS, math.inf) for group in optimizer.param_groups]
    ends = [end if end == math.inf else round(end * steps_per_epoch) for end in ends]
    if not isinstance(config, groups.OneCycle):
        shared = lr_factor(config, rate_of(optimizer), **length)
        factors = dict.fromkeys((None, *own_numbers(optimizer)), shared)
        for number, schedule in ((n, one.scheduler) for n, one in enumerate(own) if one.scheduler):
            planned = groups.planned_steps(schedule, **length) or length["total_steps"]
            its = {**length, "total_steps": planned}
            factors[number] = lr_factor(schedule, rate_of(optimizer, number), **its)
        of_groups = [factors[group.get(OWN)] for group in optimizer.param_groups]
        return Schedule(optimizer, [*map(_until, ends, of_groups)])
    cycled = ("momentum", "betas")
    return OneCycle(
        optimizer,
        ends,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=max(length["total_steps"], 2),
        pct_start=config.rise_fraction * (1 - 1e-9),  # torch divides by 0 in a rise of one step
        div_factor=1 / config.start_factor,
        final_div_factor=config.start_factor / config.end_factor,
        cycle_momentum=any(all(group.get(k) for group in optimizer.param_groups) for k in cycled),
    )


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
    measured: Mapping[str, float],
    better: Mapping[str, Better],
    split: str,
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


def muon(
    config: groups.MuonRule, module: nn.Module, chosen: Groups, guard: Guard, where: str
) -> list[Optimizer]:
    """Return Muon and AdamW over the `chosen` groups of the parameters of `module`.

    Muon's update is as large as AdamW's, so one learning rate and weight decay serve both (Liu et
    al., 2025). Raises ConfigError where there is nothing for Muon to do.
    """
    matrices = hidden_matrices(module)
    of_muon, of_adamw = (_only(chosen, matrices, among) for among in (True, False))
    if not of_muon:
        raise ConfigError(
            f"{where}=muon: the model has no weight matrix but for its last layer, embeddings, and"
            f" those of other groups; use {'optimizer=' if where == 'optimizer' else ''}adamw"
        )
    both = {"lr": config.lr, "weight_decay": config.weight_decay}
    own = {"momentum": config.momentum, "nesterov": config.nesterov}
    parts = [guard(optim.Muon)(of_muon, **both, **own, adjust_lr_fn="match_rms_adamw")]
    if of_adamw:
        adamw = {"betas": config.betas, "eps": config.eps, **fused_or_foreach(members(of_adamw))}
        parts.append(guard(optim.AdamW)(of_adamw, **both, **adamw))
    return parts


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


class Combined(Optimizer):
    """Several optimizers as one: the groups and the states of all, saved and loaded together."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        first, *others = (part.defaults for part in parts)
        shared = {key: first[key] for key in first if all(key in other for other in others)}
        super().__init__([group for part in parts for group in part.param_groups], shared)
        self._collect()

    def _collect(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            self.state.update(part.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part in self.parts:
            part.step()
        self._collect()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all; `parts` has further entries of custom ones."""
        plain = inspect.unwrap(Optimizer.state_dict)
        found: dict[str, Any] = plain(self)
        methods = [(part, inspect.unwrap(type(part).state_dict)) for part in self.parts]
        own = [{} if method is plain else part.state_dict() for part, method in methods]
        more = [{key: one[key] for key in one.keys() - found.keys()} for one in own]
        return {**found, "parts": more} if any(more) else found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        groups, state = iter(state_dict["param_groups"]), state_dict["state"]
        more = state_dict.get("parts", [{} for _ in self.parts])
        for part, own in zip(self.parts, more, strict=True):
            its = [*itertools.islice(groups, len(part.param_groups))]
            known = {key: state[key] for key in members(its) if key in state}
            part.load_state_dict({"state": known, "param_groups": its, **own})
        self._collect()


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that it combines, or itself."""
    return optimizer.parts if isinstance(optimizer, Combined) else (optimizer,)


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
