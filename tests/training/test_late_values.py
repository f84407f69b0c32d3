"""Parameters whose values are drawn late are those that they would have been."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from expt.models.convnet import ConvNet
from expt.models.mlp import MLP
from expt.models.resnet import ResNet18
from expt.models.transformer import Transformer
from expt.training.patches import late_values

IMAGES: dict[str, Any] = {"channels": 1, "image_size": (8, 8), "num_classes": 10}


class Odd(nn.Module):
    """Changes a part of what it has drawn, and what it has filled."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, padding_idx=1)
        self.scaled = nn.Linear(3, 4)
        nn.init.trunc_normal_(self.scaled.weight, std=0.02)
        with torch.no_grad():
            self.scaled.weight.mul_(2)
            self.scaled.weight[1:, 2].clamp_(max=0)
        self.register_buffer("drawn", torch.empty(4).normal_())


class Orthogonal(nn.Linear):
    """Reads what it has drawn."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        nn.init.orthogonal_(self.weight)


def tied() -> nn.Module:
    return Transformer(vocab_size=50, context=8, layers=2, heads=2, width=8)


def made(build: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(3)
    return build(), torch.rand(3)


@pytest.mark.parametrize(
    "model",
    [
        tied,
        Orthogonal,
        lambda: ResNet18(**IMAGES),
        lambda: MLP(**IMAGES),
        lambda: ConvNet(**IMAGES),
        Odd,
    ],
)
def test_values_are_those_of_a_model_that_has_them_at_once(model: Callable[[], nn.Module]) -> None:
    (module, values), drawn_after = made(lambda: late_values.build(model))
    whole, expected_after = made(model)
    assert torch.equal(drawn_after, expected_after), "the generator is where it would be"
    late, at_once = (
        dict([*each.named_parameters(), *each.named_buffers()]) for each in (module, whole)
    )
    assert late.keys() == at_once.keys()
    before = torch.get_rng_state()
    for name in reversed(late):  # in any order
        assert torch.equal(values(late[name].detach()), at_once[name]), name
    assert torch.equal(torch.get_rng_state(), before), "nor is it moved"


def test_memory_is_taken_when_values_are_asked_for() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    # Each of 64 MiB, which malloc never takes from what others have given back.
    module, values = late_values.build(
        lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    )
    before = resident()
    one = values(module.get_parameter("0.weight").detach())
    assert resident() - before > 0.9 * one.nbytes
    assert resident() - before < 2 * one.nbytes, "the other three have none yet"
