"""The layer of a parameter, and learning rates that fall towards the input."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from expt.config.groups import Muon, ParameterGroup
from expt.errors import ConfigError
from expt.models.transformer import Transformer
from expt.training.optim import build_optimizer
from expt.training.parameter_groups import depths, rate_of
from tests.training.test_muon import SETTINGS as MUON_SETTINGS
from tests.training.test_parameter_groups import OPTIMIZERS


class Block(nn.Module):
    """Has a list inside, and is a layer all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.norm = nn.LayerNorm(4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(2, 4))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)


class Net(nn.Module):
    """As a ViT is built: a token and a stem, an encoder, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.stem = nn.Linear(3, 4)
        self.encoder = Encoder()
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.stem(inputs) + self.token + self.encoder.positions[0]
        for block in self.encoder.blocks:
            features = features + block.grow(block.norm(features))  # type: ignore[operator]
        outputs: torch.Tensor = self.head(self.encoder.norm(features))
        return outputs


DEPTHS = {
    "token": 3, "stem": 3, "encoder.positions": 3, "encoder.blocks.0": 2, "encoder.blocks.1": 1,
    "encoder.norm": 1, "head": 0,
}  # fmt: skip


def by_part(found: dict[str, int], parts: Any) -> dict[str, int]:
    """The depth of each part, which must be that of all its parameters."""
    several = {
        part: {depth for name, depth in found.items() if f"{name}.".startswith(f"{part}.")}
        for part in parts
    }
    assert all(len(of_part) == 1 for of_part in several.values()), several
    return {part: of_part.pop() for part, of_part in several.items()}


def test_what_is_no_layer_belongs_to_the_layer_before() -> None:
    assert by_part(depths(Net()), DEPTHS) == DEPTHS


def test_several_of_a_class_are_layers_and_not_opened() -> None:
    inceptions = nn.Module()
    inceptions.first, inceptions.second, inceptions.head = Block(), Block(), nn.Linear(4, 2)
    expected = {"first": 2, "second": 1, "head": 0}
    assert by_part(depths(inceptions), expected) == expected


def test_the_layers_of_a_decoder() -> None:
    words = {"vocab_size": 5, "context": 4, "layers": 2, "heads": 1, "width": 4, "dropout": 0.0}
    decoder = {"tokens": 3, "positions": 3, "blocks.0": 2, "blocks.1": 1, "norm": 1, "head": 0}
    assert by_part(depths(Transformer(**words, tied=False)), decoder) == decoder  # type: ignore[arg-type]
    tied = depths(Transformer(**words, tied=True))  # type: ignore[arg-type]
    assert (tied["tokens.weight"], tied["blocks.1.grow.weight"]) == (2, 0), "tied to the tokens"


def test_the_layers_of_models_that_torchvision_and_timm_have() -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        vit = depths(models.vit_b_16())
        mobilenet = depths(models.mobilenet_v3_small())
    blocks = {f"encoder.layers.encoder_layer_{index}": 12 - index for index in range(12)}
    expected = {
        "class_token": 13,
        "conv_proj": 13,
        "encoder.pos_embedding": 13,
        **blocks,
        "encoder.ln": 1,
        "heads": 0,
    }
    assert by_part(vit, expected) == expected
    assert by_part(mobilenet, ("features.0", "features.11", "classifier.0", "classifier.3")) == {
        "features.0": 14, "features.11": 3, "classifier.0": 1, "classifier.3": 0,
    }  # fmt: skip
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224")
    groups = pytest.importorskip("timm.optim").param_groups_layer_decay(
        model, layer_decay=0.5, weight_decay_exclude_1d=False
    )
    scales = {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}
    names = {name: scales[parameter] for name, parameter in model.named_parameters()}
    assert {name: 0.5**depth for name, depth in depths(model).items()} == names


class Mine(nn.Module):
    """Registered in another order than it computes, which its method says."""

    def __init__(self, matcher: Any) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(3, 2), nn.Linear(2, 3)
        self._matcher = matcher

    def group_matcher(self, coarse: bool = False) -> Any:
        return self._matcher


def test_an_own_model_may_say_its_layers() -> None:
    pytest.importorskip("timm")
    assert by_part(depths(Mine({"stem": r"^stem"})), ("stem", "head")) == {"stem": 1, "head": 0}
    with pytest.raises(
        ConfigError, match=r"^optimizer.layer_decay: Mine\.group_matcher is not as timm's are \("
    ):
        depths(Mine(3))


def test_a_model_of_a_single_layer_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^optimizer\.layer_decay: Linear is a single layer, all of which is its h",
    ):
        build_optimizer(OPTIMIZERS["sgd"](layer_decay=0.5), nn.Linear(2, 2))


def trained(optimizer: optim.Optimizer, module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.randn(8, 3, generator=generator)).square().sum().backward()
        optimizer.step()
    return module


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_is_that_of_an_optimiser_written_by_hand(kind: str) -> None:
    """Combine it with groups and undecayed biases, against one torch group per parameter."""
    ours, theirs = net(), net()
    head = ParameterGroup(match="head|blocks.0", lr_scale=0.2, weight_decay=0.3)
    config = OPTIMIZERS[kind](groups=(head,), decay_biases_and_norms=False, layer_decay=0.75)
    optimizer = build_optimizer(config, ours)
    assert rate_of(optimizer) == pytest.approx(0.1), "what is logged"
    by_hand = []
    for name, parameter in theirs.named_parameters():
        depth = next(depth for part, depth in DEPTHS.items() if f"{name}.".startswith(f"{part}."))
        chosen = "head" in name or "blocks.0" in name
        lr = 0.1 * (0.75**depth * (0.2 if chosen else 1.0))
        decay = 0.0 if parameter.dim() < 2 else 0.3 if chosen else 0.01
        by_hand.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    reference: optim.Optimizer
    if kind == "sgd":
        reference = optim.SGD(by_hand, momentum=0.9, fused=True)
    else:
        reference = optim.AdamW(by_hand, betas=(0.9, 0.9), fused=True)
    trained(optimizer, ours)
    trained(reference, theirs)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert not torch.equal(ours.stem.weight, net().stem.weight)


def test_both_parts_of_muon_follow_the_layers() -> None:
    module = net()
    optimizer = build_optimizer(Muon(**MUON_SETTINGS, layer_decay=0.5), module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    rates = {
        names[p]: group["lr"] / MUON_SETTINGS["lr"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert by_part(rates, DEPTHS) == pytest.approx(
        {part: 0.5**depth for part, depth in DEPTHS.items()}
    )
