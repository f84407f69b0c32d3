"""Compile a model or its blocks, and choose the modules that recompute their activations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expt.errors import ConfigError
from expt.models.blocks import blocks, matching

KEY = "activation_checkpointing"
REPAYS_STEPS = 50_000
"""An estimate: compiling takes about a minute, and saves a fifth of a step of 6 ms (ResNet-18,
batches of 512 in bf16). A smaller model's step has less to save, and it compiles sooner."""


def mode_of(wanted: bool | str, *, steps: int) -> bool | str:
    """Return the mode that `auto` stands for in a run of this many optimizer steps, or `wanted`."""
    return steps >= REPAYS_STEPS if wanted == "auto" else wanted


def compile_module(module: nn.Module, mode: bool | str) -> None:
    """Compile `module` in place by torch's `mode` (True is its default), or its blocks one by one.

    Equal blocks share the code of the first one, so the time does not grow with their number. False
    compiles nothing. Raises ConfigError for a model without blocks.
    """
    if not mode:
        return
    if mode != "blocks":
        module.compile(mode="default" if mode is True else mode)
        return
    found = blocks(module)
    if not found:
        raise ConfigError(
            f"compile=blocks: {type(module).__name__} has no blocks that are alike; use"
            " compile=true"
        )
    for block in found.values():
        block.compile()


def checkpoint_activations(
    module: nn.Module, wanted: Sequence[str] | Literal["auto"], *, compiled: bool
) -> list[str]:
    """Have the chosen modules inside `module` keep only their inputs; return their names.

    They are the blocks (`auto`), or those whose whole name a regular expression matches; of nested
    ones the outermost. Numbers stay equal to the bit: dropout draws the same again, and buffers,
    such as a batch norm's statistics, change once. Raises ConfigError where nothing matches, and
    for modules with buffers if the model is `compiled`.
    """
    chosen = matching(module, () if wanted == "auto" else wanted, KEY)
    if wanted == "auto" and not (chosen := blocks(module)):
        some = next((name for name, _ in module.named_children()), "NAME")
        raise ConfigError(
            f"{KEY}=auto: {type(module).__name__} has no blocks that are alike; name modules, e.g."
            f" {KEY}=[{some}]"
        )
    prefixes = tuple(f"{name}." for name in chosen)
    outermost = {name: one for name, one in chosen.items() if not name.startswith(prefixes)}
    for name, part in outermost.items():
        if compiled and any(True for _ in part.buffers()):
            raise ConfigError(
                f"{KEY}: '{name}' has buffers, such as a batch norm's statistics, which compiled"
                " code can't restore; use compile=false, or checkpoint other modules"
            )
        part.forward = functools.partial(_forward, part, part.forward)
    return list(outermost)


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`, bound to `module`; a copy of a model has it as its own."""
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if not (buffers := list(module.buffers())):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    before = [buffer.clone() for buffer in buffers]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the forward pass and of its repetition."""
        return contextlib.nullcontext(), _as_before(buffers, before)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def _as_before(buffers: list[Tensor], before: list[Tensor]) -> Iterator[None]:
    """Begin with the buffers of `before`, and leave those of now."""
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
