"""A saved state of an optimiser for the one of now, whose parameters may be sharded where the writer's were not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

State = Mapping[str, Any]
KERNEL = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that say how it is updated, and not to what numbers."""


def adapted(optimizer: Optimizer, state: State) -> dict[str, Any]:
    """`state` for `optimizer.load_state_dict`, which would update parameters by the kernels of the writer's otherwise.

    torch has none for sharded parameters of some that it has for whole ones.
    """
    saved, own = state.get("param_groups", ()), optimizer.param_groups
    if len(saved) != len(own):  # which torch tells
        return dict(state)
    groups = [
        {**group, **{key: mine[key] for key in KERNEL if key in mine}} for group, mine in zip(saved, own, strict=True)
    ]
    return {**state, "param_groups": groups}
