"""The optimizer, and the learning rate of each step."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from expt.config import groups, user_class
from expt.config.kinds import Better
from expt.errors import ConfigError
from expt.training.parameter_groups import (
    LR_SCALE,
    TRAINED_EPOCHS,
    members,
    parameter_groups,
    rate_of,
    scale_rates,
)
from expt.training.patches import without_guards
from expt.training.sharding import is_sharded

OF_GROUPS = {"name", "groups", "decay_biases_and_norms", "layer_decay"}
"""Settings that say which parameters an optimizer gets; the others it gets by their names."""
ONLY_LOSS: Mapping[str, Better] = MappingProxyType({"loss": "min"})


def build_optimizer(
    config: groups.Optimizer,
    module: nn.Module,
    *,
    unguarded: bool = True,
) -> Optimizer:
    """Return the optimizer of `module`, with the configured groups of parameters.

    `unguarded` leaves out torch's guards against its compiler, see `patches`; not for a custom
    class.
    """
    chosen = parameter_groups(
        module,
        config.groups,
        decay_biases_and_norms=config.decay_biases_and_norms,
        layer_decay=config.layer_decay,
    )
    if isinstance(config, groups.Muon):
        optimizer = build_muon(config, module, chosen, unguarded=unguarded)
    elif isinstance(config, groups.TargetOptimizer):
        optimizer = user_class.build(config.target, Optimizer, chosen, **config.kwargs)
        refuse_fused(optimizer)
    else:
        optimizer = _over(chosen, config, unguarded=unguarded)
    scale_rates(optimizer)
    return optimizer


T = TypeVar("T", bound=Optimizer)


def _class(cls: type[T], *, unguarded: bool) -> type[T]:
    return without_guards(cls) if unguarded else cls


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step computes the loss and its gradients itself, such as L-BFGS's."""
    given = inspect.signature(type(optimizer).step).parameters.get("closure")
    return given is not None and given.default is inspect.Parameter.empty


def _over(
    parameters: list[nn.Parameter] | list[dict[str, Any]],
    config: groups.SGD | groups.Adam | groups.LBFGS,
    *,
    unguarded: bool,
) -> Optimizer:
    """Return torch's optimizer, fused where it can be: one kernel for each group."""
    settings = {key: value for key, value in vars(config).items() if key not in OF_GROUPS}
    cls: type[Optimizer] = optim.LBFGS
    if isinstance(config, groups.LBFGS):
        settings["line_search_fn"] = settings.pop("line_search")
    else:
        grouped = (one["params"] if isinstance(one, dict) else [one] for one in parameters)
        every = [*itertools.chain.from_iterable(grouped)]
        cls = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}[config.name]
        is_sharded_sgd = cls is optim.SGD and any(map(is_sharded, every))  # torch has none fused
        settings |= {"foreach": True} if is_sharded_sgd else fused_or_foreach(every)
    optimizer = _class(cls, unguarded=unguarded)(parameters, **settings)
    # torch makes it in the first step, and leaves it as it found the memory where that step is
    # skipped.
    for group in optimizer.param_groups if settings.get("momentum") else ():
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


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
    """Return the schedule, to advance after each step or each epoch, as its `interval` says.

    `better` says of each metric which way it is better.
    """
    if isinstance(config, groups.TargetScheduler):
        return _custom_scheduler(
            config, optimizer, steps_per_epoch=steps_per_epoch, total_steps=total_steps
        )
    if isinstance(config, groups.Plateau):
        return Plateau(config, optimizer, better[config.metric.partition("/")[0]])
    total_steps = (
        groups.planned_steps(config, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
        or total_steps
    )
    ends = [_end(group, steps_per_epoch) for group in optimizer.param_groups]
    if isinstance(config, groups.OneCycle):
        return OneCycle(
            optimizer,
            ends,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=max(total_steps, 2),
            pct_start=config.rise_fraction
            * (1 - 1e-9),  # torch divides by zero where the rise is one step
            div_factor=1 / config.start_factor,
            final_div_factor=config.start_factor / config.end_factor,
            cycle_momentum=bool(
                optimizer.defaults.get("momentum") or optimizer.defaults.get("betas")
            ),
        )
    factor = lr_factor(
        config, rate_of(optimizer), steps_per_epoch=steps_per_epoch, total_steps=total_steps
    )
    return Schedule(optimizer, [factor if end is None else _until(end, factor) for end in ends])


def _end(group: Mapping[str, Any], steps_per_epoch: int) -> int | None:
    """Return the steps after which the learning rate of a group of parameters is 0."""
    epochs = group.get(TRAINED_EPOCHS)
    return None if epochs is None else round(epochs * steps_per_epoch)


def _until(end: int, factor: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: factor(step) if step < end else 0.0


class Schedule(LambdaLR):
    """torch's, without the checks that it makes in each step."""

    def step(self, epoch: int | None = None) -> None:
        """Set the next step's learning rate."""
        self.last_epoch += 1
        shared = self.lr_lambdas[0]
        first_factor = shared(self.last_epoch)
        for group, base_lr, own in zip(
            self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True
        ):
            factor = first_factor if own is shared else own(self.last_epoch)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base_lr * factor)
            else:
                group["lr"] = base_lr * factor

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]


class OneCycle(OneCycleLR):
    """torch's, which stays at its end when the run continues, and ends sooner for some groups."""

    def __init__(self, optimizer: Optimizer, ends: Sequence[int | None], **settings: Any) -> None:
        self._ends = [*ends]  # first, for torch's takes the first step
        super().__init__(optimizer, **settings)

    def step(self, epoch: int | None = None) -> None:
        """Set the next step's learning rate and momentum."""
        if self.last_epoch + 1 < self.total_steps:
            super().step()
        else:
            self.last_epoch += 1
        for group, end in zip(self.optimizer.param_groups, self._ends, strict=True):
            if end is not None and self.last_epoch >= end:
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
    config: groups.TargetScheduler, optimizer: Optimizer, *, steps_per_epoch: int, total_steps: int
) -> LRScheduler:
    """Build a custom schedule; refuse an interval that does not fit its class."""
    epochs = math.ceil(total_steps / steps_per_epoch)
    counts = _step_counts(config, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
    scheduler = user_class.build(config.target, LRScheduler, optimizer, **counts, **config.kwargs)
    where = f"scheduler.interval={config.interval}: {type(scheduler).__name__}"
    if config.interval == "step" and isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(f"{where} needs the metrics of an evaluation; use interval: epoch")
    if (
        config.interval == "epoch"
        and isinstance(scheduler, OneCycleLR)
        and scheduler.total_steps != epochs
    ):
        raise ConfigError(
            f"{where} has total_steps={scheduler.total_steps}, but the run has {epochs} epochs;"
            " if total_steps counts optimiser steps, use interval: step"
        )
    return scheduler


def _step_counts(
    config: groups.TargetScheduler, *, steps_per_epoch: int, total_steps: int
) -> dict[str, int]:
    """Return the numbers of steps that its constructor names, and its YAML does not give."""
    by_epoch, epochs = config.interval == "epoch", math.ceil(total_steps / steps_per_epoch)
    known = {
        "total_steps": epochs if by_epoch else total_steps,
        "steps_per_epoch": 1 if by_epoch else steps_per_epoch,
    }
    parameters = inspect.signature(user_class.resolve(config.target, LRScheduler)).parameters
    lacking = [
        key
        for key in known
        if key in parameters and parameters[key].default in (inspect.Parameter.empty, None)
    ]
    return {} if known.keys() & config.kwargs.keys() else {key: known[key] for key in lacking}


def plan(config: groups.Scheduler, *, steps_per_epoch: int, total_steps: int) -> int | None:
    """Return how often the schedule is advanced to the end of its plan; None without an end."""
    if not isinstance(config, groups.TargetScheduler):
        return groups.planned_steps(
            config, steps_per_epoch=steps_per_epoch, total_steps=total_steps
        )
    counts = _step_counts(config, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
    given: int | None = counts.get("total_steps", config.kwargs.get("total_steps"))
    return given


def advance_after_epoch(scheduler: LRScheduler) -> None:
    """Advance a schedule that counts epochs."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()


def advance_after_evaluation(
    scheduler: LRScheduler,
    values: Mapping[str, float],
    better: Mapping[str, Better],
    measured: Mapping[str, float],
) -> None:
    """Advance a schedule that looks at metrics, by the `values` that an evaluation gave.

    A plateau gets its metric of all that was `measured`, by tag; a custom ReduceLROnPlateau the
    loss, with mode=max the first metric that is `better` so. Raises ConfigError if none is.
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
    config: groups.Constant | groups.Cosine | groups.Step,
    peak_lr: float,
    *,
    steps_per_epoch: int,
    total_steps: int,
) -> Callable[[int], float]:
    """Return the function from steps done to the fraction of `peak_lr` that the next step uses."""
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)

    def after_warmup(step: int) -> float:
        if isinstance(config, groups.Cosine):
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            floor = config.min_lr / peak_lr
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        if isinstance(config, groups.Step):
            # An epoch's fraction of a step must not move the drop: 0.1 * 10 steps is one step.
            return config.gamma ** math.floor(step / (config.every_epochs * steps_per_epoch) + 1e-9)
        return 1.0

    def factor(step: int) -> float:
        return (step + 1) / (warmup_steps + 1) if step < warmup_steps else after_warmup(step)

    return factor


Groups = list[dict[str, Any]]


def build_muon(
    config: groups.Muon, module: nn.Module, chosen: list[nn.Parameter] | Groups, *, unguarded: bool
) -> Optimizer:
    """Return Muon and AdamW over the `chosen` parameters of `module`, or groups of them.

    Muon's update is as large as AdamW's, so one learning rate and weight decay serve both (Liu et
    al., 2025). Raises ConfigError where there is nothing for Muon to do.
    """
    matrices = hidden_matrices(module)
    if not matrices:
        raise ConfigError(
            "optimizer=muon: the model has no weight matrix but for its last layer and embeddings;"
            " use optimizer=adamw"
        )
    muon, adamw = _class(optim.Muon, unguarded=unguarded), _class(optim.AdamW, unguarded=unguarded)
    lr, decay = config.lr, config.weight_decay
    of_muon, of_adamw = _parted(chosen, matrices)
    return _class(MuonWithAdamW, unguarded=unguarded)(
        muon(
            of_muon,
            lr=lr,
            weight_decay=decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
            adjust_lr_fn="match_rms_adamw",
        ),
        adamw(
            of_adamw,
            lr=lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=decay,
            **fused_or_foreach(members(of_adamw)),
        ),
    )


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the weights with two dimensions, except embeddings' and the last layer's.

    Their rows are words and classes.
    """
    embeddings = {
        parameter
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        for parameter in layer.parameters()
    }
    # A last layer may share its weights with an embedding
    named = module.named_parameters(remove_duplicate=False)
    matrices = [
        parameter for name, parameter in named if name.endswith("weight") and parameter.dim() == 2
    ]
    return {*matrices} - embeddings - {*matrices[-1:]}


def _parted(
    chosen: list[nn.Parameter] | Groups, matrices: set[nn.Parameter]
) -> tuple[Groups, Groups]:
    """Return the groups for Muon, and those for AdamW."""
    grouped = [one for one in chosen if isinstance(one, dict)]
    parts: tuple[Groups, Groups] = ([], [])
    for group in grouped or [{"params": chosen}]:
        for part, wanted in zip(parts, (True, False), strict=True):
            if members := [
                parameter for parameter in group["params"] if (parameter in matrices) == wanted
            ]:
                part.append({**group, "params": members})
    return parts


class MuonWithAdamW(Optimizer):
    """The groups of both, Muon's first, and one state, saved and loaded as any optimizer's."""

    def __init__(self, muon: optim.Muon, adamw: optim.AdamW) -> None:
        self._parts: Sequence[Optimizer] = (muon, adamw)
        shared = {key: muon.defaults[key] for key in ("lr", "weight_decay")}
        super().__init__([*muon.param_groups, *adamw.param_groups], shared)
        self._share()

    def _share(self) -> None:
        """Let both work on the groups and the state that are here."""
        first = len(self._parts[0].param_groups)
        for part, own in zip(
            self._parts, (self.param_groups[:first], self.param_groups[first:]), strict=True
        ):
            part.param_groups, part.state = own, self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
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
