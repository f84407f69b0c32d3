"""Own models that can't be sharded are refused, for others they would train to other weights; attributes are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expt.errors import ConfigError
from expt.training.collectives import Worker
from expt.training.precision import Precision
from expt.training.shardable import refusal
from expt.training.sharding import choose_units
from expt.worker import sharding
from tests.worker.conftest import ALONE
from tests.worker.sharded import Configs, apart, together, trained
from tests.worker.test_unused import SHORT, ended, of


class Kind(nn.Parameter):
    """One that an own optimiser would know by its class."""


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_parameter("own", parameter)
    return module


def of_two_types() -> nn.Module:
    return nn.Sequential(nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()) for _ in range(2)))


def hooked(register: Callable[[Tensor], object]) -> nn.Module:
    layer = nn.Linear(4, 4)
    register(layer.weight)
    return nn.Sequential(layer)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nothing to train": (
        lambda: nn.Sequential(nn.Linear(4, 4)).requires_grad_(False),
        "has no parameter to train; use",
    ),
    "a number": (lambda: with_parameter(nn.Parameter(torch.tensor(1.0))), "own has no dimension to share out; give it"),
    "none": (
        lambda: with_parameter(nn.Parameter(torch.zeros(0, 3))),
        "own has the shape [0, 3], and no number to train; leave it out, name it in freeze, or use strategy=ddp",
    ),
    "complex": (
        lambda: with_parameter(nn.Parameter(torch.zeros(3, dtype=torch.complex64))),
        "own is complex, and has no gradient there; keep its two parts as real numbers, or use strategy=ddp",
    ),
    "its own class": (
        lambda: with_parameter(Kind(torch.zeros(3))),
        "own is a Kind, and a part of it is not; give it an attribute instead, or use strategy=ddp",
    ),
    "a hook": (
        lambda: hooked(lambda weight: weight.register_hook(torch.neg)),
        "0.weight has a hook for its gradient, which no part of it has; leave the hook out, or use strategy=ddp",
    ),
    "a hook after it": (
        lambda: hooked(lambda weight: weight.register_post_accumulate_grad_hook(lambda _: None)),
        "0.weight has a hook for its gradient",
    ),
    "two types": (of_two_types, "the unit 0.0 has parameters of several types, bfloat16 and float32; name what has"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_share_out_is_refused(name: str, configs: Configs) -> None:
    make, told = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        sharding.shard(configs("fsdp", 2), make(), ALONE, Precision(False, ALONE.device), lambda tensor: tensor)
    assert str(refused.value).startswith("strategy=fsdp: the ")
    assert told in str(refused.value)


def test_types_that_are_not_trained_or_in_units_of_their_own_do_not_count() -> None:
    module = of_two_types()
    assert refusal(module, choose_units(module, [r"0\.\d\.1"])) is None
    for part in (module.get_submodule("0.0.0"), module.get_submodule("0.1.0")):
        part.requires_grad_(False)
    assert refusal(module, choose_units(module, "auto")) is None


def test_parameters_that_are_not_trained_may_be_complex_or_empty() -> None:
    for values in (torch.zeros(0, 3), torch.zeros(3, dtype=torch.complex64)):
        module = with_parameter(nn.Parameter(values, requires_grad=False))
        assert refusal(module, []) is None


class Marked(nn.Module):
    """What its weights say of themselves its own optimiser reads, and it itself."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, width), nn.Linear(width, 10)])
        self.bias = nn.Parameter(torch.ones(10))
        for parameter, scale in zip(self.parameters(), (2.0, 3.0, 1.0, 0.5, 1.0), strict=True):
            vars(parameter)["scale"] = scale

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 10]."""
        inside = self.blocks[0](images.flatten(1)) * getattr(self.blocks[0].weight, "scale", 1.0)
        return self.blocks[1](inside.relu()) + self.bias * getattr(self.bias, "scale", 1.0)  # type: ignore[no-any-return]


class BySize(torch.optim.SGD):
    """Steps are as much larger as a parameter asks for."""

    def step(self, closure: Any = None) -> Any:
        """As SGD's, by other gradients."""
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.mul_(getattr(one, "scale", 1.0))
        return super().step(closure)


@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)])
def test_what_a_parameter_says_of_itself_its_part_says_too(
    strategy: str, size: int, configs: Configs, tmp_path: Path
) -> None:
    own = f"optimizer={{_target_: {__name__}.BySize, lr: 0.1}}"
    words = (*of(Marked), *SHORT[:-2], own, "batch_size=16")
    shards = ("sharding.shards=2",) if strategy == "hsdp" else ()
    plain = ended(tmp_path / "ddp", configs("ddp", size, *words))
    assert apart(plain, ended(tmp_path / "parts", configs(strategy, size, *words, *shards))) < 1e-5
    unmarked = ended(tmp_path / "unmarked", configs("ddp", size, *words, "lr_scaling=none", "optimizer.lr=0.2"))
    assert apart(plain, unmarked) > 1e-3, "the steps are told from others"


class Listed(nn.Module):
    """Its second layer has the first one's weight, from a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
        self.tied = (self.first.weight,)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 10]."""
        inside = nn.functional.linear(self.first(images.flatten(1)).relu(), self.tied[0])
        return self.last(inside)  # type: ignore[no-any-return]


def test_a_parameter_that_is_kept_elsewhere_too_is_refused(configs: Configs, tmp_path: Path) -> None:
    def each(worker: Worker) -> str:
        try:
            return trained(
                tmp_path / "run", configs("fsdp", 2, *of(Listed), *SHORT, "batch_size=16", "ema=0.9"), worker
            )
        except ConfigError as error:
            return str(error)

    for told in together(tmp_path, 2, each):
        assert told.startswith(
            "strategy=fsdp: the model keeps its parameter first.weight in a list or the like too, where it would never "
            "be trained; take it from its module"
        )
