"""What a model's blocks are."""

from typing import Any

import pytest
from torch import nn

from expt.models.blocks import blocks
from expt.models.transformer import Transformer
from expt.models.vision import MLP, ResNet18

IMAGES: Any = {"channels": 1, "image_size": (8, 8), "num_classes": 3}
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


@pytest.mark.parametrize(("module", "names"), [
    (Transformer(vocab_size=7, context=6, layers=2, width=8, heads=2), "blocks.0 blocks.1"),
    (Transformer(vocab_size=7, context=6, layers=1, width=8, heads=2), "blocks.0"),
    (ResNet18(**IMAGES), " ".join(f"layer{stage}.{block}" for stage in range(1,
        5) for block in range(2))),
    (nn.ModuleDict({"encoder": ENCODER, "head": nn.Linear(8, 2)}),
        " ".join(f"encoder.layers.{n}" for n in range(3))),
    (nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), ""),
    (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ""),
    (MLP(hidden=(4, 4), dropout=0.0, **IMAGES), ""),
])  # fmt: skip
def test_the_blocks_of(module: nn.Module, names: str) -> None:
    found = blocks(module)
    assert list(found) == names.split()
    assert all(module.get_submodule(name) is block for name, block in found.items())
