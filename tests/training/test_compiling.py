"""What of a model is compiled."""

from __future__ import annotations

import pytest
from torch import nn

from expt.errors import ConfigError
from expt.models.transformer import Transformer
from expt.models.vision import MLP
from expt.training.compiling import compile_module


def compiled(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if part._compiled_call_impl is not None]


def test_a_model_or_its_blocks() -> None:
    whole, blocks = (
        Transformer(vocab_size=7, context=6, layers=2, width=8, heads=2) for _ in range(2)
    )
    compile_module(whole, True)
    compile_module(blocks, "blocks")
    assert (compiled(whole), compiled(blocks)) == ([""], ["blocks.0", "blocks.1"])


def test_a_model_without_blocks_is_told() -> None:
    with pytest.raises(
        ConfigError, match="compile=blocks: MLP has no blocks that are alike; use compile=true"
    ):
        compile_module(
            MLP(hidden=(4,), dropout=0.0, channels=1, image_size=(8, 8), num_classes=3), "blocks"
        )
