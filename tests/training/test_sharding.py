"""What of a model is gathered at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from expt.errors import ConfigError
from expt.models.transformer import Transformer
from expt.models.vision import MLP, ConvNet, ResNet18
from expt.training import sharding

IMAGES: Any = {"channels": 1, "image_size": (8, 8), "num_classes": 10}


def transformer(*, tied: bool = True) -> Transformer:
    return Transformer(vocab_size=50, context=8, layers=3, heads=2, width=8, tied=tied)


def names(module: nn.Module, wrap: str | int | list[str]) -> list[str]:
    named = {part: name for name, part in module.named_modules()}
    return [named[unit] for unit in sharding.choose_units(module, wrap)]


def test_units_are_blocks_and_large_layers() -> None:
    assert {f"blocks.{n}" for n in range(3)} <= set(names(transformer(), "auto"))
    assert "head" not in names(transformer(), "auto"), "it shares its weights with the embedding"
    assert {"tokens", "head"} <= set(names(transformer(tied=False), "auto"))
    assert {f"layer{n}.{m}" for n in (1, 2, 3, 4) for m in (0, 1)} == set(
        names(ResNet18(**IMAGES), "auto")
    )
    assert names(MLP(**IMAGES, hidden=[64, 64]), "auto") == ["1", "3", "5"]
    units = sharding.choose_units(ConvNet(**IMAGES), "auto")
    convolutions = [part for part in units if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == 2, "the first is small"


def test_units_of_a_size_and_by_name_come_innermost_first() -> None:
    found = names(transformer(), 270)
    assert found.index("blocks.0.grow") < found.index("blocks.0")
    assert names(transformer(), [r"blocks\.\d", r"blocks\.0\.grow"])[0] == "blocks.0.grow"


def test_attention_that_computes_with_its_layers_weights_is_whole() -> None:
    module = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert names(module, "auto") == ["1"]


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (
            ["block"],
            (
                r"sharding.wrap=\[block\]: matches the whole name of no module \(containers don't"
                r" count\)\. Did you mean .*blocks"
            ),
        ),
        (["blocks"], r"sharding.wrap=\[blocks\]: "),
        (
            ["head"],
            r"head shares tokens.weight with another module, and both must be gathered together",
        ),
        (
            10**9,
            (
                r"sharding.wrap=1000000000: no module within the model has so many parameters, of"
                r" \d+ in all"
            ),
        ),
    ],
)
def test_what_can_be_no_unit_is_refused(wrap: list[str] | int, told: str) -> None:
    module = transformer()
    module.blocks = nn.ModuleList(module.blocks)
    with pytest.raises(ConfigError, match=told):
        names(module, wrap)


def test_an_outline_takes_no_memory_and_fits() -> None:
    module = transformer()
    outline = sharding.outline(module)
    assert all(parameter.is_meta for parameter in outline.parameters())
    outline.load_state_dict(module.state_dict(), assign=True)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    assert torch.equal(outline(tokens), module(tokens))
