"""What of a model torch.compile gets to see."""

from __future__ import annotations

from torch import nn

from expt.errors import ConfigError
from expt.models.blocks import blocks

REPAYS_STEPS = 50_000
"""An estimate, of no measurement: compiling takes about a minute, and saves a fifth of a step of 6
ms (ResNet-18, batch
512, bf16). A smaller model's step has less to save, and it compiles sooner."""


def mode_of(wanted: bool | str, *, steps: int) -> bool | str:
    """What `auto` is for a run of so many optimiser steps; else what is wanted."""
    return steps >= REPAYS_STEPS if wanted == "auto" else wanted


def compile_module(module: nn.Module, mode: bool | str) -> None:
    """Compile `module` in its place, by torch's `mode` (True is its default), or its blocks one by
    one.

    Blocks that are alike share what the first of them was compiled to: the time that it takes does
    not grow with their number. With False nothing is. Raises ConfigError for a model without
    blocks."""
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
