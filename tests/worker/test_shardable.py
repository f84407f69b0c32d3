"""Own models that can't be sharded are refused, for others they would train to other weights;
attributes are kept.
"""

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
from expt.training.shardable import refusal, shared_memory
from expt.training.sharding import choose_units
from expt.worker import sharding
from expt.worker.diagnosis import in_words
from tests.worker.conftest import ALONE
from tests.worker.sharded import Configs, apart, together, trained
from tests.worker.test_unused import SHORT, ended, of


class Kind(nn.Parameter):
    """One that an own optimiser would know by its class."""


class Own(Tensor):
    """One whose operations are its own."""


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_parameter("own", parameter)
    return module


def of_two_types() -> nn.Module:
    return nn.Sequential(
        nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()) for _ in range(2))
    )


def hooked(register: Callable[[Tensor], object]) -> nn.Module:
    layer = nn.Linear(4, 4)
    register(layer.weight)
    return nn.Sequential(layer)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nothing to train": (
        lambda: nn.Sequential(nn.Linear(4, 4)).requires_grad_(False),
        "has no parameter to train; use",
    ),
    "a number": (
        lambda: with_parameter(nn.Parameter(torch.tensor(1.0))),
        "own has no dimension to share out; give it",
    ),
    "none": (
        lambda: with_parameter(nn.Parameter(torch.zeros(0, 3))),
        (
            "own has the shape [0, 3], and no number to train; leave it out, name it in freeze, or"
            " use strategy=ddp"
        ),
    ),
    "complex": (
        lambda: with_parameter(nn.Parameter(torch.zeros(3, dtype=torch.complex64))),
        (
            "own is complex, and has no gradient there; keep its two parts as real numbers, or use"
            " strategy=ddp"
        ),
    ),
    "its own class": (
        lambda: with_parameter(Kind(torch.zeros(3))),
        "own is a Kind, and a part of it is not; give it an attribute instead, or use strategy=ddp",
    ),
    "a class of tensors": (
        lambda: with_parameter(nn.Parameter(torch.zeros(3).as_subclass(Own))),
        "own is a Own, and a part of it is not; give it an attribute instead, or use strategy=ddp",
    ),
    "a hook": (
        lambda: hooked(lambda weight: weight.register_hook(torch.neg)),
        (
            "0.weight has a hook for its gradient, which no part of it has; leave the hook out, or"
            " use strategy=ddp"
        ),
    ),
    "a hook after it": (
        lambda: hooked(lambda weight: weight.register_post_accumulate_grad_hook(lambda _: None)),
        "0.weight has a hook for its gradient",
    ),
    "two types": (
        of_two_types,
        "the unit 0.0 has parameters of several types, bfloat16 and float32; name what has",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_share_out_is_refused(name: str, configs: Configs) -> None:
    make, told = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        sharding.shard(
            configs("fsdp", 2), make(), ALONE, Precision(False, ALONE.device), lambda tensor: tensor
        )
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


def test_memory_that_two_have_in_common_is_refused() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    module = nn.Sequential(first, second)
    assert shared_memory(module) is None
    flat = torch.zeros(6, 4)
    first.weight.data, second.weight.data = flat[::2].T[:, :3], flat[1::2].T[:, :3]
    assert shared_memory(module) is None, "each has its own numbers of one tensor"
    first.weight.data, second.weight.data = flat[:4], flat[2:6]
    told = "the model's 0.weight and 1.weight have their memory in common, and parts have not"
    assert shared_memory(module) == (told, "let it be one parameter under two names")
    module.register_buffer("alias", second.weight.detach()[3:])
    second.weight.data = second.weight.data[1:]
    first.weight.data = torch.zeros(4, 4)
    found = shared_memory(module)
    assert found is not None
    assert "the model's 1.weight and alias have" in found.why


class Marked(nn.Module):
    """What its weights say of themselves its own optimiser reads, and it itself."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, width), nn.Linear(width, 10)])
        self.bias = nn.Parameter(torch.ones(10))
        for parameter, scale in zip(self.parameters(), (2.0, 3.0, 1.0, 0.5, 1.0), strict=True):
            vars(parameter).update(
                scale=scale, mask=torch.arange(parameter.numel()).view_as(parameter) % 3 > 0
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 10]."""
        inside = self.blocks[0](images.flatten(1)) * getattr(self.blocks[0].weight, "scale", 1.0)
        return self.blocks[1](inside.relu()) + self.bias * getattr(self.bias, "scale", 1.0)  # type: ignore[no-any-return]


class BySize(torch.optim.SGD):
    """Steps are as much larger as a parameter asks for, of the numbers that it does not mask."""

    def step(self, closure: Any = None) -> Any:
        """As SGD's, by other gradients."""
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.mul_(getattr(one, "scale", 1.0))
                if hasattr(one, "mask"):
                    one.grad.mul_(one.mask)
        return super().step(closure)


OWN_OPTIMIZER = f"optimizer={{_target_: {__name__}.BySize, lr: 0.1}}"


@pytest.mark.parametrize(
    ("strategy", "size"), [("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)]
)
def test_what_a_parameter_says_of_itself_its_part_says_too(
    strategy: str, size: int, configs: Configs, tmp_path: Path
) -> None:
    words = (*of(Marked), *SHORT[:-2], OWN_OPTIMIZER, "batch_size=16")
    shards = ("sharding.shards=2",) if strategy == "hsdp" else ()
    plain = ended(tmp_path / "ddp", configs("ddp", size, *words))
    assert apart(plain, ended(tmp_path / "parts", configs(strategy, size, *words, *shards))) < 1e-5
    plain_sgd = (*of(Marked), *SHORT[:-2], "optimizer=sgd", "optimizer.lr=0.1", "batch_size=16")
    assert apart(plain, ended(tmp_path / "sgd", configs("ddp", size, *plain_sgd))) > 1e-3, (
        "its steps are others"
    )


HOOKED = {"hooked": "blocks.0.weight", "hooked where it is whole": "first.weight"}


class Odd(nn.Module):
    """Its middle layer is used in a way of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self._kind = nn.Linear(64, 16), nn.Linear(16, 10), kind
        layer = Clamped(16, 16) if kind == "clamped" else nn.Linear(16, 16)
        self.blocks, weight = nn.ModuleList([layer]), layer.weight
        if kind == "normed":
            with pytest.warns(FutureWarning):
                nn.utils.weight_norm(layer)
        self.kept: Any = (
            [weight]
            if kind in ("listed", "unused")
            else weight.detach()[1:]
            if kind == "viewed"
            else None
        )
        self.kept = weight.detach().numpy() if kind == "numpy" else self.kept

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 10]."""
        inside = self.blocks[0](self.first(images.flatten(1)).relu())
        if self._kind in HOOKED and self.training and not hasattr(self, "handle"):
            self.handle = self.get_parameter(HOOKED[self._kind]).register_hook(torch.neg)
        if self._kind in ("listed", "viewed", "numpy"):
            weight = self.kept[0] if self._kind == "listed" else torch.as_tensor(self.kept)
            inside = inside + weight.mean()
        return self.last(inside.relu())  # type: ignore[no-any-return]


class Clamped(nn.Linear):
    """Its weights are kept small, where they are used."""

    def forward(self, inputs: Tensor) -> Tensor:
        """As a linear layer's."""
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(inputs)


def odd(kind: str, strategy: str, configs: Configs, folder: Path) -> list[str]:
    """What each worker's run came to, or was refused by."""
    wrap = ("sharding.wrap=[blocks..]",) if strategy == "fsdp" else ()
    config = configs(strategy, 2, *of(Odd), f"+model.kind='{kind}'", *SHORT, "batch_size=16", *wrap)

    def each(worker: Worker) -> str:
        try:
            return trained(folder, config, worker)
        except ConfigError as error:
            return str(error)

    return together(folder.parent, 2, each)


KEPT = (
    "strategy=fsdp: the model has kept blocks.0.weight in a list, a buffer or the like, where it is"
    " not trained;"
)
LOST = {
    "listed": KEPT,
    "viewed": KEPT,
    "numpy": KEPT,
    "clamped": (
        "strategy=fsdp: the model writes to blocks.0.weight in its forward pass, where it has a"
        " copy"
    ),
    "hooked": (
        "the parameter blocks.0.weight has got a hook for its gradient, which its parts do not have"
    ),
}


@pytest.mark.parametrize("kind", LOST)
def test_what_a_first_pass_would_lose_is_refused(
    kind: str, configs: Configs, tmp_path: Path
) -> None:
    for told in odd(kind, "fsdp", configs, tmp_path / "run"):
        assert told.startswith(LOST[kind])


@pytest.mark.parametrize("kind", ["unused", "normed", "hooked where it is whole"])
def test_what_is_kept_and_not_used_trains_as_with_ddp(
    kind: str, configs: Configs, tmp_path: Path
) -> None:
    for strategy in ("ddp", "fsdp"):
        assert set(odd(kind, strategy, configs, tmp_path / strategy)) == {"completed"}
    assert apart(tmp_path / "ddp", tmp_path / "fsdp") < 1e-5


def test_an_optimizer_that_takes_a_whole_tensor_is_told_so(
    configs: Configs, tmp_path: Path
) -> None:
    def each(worker: Worker) -> str:
        config = configs("fsdp", 2, *of(Halved), *SHORT[:-2], OWN_OPTIMIZER, "batch_size=16")
        try:
            return trained(tmp_path / "run", config, worker)
        except RuntimeError as error:
            return str(in_words(error, config))

    for told in together(tmp_path, 2, each):
        assert told.startswith(
            "strategy=fsdp: the optimizer takes a tensor that each worker has whole beside a param"
        )


class Halved(Marked):
    """With a mask of each row, and not of each number."""

    def __init__(self) -> None:
        super().__init__()
        vars(self.blocks[0].weight)["mask"] = torch.ones(8, 1)
