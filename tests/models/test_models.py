"""Shapes, sizes, blocks and first weights of models, and a person's own class in their place."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from expt.config import constraints, groups
from expt.errors import ConfigError
from expt.models import build as model_build
from expt.models.blocks import blocks
from expt.models.build import freeze, initialise
from expt.models.transformer import Transformer
from expt.models.vision import MLP, ConvNet, ResNet18
from tests.facade import Patch, part
from tests.models import images

SIZES = [(8, 8), (28, 28), (32, 32), (28, 20)]
CONFIGS = {
    "mlp": "model=mlp model.hidden=[32,16] model.dropout=0.1",
    "convnet": "model=convnet model.widths=[4,6,8] model.kernels=[3,6,6] model.strides=[1,2,2]"
    " model.paddings=[same,valid,same] model.batch_norm=true model.pool=1 model.hidden=16"
    " model.global_average=true model.dropout=0.5",
    "convnet of one kind of layer": "model=convnet model.widths=[5] model.kernels=[4]"
    " model.strides=[3] model.paddings=[same] model.batch_norm=false model.pool=2"
    " model.global_average=false model.hidden=null model.dropout=0.0",
    "small": "model=resnet18 model.stem=small",
    "imagenet": "model=resnet18 model.stem=imagenet",
}
DEFAULT = groups.DefaultInit(name="default")
PADDLE: dict[str, Any] = {
    "widths": (20, 20), "kernels": (5, 5), "strides": (1, 1), "paddings": ("same", "same"),
    "batch_norm": False, "pool": 2, "global_average": False, "hidden": None, "dropout": 0.0,
}  # fmt: skip
GREY_28: dict[str, Any] = {"channels": 1, "image_size": (28, 28), "num_classes": 10}


def build(config: Any, init: Any, **shapes: Any) -> nn.Module:
    config = part("model", config) if isinstance(config, str) else config
    return model_build.build(
        config, init, images(**shapes), torch.zeros(1, shapes["channels"], *shapes["image_size"])
    )


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("image_size", SIZES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_images_to_logits(name: str, image_size: tuple[int, int]) -> None:
    with torch.device("meta"):  # shapes without the arithmetic
        model = build(
            part("model", CONFIGS[name]), DEFAULT, channels=3, image_size=image_size, num_classes=7
        )
        assert model(torch.zeros(2, 3, *image_size)).shape == (2, 7)


@pytest.mark.parametrize(
    ("cls", "options", "count"),
    [
        # 784 * 256 + 256, 256 * 10 + 10
        (MLP, {}, 203_530),
        # The layers of the Keras guide: convolutions 1 * 12 * 9, 12 * 24 * 36 and 24 * 32 * 36 + 32
        # (the last alone has a bias), batch norms 2 * (12 + 24 + 32), linear 32 * 256 + 256 and 256
        # * 10 + 10: 108 + 10,368 + 27,680 + 136 + 8,448 + 2,570.
        (ConvNet, {}, 49_310),
        # The layers of Paddle's tutorial: 20 * 25 + 20, 20 * 20 * 25 + 20, and 20 * 7 * 7 * 10 +
        # 10.
        (ConvNet, PADDLE, 20_350),
    ],
    ids=["mlp", "convnet", "paddle"],
)
def test_number_of_parameters(cls: type[nn.Module], options: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        assert size(cls(**GREY_28 | options)) == count


def test_each_setting_reaches_the_model() -> None:
    layers = list(build(CONFIGS["mlp"], DEFAULT, **GREY_28).modules())
    assert [layer.out_features for layer in layers if isinstance(layer, nn.Linear)] == [32, 16, 10]
    assert [layer.p for layer in layers if isinstance(layer, nn.Dropout)] == [0.1, 0.1]
    layers = list(build(CONFIGS["convnet"], DEFAULT, **GREY_28).children())
    assert [(c.out_channels, c.kernel_size[0]) for c in layers if isinstance(c, nn.Conv2d)] == [
        (4, 3),
        (6, 6),
        (8, 6),
    ]


def test_the_geometry_of_the_published_networks() -> None:
    layers = [layer for layer in ConvNet(**GREY_28) if isinstance(layer, nn.Conv2d)]
    expected = [(1, "same"), (2, (0, 0)), (2, (2, 2))]
    assert [(layer.stride[0], layer.padding) for layer in layers] == expected
    for stem, side in (("small", 32), ("imagenet", 8)):
        model = build(
            part("model", CONFIGS[stem]), DEFAULT, channels=1, image_size=(32, 32), num_classes=10
        )
        assert isinstance(model, ResNet18)
        assert model.maxpool(model.conv1(torch.zeros(1, 1, 32, 32))).shape == (1, 64, side, side)


@pytest.mark.parametrize("side", [*range(1, 12), 28])
@pytest.mark.parametrize("kernels", [(3, 6, 6), (3, 3, 3), (1, 9, 2), (5, 1, 11)], ids=str)
def test_a_convnet_that_is_built_takes_its_images(side: int, kernels: tuple[int, int, int]) -> None:
    try:
        model = ConvNet(channels=1, image_size=(28, side), num_classes=2, kernels=kernels).eval()
    except ConfigError as error:
        assert f"model.kernels={list(kernels)}, " in str(error)  # noqa: PT017
        assert side < sum(kernels)
    else:
        assert model(torch.zeros(1, 1, 28, side)).shape == (1, 2)


def test_a_pooling_that_is_too_large_is_refused() -> None:
    options: dict[str, Any] = {"strides": (1, 1, 1), "paddings": ("same",) * 3, "pool": 8}
    with pytest.raises(ConfigError, match=r"model\.pool=8: "):
        ConvNet(channels=1, image_size=(8, 8), num_classes=2, kernels=(3, 3, 3), **options)


OWN = """
from torch import nn
class Lazy(nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        last = nn.LazyLinear(num_classes)
        super().__init__(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), last)
class Unreached(nn.Module):
    def __init__(self, *, channels, image_size, num_classes):
        super().__init__()
        self.head, self.aside = nn.LazyLinear(num_classes), nn.LazyLinear(3)
    def forward(self, images):
        return self.head(images.flatten(1))
class Less(nn.Sequential):
    def __init__(self, num_classes, body=None):
        super().__init__(nn.Flatten(), body or nn.Identity(), nn.LazyLinear(num_classes))
class Any(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.given = given
"""


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: Patch) -> None:
    """A module `own_model` with a person's own classes, in a folder on the path."""
    (tmp_path / "own_model.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def build_own(name: str, init: Any = DEFAULT, **kwargs: Any) -> Any:
    target = constraints.Target(target=f"own_model.{name}", kwargs=kwargs)
    return build(target, init, **GREY_28)


def test_a_layer_that_cannot_be_trained_is_named() -> None:
    problem = r"aside\.weight, aside\.bias of its lazy layers"
    with pytest.raises(ConfigError, match=f"^Unreached: {problem}"):
        build_own("Unreached")


def test_lazy_layers_have_seen_an_image() -> None:
    zeros = groups.XavierInit(name="xavier", distribution="uniform", zero_bias=True)
    model = build_own("Lazy", zeros)
    expected = [(4, 1, 3, 3), (4,), (4,), (4,), (10, 2704), (10,)]
    assert [tuple(parameter.shape) for parameter in model.parameters()] == expected
    assert model.training
    named = dict(model.named_buffers())
    assert named["1.num_batches_tracked"] == 0, "a batch norm does not count it"
    assert not model[3].bias.any(), "what init asks for comes after"


@pytest.mark.parametrize(("side", "stride"), [(64, 1), (96, 2)])
def test_resnet18s_stem_fits_the_images(side: int, stride: int) -> None:
    auto = groups.ResNet18(name="resnet18", stem="auto")
    model: Any = build(auto, DEFAULT, channels=3, image_size=(side, 24), num_classes=2)
    assert model.conv1.stride == (stride, stride)


@pytest.mark.parametrize(("stem", "channels"), [("small", 1), ("imagenet", 3)])
def test_resnet18_is_torchvisions_to_the_bit(stem: Any, channels: int) -> None:
    """Its names, its first weights, what it computes and what it leaves of the random numbers."""
    found = []
    for cls in (_torchvisions, ResNet18):
        torch.manual_seed(0)
        model = cls(channels=channels, image_size=(9, 9), num_classes=5, stem=stem)
        logits = model(torch.randn(2, channels, 9, 9))
        logits.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append(
            [
                *model.state_dict().items(),
                *gradients.items(),
                ("logits", logits),
                ("rng", torch.get_rng_state()),
            ]
        )
    assert [name for name, _ in found[0]] == [name for name, _ in found[1]]
    assert [name for (name, a), (_, b) in zip(*found, strict=True) if not torch.equal(a, b)] == []


def _torchvisions(*, channels: int, image_size: object, num_classes: int, stem: str) -> nn.Module:
    resnet: Any = importlib.import_module("torchvision.models.resnet")
    model: Any = resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], num_classes=num_classes)
    if stem == "small":
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model  # type: ignore[no-any-return]


def test_an_own_model_gets_what_it_names() -> None:
    net = build_own("Less", body={"_target_": "torch.nn.Dropout", "p": 0.25})
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert (type(net[1]), net[1].p) == (nn.Dropout, 0.25)
    assert build_own("Any", width=3).given == {**GREY_28, "width": 3}


class Aliased(nn.Module):
    """Buffers that show a parameter's memory, one that is expanded of its own, and one that is
    sparse.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("twin", self.scale.data.expand(3))
        self.register_buffer("wide", torch.arange(4)[None].expand(3, -1))
        self.register_buffer("edges", torch.eye(3).to_sparse())
        self.register_buffer("rows", torch.eye(3).to_sparse_csr())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_expanded_gets_memory_unless_it_follows_another() -> None:
    module = Aliased()
    model_build._give_memory(module)
    buffers = dict(module.named_buffers())
    assert buffers["wide"].stride() == (4, 1)
    with torch.no_grad():
        module.scale.fill_(2.0)
    assert buffers["twin"].tolist() == [2.0, 2.0, 2.0]
    assert (buffers["edges"].layout, buffers["rows"].layout) == (torch.sparse_coo, torch.sparse_csr)


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
    (MLP(hidden=(4, 4), dropout=0.5, **IMAGES), ""),
])  # fmt: skip
def test_the_blocks_of(module: nn.Module, names: str) -> None:
    found = blocks(module)
    assert list(found) == names.split()
    assert all(module.get_submodule(name) is block for name, block in found.items())


def test_weights_have_the_same_names_whatever_the_dropout() -> None:
    """So that a fork, and `weights`, may have another."""
    for cls in (MLP, ConvNet):
        plain, dropping = (cls(dropout=each, **IMAGES).state_dict() for each in (0.0, 0.5))
        assert plain.keys() == dropping.keys()


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2)
    )


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ([], "0.weight 0.bias 1.0.weight 1.0.bias 1.1.weight 1.1.bias 2.weight 2.bias"),
        (["^0", r"1\.1"], "1.0.weight 1.0.bias 2.weight 2.bias"),
        (["bias$"], "0.weight 1.0.weight 1.1.weight 2.weight"),
    ],
)
def test_what_matches_is_not_trained(patterns: list[str], left: str) -> None:
    module = deep()
    freeze(module, patterns)
    assert [
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    ] == left.split()


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["1.0.wight"], "freeze=1.0.wight: is in no parameter's name. Did you mean '1.0.weight'?"),
        (["^0", "xyz"], "freeze=xyz: is in no parameter's name. There are 8, such as 0.weight, "),
        (["weight", "bias"], "freeze=[weight,bias]: leaves no parameter to train; freeze fewer"),
    ],
)  # fmt: skip
def test_what_matches_nothing_or_all_is_refused(patterns: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        freeze(deep(), patterns)
    assert str(refused.value).startswith(says)


FAN_IN, FAN_OUT = 400, 900


def layers(init: Any) -> tuple[nn.Linear, nn.Conv2d, nn.BatchNorm2d]:
    """A linear layer, a convolution of the same two fans, and a batch norm, initialised."""
    torch.manual_seed(0)
    made = (
        nn.Linear(FAN_IN, FAN_OUT),
        nn.Conv2d(FAN_IN // 100, FAN_OUT // 100, 10),
        nn.BatchNorm2d(3),
    )
    initialise(nn.ModuleList([*made]), init)
    return made


@pytest.mark.parametrize(
    ("words", "std"),
    [
        ("init=normal init.std=0.01", 0.01),
        ("init=xavier init.distribution=uniform", (2 / (FAN_IN + FAN_OUT)) ** 0.5),
        ("init=xavier init.distribution=normal", (2 / (FAN_IN + FAN_OUT)) ** 0.5),
        ("init=kaiming init.distribution=normal init.mode=fan_in", (2 / FAN_IN) ** 0.5),
        ("init=kaiming init.distribution=uniform init.mode=fan_out", (2 / FAN_OUT) ** 0.5),
    ],
)
def test_the_spread_of_the_weights(words: str, std: float) -> None:
    init = part("init", words, zero_bias=True)
    linear, convolution, norm = layers(init)
    for layer in (linear, convolution):
        weight = layer.weight.detach()
        assert float(weight.std()) == pytest.approx(std, rel=0.03)
        assert float(weight.mean()) == pytest.approx(0, abs=std / 20)
        assert layer.bias is not None
        assert not layer.bias.any()
        # A uniform distribution ends at the square root of 3 times its deviation.
        uniform = getattr(init, "distribution", "normal") == "uniform"
        assert (float(weight.abs().max()) <= std * 3**0.5 + 1e-6) == uniform
    assert (norm.weight == 1).all()


def test_orthogonal_rows_have_the_length_of_the_gain() -> None:
    linear, _, _ = layers(groups.OrthogonalInit(name="orthogonal", gain=3.0, zero_bias=False))
    assert torch.allclose(linear.weight.T @ linear.weight, 9 * torch.eye(FAN_IN), atol=1e-3)
    assert linear.bias.any()


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_weights_that_are_computed_are_drawn_too(name: str) -> None:
    layer = getattr(nn.utils.parametrizations, name)(nn.Linear(6, 6))
    before = layer.weight.detach().clone()
    initialise(layer, groups.NormalInit(name="normal", std=1.0, zero_bias=False))
    assert not torch.allclose(layer.weight, before)
    if name == "weight_norm":
        assert layer.weight.std() > 0.6


def test_default_draws_nothing() -> None:
    plain = nn.Linear(3, 3)
    before, state = plain.weight.clone(), torch.get_rng_state()
    initialise(plain, groups.DefaultInit(name="default"))
    assert torch.equal(plain.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
