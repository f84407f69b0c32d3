"""An optimiser of a person's own, or of torch's beside those that have a word."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer, SparseAdam

from expt.config import groups, user_class
from expt.errors import ConfigError
from expt.training.optimizer_state import is_dense
from expt.training.sharding import is_sharded


def build_own(
    config: groups.TargetOptimizer, parameters: list[nn.Parameter] | list[dict[str, Any]]
) -> Optimizer:
    """That of the `parameters`.

    Raises ConfigError where it can't take the steps that a run takes.
    """
    if config.kwargs.get("fused"):
        _refuse_fused(parameters)
    optimizer = user_class.build(config.target, Optimizer, parameters, **config.kwargs)
    _refuse_other_steps(optimizer, config.target)
    return optimizer


def _refuse_other_steps(optimizer: Optimizer, target: str) -> None:
    where = f"optimizer._target_={target}"
    required = [
        name
        for name, one in inspect.signature(optimizer.step).parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if required:
        raise ConfigError(
            f"{where}: its step() must be given {', '.join(required)}, and a run gives it nothing,"
            " for it has the gradients once a step; use an optimizer whose step() takes them as"
            " they are, such as optimizer=adam"
        )
    if isinstance(optimizer, SparseAdam):
        raise ConfigError(
            f"{where}: does not support dense gradients, which those of a run are; use"
            " optimizer=adam"
        )


def _refuse_fused(parameters: list[nn.Parameter] | list[dict[str, Any]]) -> None:
    groups = (one["params"] if isinstance(one, dict) else [one] for one in parameters)
    for one in chain.from_iterable(groups):
        which = f"optimizer.fused=true: a parameter of the shape {list(one.shape)}"
        if one.is_complex():
            raise ConfigError(
                f"{which} is complex, for which torch has no fused update; leave fused out"
            )
        if not is_sharded(one) and not is_dense(one):
            raise ConfigError(
                f"{which} has gaps in its memory, as a slice of another tensor, and torch's fused"
                " update is wrong for it; leave fused out, or give the model a copy of it"
            )
