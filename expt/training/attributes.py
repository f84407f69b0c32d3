"""What parameters say of themselves, as `weight.no_decay = True` for an own optimiser, handed on to
their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from expt.training.sharding import is_sharded, spread_as, units_of

Attributes: TypeAlias = Mapping[str, Mapping[str, object]]
"""By the name of a parameter."""


def attributes_of(module: nn.Module) -> Attributes:
    """Those of a module that is not sharded yet."""
    return {name: own for name, one in module.named_parameters() if (own := dict(vars(one)))}


def hand_on(module: nn.Module, attributes: Attributes) -> None:
    """Give them to the parts of a sharded module, and to what its units gather, which their first
    passes make.

    One of a parameter's shape, as a mask, is shared out as that is.
    """
    if attributes:
        _give(module, attributes)
        for unit in units_of(module).values():
            _give_later(unit, module, attributes)


def _give(module: nn.Module, attributes: Attributes) -> None:
    for name, parameter in module.named_parameters():
        for key, value in attributes.get(name, {}).items():
            if (
                is_sharded(parameter)
                and isinstance(value, Tensor)
                and value.shape == parameter.shape
            ):
                vars(parameter)[key] = spread_as(parameter)(value)
            else:
                vars(parameter)[key] = value


def _give_later(unit: nn.Module, module: nn.Module, attributes: Attributes) -> None:
    def give_once(*_: object) -> None:
        _give(module, attributes)
        handle.remove()

    handle = unit.register_forward_pre_hook(torch.compiler.disable(give_once))
