"""Models by the name that torchvision or timm has for them."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from expt.config import groups
from expt.errors import ConfigError
from expt.models.build import build
from expt.worker import first_weights
from tests.conftest import Configured
from tests.facade import Capture, Patch
from tests.models import images

DEFAULT = groups.DefaultInit(name="default")


def named(library: Any, arch: str, *, pretrained: bool = False, **shape: Any) -> nn.Module:
    config = groups.NamedModel(name=library, arch=arch, pretrained=pretrained)
    shapes: Any = {"channels": 1, "image_size": (28, 28), "num_classes": 10, **shape}
    return build(
        config, DEFAULT, images(**shapes), torch.zeros(1, shapes["channels"], *shapes["image_size"])
    )


@pytest.mark.parametrize(
    ("arch", "channels", "side"),
    [("mobilenet_v3_small", 1, 28), ("resnet18", 4, 28), ("googlenet", 2, 32)],
)
def test_a_classifier_of_torchvisions_takes_the_datas_images(
    arch: str, channels: int, side: int
) -> None:
    model = named("torchvision", arch, channels=channels, image_size=(side, side), num_classes=7)
    assert model.training
    assert model(torch.rand(2, channels, side, side)).shape == (2, 7)


def test_a_grey_image_is_seen_as_if_it_were_repeated_three_times() -> None:
    grey, coloured = (
        (
            torch.manual_seed(0),
            named("torchvision", "mobilenet_v3_small", channels=channels).eval(),
        )[1]
        for channels in (1, 3)
    )
    image = torch.rand(2, 1, 28, 28)
    assert torch.allclose(grey(image), coloured(image.expand(-1, 3, -1, -1)), atol=1e-5)


def test_weights_of_three_channels_are_scaled_to_more() -> None:
    torch.manual_seed(0)
    coloured = next(named("torchvision", "resnet18", channels=3).parameters())
    torch.manual_seed(0)
    four = next(named("torchvision", "resnet18", channels=4).parameters())
    assert torch.equal(four, coloured[:, [0, 1, 2, 0]] * 0.75)


@pytest.mark.parametrize(
    ("arch", "side"), [("vit_tiny_patch16_224", 32), ("mobilenetv3_small_050", 28)]
)
def test_a_classifier_of_timms_takes_the_datas_images(arch: str, side: int) -> None:
    pytest.importorskip("timm")
    assert named("timm", arch, image_size=(side, side))(torch.rand(2, 1, side, side)).shape == (
        2,
        10,
    )


@pytest.mark.parametrize(
    ("library", "arch", "shape", "says"),
    [
        ("torchvision", "mobilenet_v3_smal", {},
            "mean 'mobilenet_v3_small'?"),
        ("torchvision", "deeplabv3_resnet50", {}, "torchvision has no such classifier. Did you"),
        ("torchvision", "zzz", {}, "no such classifier. It has 80, such as alexnet"),
        ("torchvision", "squeezenet1_0", {"image_size": (8, 8)},
            "can't be built for images of 1 x 8 x 8 ("),
        ("torchvision", "vit_b_16", {"image_size": (32, 16)}, "takes square images, and these"),
        ("timm", "resnet26f", {}, "timm has no such classifier. Did you mean 'resnet26'"),
    ],
)  # fmt: skip
def test_what_a_library_has_not_is_told_in_a_line(
    library: Any, arch: str, shape: Any, says: str
) -> None:
    if library == "timm":
        pytest.importorskip("timm")
    with pytest.raises(ConfigError) as refused:
        named(library, arch, **shape)
    assert str(refused.value).startswith(f"model.arch={arch}: ")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_timm_that_is_not_installed_is_told_with_the_command(
    monkeypatch: Patch,
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"^model=timm: needs timm; pip install 'expt\[timm\]'$"):
        named("timm", "resnet18")


def fetched(home: Path) -> Path:
    """Where torch keeps the published weights of a squeezenet, in a folder that is there."""
    models: Any = importlib.import_module("torchvision.models")
    (folder := home / "hub/checkpoints").mkdir(parents=True)
    return folder / Path(models.get_model_weights("squeezenet1_1").DEFAULT.url).name


def test_published_weights_are_loaded_but_for_other_classes(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    models: Any = importlib.import_module("torchvision.models")
    torch.manual_seed(5)
    published = models.get_model("squeezenet1_1").state_dict()
    torch.save(published, fetched(tmp_path))
    found = named("torchvision", "squeezenet1_1", pretrained=True).state_dict()
    differs = {name for name in published if found[name].shape != published[name].shape}
    assert differs == {"features.0.weight", "classifier.1.weight", "classifier.1.bias"}
    assert all(torch.equal(found[name], published[name]) for name in published.keys() - differs)
    assert torch.allclose(
        found["features.0.weight"], published["features.0.weight"].sum(1, keepdim=True)
    )


def test_weights_that_were_fetched_before_and_are_damaged(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = fetched(tmp_path)
    for content in (b"", b"half of a file"):
        file.write_bytes(content)
        with pytest.raises(ConfigError) as refused:
            named("torchvision", "squeezenet1_1", pretrained=True)
        assert str(refused.value).startswith(
            "model.arch=squeezenet1_1: can't be built with publish"
        )
        assert str(tmp_path / "hub") in str(refused.value)
        assert "\n" not in str(refused.value)


def test_damaged_weights_of_timm_lie_where_it_keeps_them(monkeypatch: Patch) -> None:
    timm: Any = pytest.importorskip("timm")

    def create(*_: Any, **__: Any) -> None:
        raise RuntimeError("half of a file")

    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(ConfigError, match=r"weights, which are kept in \$HF_HOME, for images"):
        named("timm", "resnet18", pretrained=True)


@pytest.mark.parametrize("channels", [1, 3])
def test_without_fetching_it_is_the_same_network(channels: int) -> None:
    """The published GoogLeNet normalises colours by itself."""
    config = groups.NamedModel(name="torchvision", arch="googlenet", pretrained=True)
    shapes = images(channels, (32, 32), 3)
    with torch.device("meta"):
        module: Any = build(config, DEFAULT, shapes, torch.zeros(1, channels, 32, 32), fetch=False)
    assert module.transform_input == (channels == 3)


@pytest.mark.parametrize(("library", "arch"), [("torchvision", "resnet18"), ("timm", "resnet18")])
def test_whose_normalisation_is_used_with_published_weights_is_told(
    library: Any, arch: str, configured: Configured, capsys: Capture
) -> None:
    if library == "timm":
        pytest.importorskip("timm")
    config = configured(f"model={library}", f"model.arch={arch}", "model.pretrained=true")
    module = named(library, arch)
    first_weights.warn_of_published(config, module)
    assert (
        capsys.readouterr().err == "warning: model.pretrained=true: the weights were trained with"
        " dataset.mean=[0.485,0.456,0.406] dataset.std=[0.229,0.224,0.225], and this run has"
        " dataset.mean=[0.3053] dataset.std=[0.376]\n"
    )
    theirs: Any = dataclasses.replace(
        config.dataset, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    first_weights.warn_of_published(dataclasses.replace(config, dataset=theirs), module)
    first_weights.warn_of_published(configured(f"model={library}", f"model.arch={arch}"), module)
    assert capsys.readouterr().err == ""
