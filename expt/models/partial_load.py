"""Load the tensors of other weights that fit into a model, and report the rest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expt.errors import ConfigError, listed

SHOWN = 4
"""The names of each kind in a message."""
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Wrappers of torch around a module of a model: compiled, recomputed or sharded."""


class Found(NamedTuple):
    """A state_dict in a file."""

    key: str
    """The dotted key of its place; empty if it is the whole file."""
    state: dict[str, Tensor]
    fitting: int
    """How many of its names are the model's."""


def weights_in(content: Any, names: Collection[str]) -> list[Found]:
    """Return the state_dicts in a file, those first that have most of a model's `names`.

    The names in each are without the prefix under which most of them are the model's. Among equals
    a moving average is first, and an optimizer's state by the parameters' names last. In a run's
    checkpoint only `model` and `ema` count: custom code may keep others.
    """
    if is_of_run(content):
        content = {key: content[key] for key in ("model", "ema") if key in content}
    every = [_without_prefix(*one, names) for one in _state_dicts(content)]
    every.sort(key=lambda one: (-one.fitting, _order(one.key.split("."))))
    return every


def is_of_run(content: Any) -> bool:
    """Return whether a file's content is a checkpoint of a run."""
    return isinstance(content, Mapping) and {"model", "position"} <= content.keys()


def _order(parts: list[str]) -> int:
    if any(part.startswith(("optim", "grad")) for part in parts):
        return 2
    return 0 if parts[-1] == "ema" else 1


def _state_dicts(content: Any, key: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    if isinstance(content, Mapping):
        named = {name: value for name, value in content.items() if isinstance(name, str)}
        if state := {name: value for name, value in named.items() if isinstance(value, Tensor)}:
            yield key, state
        for name, below in named.items():
            yield from _state_dicts(below, f"{key}.{name}".removeprefix("."))
    elif isinstance(content, list | tuple):
        for index, below in enumerate(content):
            yield from _state_dicts(below, f"{key}.{index}".removeprefix("."))


def _without_prefix(key: str, state: dict[str, Tensor], names: Collection[str]) -> Found:
    if not any(map(_WRAPPERS.search, names)):
        state = {_WRAPPERS.sub("", name): tensor for name, tensor in state.items()}
    ends = Counter(
        ".".join((*parts[:index], ""))
        for parts in (name.split(".") for name in state)
        for index in range(len(parts))
        if ".".join(parts[index:]) in names
    )
    prefix, fitting = ends.most_common(1)[0] if ends else ("", 0)
    found = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    found.pop("n_averaged", None)  # of torch's moving average
    return Found(key, found, fitting)


@dataclass(frozen=True)
class Fit:
    """The names of a model's tensors and of given ones: loaded, missing or left out."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Names in the model only."""
    unexpected: tuple[str, ...]
    """Offered, and not in the model."""
    other_shape: tuple[str, ...]
    """Names in both, with both shapes."""

    def misfits(self) -> str:
        """Describe the tensors that did not fit in a few words; empty if all did."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected}
        kinds["of another shape"] = self.other_shape
        found = ((kind, names) for kind, names in kinds.items() if names)
        return "; ".join(f"{len(names)} {kind}: {listed(names, SHOWN)}" for kind, names in found)


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


@torch.no_grad()
def load_some(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `state` into that of the same name in `module`, in place."""
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        own[name].copy_(tensor)


def what_fits(module: nn.Module, state: Mapping[str, Tensor]) -> Fit:
    """Return which tensors of `state` have the name and the shape of one in `module`."""
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    both = {  # without the return values of get_extra_state
        name: (state[name].shape, tensor.shape)
        for name, tensor in own.items()
        if isinstance(state.get(name), Tensor) and isinstance(tensor, Tensor)
    }
    others = {name: shapes for name, shapes in both.items() if shapes[0] != shapes[1]}
    return Fit(
        loaded=tuple(name for name in both if name not in others),
        missing=tuple(name for name in own if name not in state),
        unexpected=tuple(name for name in state if name not in own),
        other_shape=tuple(f"{x} {[*a]}, the model's {[*b]}" for x, (a, b) in others.items()),
    )
