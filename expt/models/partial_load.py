"""Weights into a model that has not all of them, or others: what fits is loaded, and the rest is
told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from expt.errors import ConfigError

_AROUND = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before each name."""
SHOWN = 4
"""names of each kind that are told"""


def plain_weights(content: Any, names: Collection[str]) -> dict[str, Any]:
    """The state_dict in a checkpoint of expt's, of a moving average where it has one, or of another
    program's.

    By the `names` that the model alone has for its tensors.
    """
    for key in ("ema", "model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    state = dict(content) if isinstance(content, Mapping) else {}
    state.pop("n_averaged", None)  # of a moving average
    for prefix in _AROUND:
        if state.keys() & names:  # a model may have an attribute `module` of its own
            break
        consume_prefix_in_state_dict_if_present(state, prefix)
    return state


@dataclass(frozen=True)
class Fit:
    """The names of a model's tensors, and of those it was offered, by what became of them."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """In the model alone."""
    unexpected: tuple[str, ...]
    """Offered, and not in the model."""
    other_shape: tuple[str, ...]
    """In both, and told with both shapes."""

    def misfits(self) -> str:
        """What did not fit, in a few words; empty where all did."""
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.other_shape),
        )
        return "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names)


def load_all(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load `state`, which was saved of a model of the same making.

    Raises ConfigError where it is of another.
    """
    try:
        module.load_state_dict(state)
    except RuntimeError as error:  # torch's has a line for each tensor
        if not (misfits := what_fits(module, state).misfits()):
            raise
        raise ConfigError(
            f"model: is not the one that the checkpoint was saved of ({misfits}); put its class"
            " back as it was, or begin a new run with weights=RUN, which takes what fits"
        ) from error


def load_what_fits(module: nn.Module, state: Mapping[str, Tensor]) -> Fit:
    """Copy each tensor of `state` into that of the same name and shape in `module`, in place."""
    fit = what_fits(module, state)
    load_some(module, {name: state[name] for name in fit.loaded})
    return fit


@torch.no_grad()
def load_some(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `state` into that of the same name in `module`, in place."""
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        own[name].copy_(tensor)


def what_fits(module: nn.Module, state: Mapping[str, Tensor]) -> Fit:
    """Which tensors of `state` have the name and the shape of one in `module`."""
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    both = [name for name in own if name in state]
    return Fit(
        loaded=tuple(name for name in both if own[name].shape == state[name].shape),
        missing=tuple(name for name in own if name not in state),
        unexpected=tuple(name for name in state if name not in own),
        other_shape=tuple(
            f"{name} {[*state[name].shape]}, the model's {[*own[name].shape]}"
            for name in both
            if own[name].shape != state[name].shape
        ),
    )


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
