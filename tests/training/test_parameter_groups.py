"""Parameters with settings of their own: groups, layers by their depth, and Muon's matrices."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn, optim

from expt.config.groups import SGD, Adam, Muon, OneCycle, ParameterGroup, TargetOptimizer
from expt.errors import ConfigError
from expt.models.transformer import Transformer
from expt.training.optim import build_optimizer, hidden_matrices
from expt.training.parameter_groups import depths, parameter_groups, rate_of
from expt.training.schedules import build_scheduler
from tests.training.plain import same_weights

HEAD = ParameterGroup(match="^head", lr_scale=0.1, weight_decay=0.0)
BIAS = ParameterGroup(match=r"bias$", lr_scale=2.0)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda **more: SGD(
        name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=False, **more
    ),
    "adam": lambda **more: Adam(
        name="adam", lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.01, **more
    ),
    "adamw": lambda **more: Adam(
        name="adamw", lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.01, **more
    ),
    "own": lambda **more: TargetOptimizer(
        target="torch.optim.RMSprop", kwargs={"lr": 0.1, "weight_decay": 0.01}, **more
    ),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = {"stem": nn.Linear(6, 5), "norm": nn.BatchNorm1d(5), "head": nn.Linear(5, 3)}
    return nn.Sequential(OrderedDict(layers))


def grouped(optimizer: optim.Optimizer, module: nn.Module) -> list[tuple[list[str], float, float]]:
    """The names in each group, its learning rate and its weight decay."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = optimizer.param_groups
    return [
        ([names[p] for p in group["params"]], group["lr"], group["weight_decay"]) for group in found
    ]


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["own"]])
def test_without_groups_torch_is_given_what_it_always_was(make: Any) -> None:
    module = net()
    optimizer = build_optimizer(make(), module)
    assert parameter_groups(module, make()) == [{"params": [*module.parameters()]}]
    (group,) = optimizer.param_groups
    assert "lr_scale" not in group, "nor is it in a checkpoint"
    assert all(
        ours is theirs for ours, theirs in zip(group["params"], module.parameters(), strict=True)
    )


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["own"]])
def test_the_first_match_counts_and_the_rest_comes_first(make: Any) -> None:
    module = net()
    assert grouped(build_optimizer(make(groups=(HEAD, BIAS)), module), module) == [
        (["stem.weight", "norm.weight"], 0.1, 0.01),
        (["head.weight", "head.bias"], pytest.approx(0.01), 0.0),
        (["stem.bias", "norm.bias"], 0.2, 0.01),
    ]


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["own"]])
def test_biases_and_norms_need_not_decay(make: Any) -> None:
    module = net()
    assert grouped(build_optimizer(make(decay_biases_and_norms=False), module), module) == [
        (["stem.weight", "head.weight"], 0.1, 0.01),
        (["stem.bias", "norm.weight", "norm.bias", "head.bias"], 0.1, 0.0),
    ]
    head = ParameterGroup(match="head", weight_decay=0.5)
    assert grouped(
        build_optimizer(make(decay_biases_and_norms=False, groups=(head,)), module), module
    )[2:] == [(["head.weight"], 0.1, 0.5), (["head.bias"], 0.1, 0.0)]


def test_biases_and_norms_of_several_dimensions_need_not_decay_either() -> None:
    """As in Hugging Face's Trainer: the tables of T5 and Swin, the biases of XLNet."""
    module = nn.ModuleDict(
        {
            "relative_attention_bias": nn.Embedding(32, 2),
            "norm": nn.LayerNorm([4, 2, 2]),
            "root": nn.RMSNorm([2, 3]),
            "linear": nn.Linear(3, 3),
        }
    )
    module.register_parameter("r_w_bias", nn.Parameter(torch.zeros(2, 16)))
    module.register_parameter("table", nn.Parameter(torch.zeros(2, 16)))
    made = build_optimizer(OPTIMIZERS["sgd"](decay_biases_and_norms=False), module)
    assert [{*names} for names, _, decay in grouped(made, module) if decay] == [
        {"linear.weight", "table"}
    ]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_uses_the_settings_of_each_group(make: Any) -> None:
    """As two optimisers would, each over its own part."""

    def trained(*, groups: tuple[ParameterGroup, ...]) -> nn.Module:
        module = net()
        optimizers = [build_optimizer(make(groups=groups), module)]
        if not groups:
            optimizers.clear()
            for part, scale, decay in (
                ("stem", 1.0, 0.01),
                ("norm", 1.0, 0.01),
                ("head", 0.1, 0.0),
            ):
                optimizers.append(build_optimizer(make(), module.get_submodule(part)))
                optimizers[-1].param_groups[0] |= {"lr": 0.1 * scale, "weight_decay": decay}
        for step in range(3):
            module(torch.arange(24.0).view(4, 6) + step).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return module

    assert same_weights(trained(groups=(HEAD,)), trained(groups=()))


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            (HEAD, ParameterGroup(match="stem.wieght")),
            r"optimizer\.groups\.1\.match=stem\.wieght: matches no parameter of the model"
            r".* Did you mean 'stem\.weight'\?",
        ),
        (
            (HEAD, ParameterGroup(match="setm")),
            r"optimizer\.groups\.1\.match=setm: .* Did you mean 'stem'\?",
        ),
        (
            (BIAS, ParameterGroup(match="head.bias")),
            r"optimizer\.groups\.1\.match=head\.bias: matches no parameter of",
        ),
    ],
    ids=["nothing", "nothing at all", "nothing more"],
)
def test_empty_group_is_refused(groups: tuple[ParameterGroup, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}"):
        build_optimizer(OPTIMIZERS["sgd"](groups=groups), net())


def test_a_setting_that_an_own_optimizer_has_not_is_refused() -> None:
    config = TargetOptimizer(target="torch.optim.Rprop", kwargs={}, decay_biases_and_norms=False)
    with pytest.raises(
        ConfigError, match=r"^optimizer: Rprop has no weight_decay, which optimizer\.groups, layer"
    ):
        build_optimizer(config, net())


class Fixed(optim.Optimizer):
    """An optimizer whose steps are of one length."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_an_optimizer_without_a_rate_is_refused() -> None:
    config = TargetOptimizer(target=f"{__name__}.Fixed", kwargs={})
    with pytest.raises(ConfigError, match=r"^optimizer: Fixed has no lr"):
        build_optimizer(config, net())


def test_a_rate_that_is_a_tensor_is_told_as_it_was() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    told = rate_of(optimizer)
    rate.fill_(0.25)
    assert (told, type(told)) == (0.5, float)


MUON: dict[str, Any] = {
    "name": "muon", "lr": 0.02, "momentum": 0.9, "nesterov": True, "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
}  # fmt: skip


def matrices_net() -> nn.Module:
    torch.manual_seed(0)
    layers = {
        "words": nn.Embedding(7, 4), "flat": nn.Flatten(), "first": nn.Linear(12, 8),
        "norm": nn.LayerNorm(8),
        "second": nn.Linear(8, 8), "head": nn.Linear(8, 3),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def learn(module: nn.Module, optimizers: list[optim.Optimizer], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        module(torch.randint(7, (5, 3), generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def names_of(module: nn.Module, parameters: Any) -> set[str]:
    return {
        name
        for name, parameter in module.named_parameters()
        if any(parameter is one for one in parameters)
    }


def test_hidden_matrices_are_neither_embeddings_nor_the_head() -> None:
    module: Any = matrices_net()
    assert names_of(module, hidden_matrices(module)) == {"first.weight", "second.weight"}
    module.head = nn.Linear(4, 7)
    module.head.weight = module.words.weight
    assert names_of(module, hidden_matrices(module)) == {"first.weight", "second.weight"}, (
        "it is tied"
    )


@pytest.mark.parametrize("unguarded", [True, False])
def test_it_is_torchs_muon_beside_torchs_adamw(unguarded: bool) -> None:
    ours, theirs = matrices_net(), matrices_net()
    optimizer = build_optimizer(Muon(**MUON), ours, unguarded=unguarded)
    matrices = hidden_matrices(theirs)
    rest = [parameter for parameter in theirs.parameters() if parameter not in matrices]
    hidden = [parameter for parameter in theirs.parameters() if parameter in matrices]
    muon = optim.Muon(
        hidden, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = optim.AdamW(rest, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    learn(ours, [optimizer], 4)
    learn(theirs, [muon, adamw], 4)
    assert same_weights(ours, theirs)
    assert not same_weights(ours, matrices_net())


def test_it_goes_on_from_its_state_to_the_same_bits() -> None:
    whole, resumed = matrices_net(), matrices_net()
    first = build_optimizer(Muon(**MUON), whole)
    learn(whole, [first], 3)
    second = build_optimizer(Muon(**MUON), resumed)
    resumed.load_state_dict(whole.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for module, optimizer in ((whole, first), (resumed, second)):
        optimizer.param_groups[0]["lr"] = 0.5  # as a schedule sets it
        learn(module, [optimizer], 2)
    assert same_weights(whole, resumed)
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys()


def test_it_takes_groups_and_a_schedule() -> None:
    module = matrices_net()
    head = ParameterGroup(match="head|second", lr_scale=0.5, weight_decay=0.0)
    config = Muon(**MUON, groups=(head,), decay_biases_and_norms=False)
    optimizer = build_optimizer(config, module)
    found = [
        (names_of(module, group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [
        ({"first.weight"}, 0.02, 0.1),
        ({"second.weight"}, 0.01, 0.0),
        ({"words.weight"}, 0.02, 0.1),
        ({"first.bias", "norm.weight", "norm.bias"}, 0.02, 0.0),
        ({"head.weight"}, 0.01, 0.0),
        ({"second.bias", "head.bias"}, 0.01, 0.0),
    ]
    schedule = OneCycle(name="one_cycle", rise_fraction=0.3, start_factor=0.1, end_factor=0.01)
    build_scheduler(schedule, optimizer, steps_per_epoch=5, total_steps=10)
    lowered = [group["lr"] for group in optimizer.param_groups]
    assert lowered == pytest.approx([lr * 0.1 for _, lr, _ in found])


def test_a_model_without_a_hidden_matrix_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^optimizer=muon: the model has no weight matrix but for .*; use optimizer=a",
    ):
        build_optimizer(
            Muon(**MUON), nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2))
        )


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


def stepped(optimizer: optim.Optimizer, module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.randn(8, 3, generator=generator)).square().sum().backward()
        optimizer.step()
    return module


def vit() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_is_that_of_an_optimiser_written_by_hand(kind: str) -> None:
    """Combine it with groups and undecayed biases, against one torch group per parameter."""
    ours, theirs = vit(), vit()
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
    stepped(optimizer, ours)
    stepped(reference, theirs)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert not torch.equal(ours.stem.weight, vit().stem.weight)


def test_both_parts_of_muon_follow_the_layers() -> None:
    module = vit()
    optimizer = build_optimizer(Muon(**MUON, layer_decay=0.5), module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    rates = {
        names[p]: group["lr"] / MUON["lr"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert by_part(rates, DEPTHS) == pytest.approx(
        {part: 0.5**depth for part, depth in DEPTHS.items()}
    )
