"""An optimiser of a person's own, or of torch's beside those that have a word."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer, SparseAdam

from expt.config import groups, user_class
from expt.errors import ConfigError


def build_own(config: groups.TargetOptimizer, parameters: list[nn.Parameter] | list[dict[str, Any]]) -> Optimizer:
    """That of the `parameters`. Raises ConfigError where it can't take the steps that a run takes."""
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
            f"{where}: its step() must be given {', '.join(required)}, and a run gives it nothing, for it has the "
            "gradients once a step; use an optimizer whose step() takes them as they are, such as optimizer=adam"
        )
    if isinstance(optimizer, SparseAdam):
        raise ConfigError(f"{where}: does not support dense gradients, which those of a run are; use optimizer=adam")
