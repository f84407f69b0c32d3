"""Activations that are computed anew in the backward pass, not kept for it: torch.utils.checkpoint
around modules.

Only the forward pass of the modules changes: their names, and those in a state_dict, stay what they
are."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expt.errors import ConfigError, did_you_mean
from expt.models.blocks import CONTAINERS, blocks

KEY = "activation_checkpointing"


def checkpoint_activations(
    module: nn.Module, wanted: Sequence[str] | Literal["auto"], *, compiled: bool
) -> list[str]:
    """Have the chosen modules inside `module` keep their inputs alone; returns their names.

    They are the blocks (`auto`), or those whose whole name one of the regular expressions matches;
    of modules inside one another the outermost. Numbers stay equal to the bit: dropout draws the
    same again, and what the forward pass has changed of buffers, such as a batch norm's statistics,
    is changed once.

    Raises ConfigError for what is found nowhere, and, where the model is `compiled`, for modules
    with buffers."""
    chosen = _outermost(_blocks(module) if wanted == "auto" else _matching(module, wanted))
    for name, part in chosen.items():
        if compiled and _buffers(part):
            raise ConfigError(
                f"{KEY}: '{name}' has buffers, such as a batch norm's statistics, which compiled"
                " code can't put back; use compile=false, or checkpoint other modules"
            )
        part.forward = functools.partial(_forward, part, part.forward)
    return list(chosen)


def _blocks(module: nn.Module) -> dict[str, nn.Module]:
    if not (found := blocks(module)):
        raise ConfigError(
            f"{KEY}=auto: {type(module).__name__} has no blocks that are alike; name modules, as in"
            f" {KEY}=[{next((name for name, _ in module.named_children()), 'NAME')}]"
        )
    return found


def _matching(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    named = {
        name: part
        for name, part in module.named_modules()
        if name and not isinstance(part, CONTAINERS)
    }
    lists = [name for name, part in module.named_modules() if name and isinstance(part, CONTAINERS)]
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in named):
            if found := next((name for name in lists if re.fullmatch(pattern, name)), None):
                each = f"{re.escape(found)}\\.\\d+"
                raise ConfigError(
                    f"{KEY}={pattern}: is a list of modules; name these, as in {KEY}=['{each}']"
                )
            some = f" There are {len(named)}, such as {', '.join(list(named)[:4])}."
            hint = did_you_mean(pattern.strip("^$.*"), list(named)) or some
            raise ConfigError(f"{KEY}={pattern}: is no module's whole name.{hint}")
    return {
        name: part
        for name, part in named.items()
        if any(re.fullmatch(each, name) for each in patterns)
    }


def _outermost(chosen: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: part
        for name, part in chosen.items()
        if not any(name.startswith(f"{other}.") for other in chosen if other != name)
    }


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Bound to the module's own forward: a copy of the module, as of a moving average, has its own
    by that.
    """
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if not (buffers := _buffers(module)):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = functools.partial(_contexts, buffers)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _buffers(module: nn.Module) -> list[Tensor]:
    return list(module.buffers())


def _contexts(
    buffers: list[Tensor],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Those of the forward pass and of its repetition, which begins with the same buffers and
    leaves none changed.
    """
    return contextlib.nullcontext(), _as_before(buffers, [buffer.clone() for buffer in buffers])


@contextlib.contextmanager
def _as_before(buffers: list[Tensor], before: list[Tensor]) -> Iterator[None]:
    now = [buffer.clone() for buffer in buffers]
    _fill(buffers, before)
    try:
        yield
    finally:
        _fill(buffers, now)


@torch.no_grad()
def _fill(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
