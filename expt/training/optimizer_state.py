"""A saved state of an optimiser for the one of now, whose parameters may lie otherwise than the
writer's did.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from expt.training.sharding import is_sharded

State = Mapping[str, Any]
KERNEL = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that say how it is updated, and not to what numbers."""


def fused_or_foreach(parameters: Iterable[Tensor]) -> dict[str, bool]:
    """Of an optimiser over these: one kernel for each group, or where torch has none for a
    parameter a few.
    """
    fits = all(is_sharded(one) or (is_dense(one) and not one.is_complex()) for one in parameters)
    return {"fused": True} if fits else {"foreach": True}


def is_dense(tensor: Tensor) -> bool:
    """Whether its memory has no gaps: torch's fused updates take it so on a CPU, and are silently
    wrong (2.14).
    """
    return (
        torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )  # else it has strides of its own


def adapted(optimizer: Optimizer, state: State) -> Any:
    """`state` for `optimizer.load_state_dict`, which would bring back the writer's kernels, and the
    strides it had.

    torch has some kernels for whole parameters alone; and fused ones on the CPU take a state's
    memory to lie as the parameter's, which a sharded model, or another `channels_last`, has
    otherwise."""
    if not (
        isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()
    ):  # of an own optimiser
        return state
    saved, own = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [
        len(group["params"]) for group in own
    ]:  # which torch tells
        return dict(state)
    groups = [
        {**group, **{key: mine[key] for key in KERNEL if key in mine}}
        for group, mine in zip(saved, own, strict=True)
    ]
    parameters = dict(zip(_members(saved), _members(own), strict=True))
    states = {
        key: (
            _laid_out(values, parameters[key])
            if key in parameters and isinstance(values, Mapping)
            else values
        )
        for key, values in state["state"].items()
    }
    return {**state, "state": states, "param_groups": groups}


def _members(groups: Any) -> itertools.chain[Any]:
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _laid_out(values: State, parameter: Tensor) -> dict[str, Any]:
    """`values` of `parameter`, of which those of its shape have its strides."""
    return {
        key: _like(value, parameter) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if is_sharded(parameter) or value.shape != parameter.shape or value.layout != torch.strided:
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
