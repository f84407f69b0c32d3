"""Load what fits of other weights into a model, and report the rest."""

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
"""names of each kind in a message"""


def plain_weights(content: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the state_dict in a checkpoint of expt, of its moving average if any, or of others.

    `names` are the model's own for its tensors.
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
    """In the model only."""
    unexpected: tuple[str, ...]
    """Offered, and not in the model."""
    other_shape: tuple[str, ...]
    """In both, with both shapes."""

    def misfits(self) -> str:
        """Return what did not fit, in a few words; empty where all did."""
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.other_shape),
        )
        return "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names)


def load_all(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load `state`, saved from an equal model; raise ConfigError where it is of another."""
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
    """Return which tensors of `state` have the name and the shape of one in `module`."""
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
