"""Kernels that update an optimizer's parameters, and a saved state for parameters that lie
otherwise in memory than the saved ones did.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from expt.errors import ConfigError
from expt.training.sharding import is_sharded

State = Mapping[str, Any]
KERNEL = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that say how it is updated, and not to what numbers."""


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


def adapted(optimizer: Optimizer, state: State) -> Any:
    """Return `state` for `optimizer.load_state_dict`, with the kernels and strides of now.

    torch has some kernels only for whole parameters, and fused ones on a CPU take a state's memory
    to lie as the parameter's does, which is otherwise where one is sharded or in channels_last."""
    if not (isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()):
        return state  # of a custom optimizer
    saved, own = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        return dict(state)  # torch says so
    groups = [
        {**group, **{key: mine[key] for key in KERNEL if key in mine}}
        for group, mine in zip(saved, own, strict=True)
    ]
    parameters = dict(zip(_members(saved), _members(own), strict=True))
    states = {
        key: (
            {name: _laid_out(value, parameters[key]) for name, value in values.items()}
            if key in parameters and isinstance(values, Mapping)
            else values
        )
        for key, values in state["state"].items()
    }
    return {**state, "state": states, "param_groups": groups}


def _members(groups: Any) -> itertools.chain[Any]:
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Return `value` with the parameter's strides, if it is a tensor of the parameter's shape."""
    if (
        not isinstance(value, Tensor)
        or is_sharded(parameter)
        or value.shape != parameter.shape
        or value.layout != torch.strided
        or value.stride() == parameter.stride()
    ):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
