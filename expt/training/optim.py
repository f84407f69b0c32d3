"""The optimizer: one of torch's or a custom one, or several as one."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from expt.config import constraints, groups, user_class
from expt.errors import ConfigError
from expt.training.parameter_groups import (
    OWN,
    Groups,
    members,
    parameter_groups,
    scale_rates,
    sparse_weights,
)
from expt.training.patches import without_guards
from expt.training.sharding import is_sharded

OF_GROUPS = {"name", "groups", "decay_biases_and_norms", "layer_decay"}
"""Settings that say which parameters an optimizer gets; the others it gets by their names."""
Guard = Callable[[type[Any]], type[Any]]
"""Returns an optimizer's class with or without torch's guards."""


def build_optimizer(
    config: groups.Optimizer, module: nn.Module, *, unguarded: bool = True
) -> Optimizer:
    """Return the optimizer of `module`; if `unguarded` without torch's guards, see `patches`."""
    chosen = parameter_groups(module, config)
    guard: Guard = without_guards if unguarded else lambda cls: cls
    own = {number: group.optimizer for number, group in enumerate(config.groups) if group.optimizer}
    shared = [group for group in chosen if group.get(OWN) not in own]
    parts = _parts(config, module, shared, guard, "optimizer") if shared or not own else []
    for number, optimizer in own.items():
        its = [group for group in chosen if group.get(OWN) == number]
        parts += _parts(optimizer, module, its, guard, f"optimizer.groups.{number}.optimizer")
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
    if config.name == "sgd" and not all(one.requires_grad for one in every):
        # Custom code may train them later.
        optimizer.register_step_pre_hook(lambda optimizer, *_: fill_momentum(optimizer))
    return optimizer


def fill_momentum(optimizer: Optimizer) -> None:
    """Give SGD its buffers just where it has a momentum, of parameters that are trained.

    torch makes them in the first step, and leaves their memory unset where that step is skipped.
    """
    for part in parts_of(optimizer):
        for group in part.param_groups if isinstance(part, optim.SGD) else ():
            for parameter in group["params"]:
                lacks_it = part.state.get(parameter, {}).get("momentum_buffer") is None
                if not group["momentum"]:
                    part.state.pop(parameter, None)
                elif lacks_it and parameter.requires_grad:
                    part.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def scale_lr(optimizer: Optimizer, rule: Literal["none", "linear", "sqrt"], ratio: float) -> None:
    """Change the learning rate with the batch, which is `ratio` times that for which it was chosen.

    linear: Goyal et al., 2017, to go with a warm-up; sqrt: Krizhevsky, 2014, which keeps the
    gradient's variance.
    """
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
    for group in optimizer.param_groups:
        group["lr"] *= factor


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
