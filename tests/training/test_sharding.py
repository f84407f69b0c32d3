"""What of a model is gathered at a time."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from expt.errors import ConfigError
from expt.models.transformer import Transformer
from expt.models.vision import MLP, ConvNet, ResNet18
from expt.runs.checkpoint import map_leaves
from expt.training import sharding
from expt.training.collectives import Worker
from expt.training.sharding import is_sharded, scatter_state, whole
from tests.ranks import together

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
        (["tokens", "act"], r"sharding.wrap=\[act\]: "),
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
    module.blocks, module.act = nn.ModuleList(module.blocks), nn.ReLU()
    with pytest.raises(ConfigError, match=told):
        names(module, wrap)


def test_an_outline_takes_no_memory_and_fits() -> None:
    module = transformer()
    outline = sharding.outline(module)
    assert all(parameter.is_meta for parameter in outline.parameters())
    outline.load_state_dict(module.state_dict(), assign=True)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    assert torch.equal(outline(tokens), module(tokens))


SHAPE = (6, 3, 2, 2)


def states() -> dict[str, Any]:
    """Of the same numbers, which lie in memory in several ways, and some that overlap."""
    numbers = torch.arange(72.0).view(SHAPE)
    laid_out = {
        "plain": numbers,
        "channels_last": numbers.contiguous(memory_format=torch.channels_last),
        "transposed": numbers.transpose(0, 3).contiguous().transpose(0, 3),
        "gaps": numbers.repeat_interleave(2, dim=1)[:, ::2],
    }
    return {
        **laid_out,
        "optimizer": [{"exp_avg": laid_out["channels_last"]}],
        "expanded": torch.ones(3, 1).expand(3, 2),
        "counted": collections.Counter("a"),
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_arrive_whatever_their_strides(sharded: bool, tmp_path: Path) -> None:
    def each(worker: Worker) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        pattern = (
            distribute_tensor(
                torch.zeros(SHAPE), init_device_mesh(worker.device.type, (2,)), [Shard(0)]
            )
            if sharded
            else None
        )
        state = states() if worker.rank == 0 else None
        found = scatter_state(state, lambda place: pattern, worker.device)
        parts = list[bool]()
        map_leaves(lambda _, value: parts.append(is_sharded(value)), found)
        return map_leaves(lambda _, value: listed(value), found), parts

    def listed(value: Any) -> Any:
        return whole(value).tolist() if isinstance(value, torch.Tensor) else value

    expected = map_leaves(lambda _, value: listed(value), states())
    for found, parts in together(tmp_path, 2, each):
        assert found == expected
        assert type(found["counted"]) is collections.Counter
        assert parts == [sharded] * 5 + [False] * 2
