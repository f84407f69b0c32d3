"""Models by the name that torchvision or timm has for them.

Neither is imported where no such model is chosen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expt.config import secrets
from expt.config.groups import NamedModel
from expt.errors import ConfigError, did_you_mean
from expt.machine import impatient
from expt.models.partial_load import load_some, what_fits

_WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")  # in training they would return three outputs
_NEAREST = 3  # names that a wrong one is answered with


def build(
    config: NamedModel,
    *,
    channels: int,
    image_size: tuple[int, int],
    num_classes: int,
    fetch: bool = True,
) -> nn.Module:
    """Return the classifier `config.arch` for images of `channels` x `image_size`.

    It is drawn from torch's global generator; without `fetch` it has no published weights. Raises
    ConfigError for an unknown name, images that the network can't take, and published weights that
    can't be fetched.
    """
    fetches = config.pretrained and fetch
    build_one = _torchvision if config.name == "torchvision" else _timm
    try:
        with _fetching_alone() if fetches else contextlib.nullcontext():
            module = build_one(config, channels, image_size, num_classes, fetches)
        _see_an_image(module, channels, image_size, num_classes)
    except ConfigError:
        raise
    except Exception as error:
        # OSError, ValueError, RuntimeError, AssertionError, ... of the library
        images = f"{channels} x {image_size[0]} x {image_size[1]}"
        raise ConfigError(_in_words(error, config, images)) from error
    return module


def normalisation(config: NamedModel, module: nn.Module) -> tuple[list[float], list[float]] | None:
    """Return the channels' mean and deviation that the published weights of `module` expect."""
    if config.name == "torchvision":
        models: Any = importlib.import_module("torchvision.models")
        if config.arch not in models.list_models(module=models):
            return None
        transforms = models.get_model_weights(config.arch).DEFAULT.transforms()
        return list(transforms.mean), list(transforms.std)
    published: Any = getattr(module, "pretrained_cfg", None) or {}
    if not {"mean", "std"} <= published.keys():
        return None
    return list(published["mean"]), list(published["std"])


def _in_words(error: Exception, config: NamedModel, images: str) -> str:
    why = secrets.said(error)
    if config.pretrained and isinstance(error, OSError):
        problem = f"the weights of {config.arch} can't be fetched ({why})"
        return f"model.pretrained=true: {problem}; use model.pretrained=false"
    wanted = f" with published weights, which are kept in {torch.hub.get_dir()},"
    wanted *= config.pretrained
    remedy = "use another arch" + " or model.pretrained=false" * config.pretrained
    problem = f"can't be built{wanted} for images of {images} ({why})"
    return f"model.arch={config.arch}: {problem}; {remedy}"


def _torchvision(
    config: NamedModel, channels: int, image_size: tuple[int, int], num_classes: int, fetches: bool
) -> nn.Module:
    """Adapt the first convolution, made for 3 channels, to those of the images."""
    models: Any = importlib.import_module("torchvision.models")
    # The classifiers; segmentation and the like are in modules of their own
    known = models.list_models(module=models)
    if config.arch not in known:
        raise _unknown(config, known)
    kwargs = _options(config, channels, image_size)
    module: nn.Module = models.get_model(
        config.arch, weights=None, num_classes=num_classes, **kwargs
    )
    if fetches:
        weights = models.get_model_weights(config.arch).DEFAULT
        state: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
        if isinstance(module, models.VisionTransformer):
            transformer: Any = importlib.import_module("torchvision.models.vision_transformer")
            sizes = module.image_size, module.patch_size
            state = transformer.interpolate_embeddings(*sizes, state)
        fit = what_fits(module, state)  # all but the classifier, where there are other classes
        load_some(module, {name: state[name] for name in fit.loaded})
    if channels != 3:
        _adapt_first_convolution(module, channels)
    return module


def _options(config: NamedModel, channels: int, image_size: tuple[int, int]) -> dict[str, Any]:
    # The published weights saw images normalised otherwise
    if config.arch in _WITH_AUXILIARY_HEADS:
        of_three = config.pretrained and channels == 3
        return {"aux_logits": False, "init_weights": True, "transform_input": of_three}
    if config.arch == "maxvit_t":
        return {"input_size": image_size}
    if not config.arch.startswith("vit_"):
        return {}
    if image_size[0] != image_size[1]:
        size = f"{image_size[0]}x{image_size[1]}"
        raise ConfigError(f"model.arch={config.arch}: takes square images, and these are {size}")
    return {"image_size": image_size[0]}


def _adapt_first_convolution(module: nn.Module, channels: int) -> None:
    """Change the first convolution from three input channels to `channels`.

    Its weights for red, green and blue are added up for one channel, as if a grey image were
    repeated three times; for others they are repeated and scaled, as timm does. So published
    weights keep their meaning, and new ones their distribution.
    """
    layer = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    weight = layer.weight.detach()  # [out, 3, height, width]
    if channels == 1:
        weight = weight.sum(1, keepdim=True)
    else:
        weight = weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)
    layer.in_channels, layer.weight = channels, nn.Parameter(weight)


def _timm(
    config: NamedModel, channels: int, image_size: tuple[int, int], num_classes: int, fetches: bool
) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ModuleNotFoundError:
        raise ConfigError("model=timm: needs timm; pip install 'expt[timm]'") from None
    if not timm.is_model(config.arch):
        raise _unknown(config, timm.list_models())
    sizes = {"num_classes": num_classes, "in_chans": channels}
    create = functools.partial(timm.create_model, config.arch, pretrained=fetches, **sizes)
    try:
        module: nn.Module = create(img_size=image_size)
    except TypeError as error:
        # Of a network that takes images of any size; nothing has been drawn yet
        if "img_size" not in str(error):
            raise
        module = create()
    return module


def _unknown(config: NamedModel, known: list[str]) -> ConfigError:
    some = f" It has {len(known)}, such as {', '.join(known[:: max(1, len(known) // 5)][:5])}."
    hint = did_you_mean(config.arch, known, most=_NEAREST) or some
    return ConfigError(f"model.arch={config.arch}: {config.name} has no such classifier.{hint}")


@contextlib.contextmanager
def _fetching_alone() -> Iterator[None]:
    """Let one worker of this machine fetch weights, which the others then find, with a timeout."""
    folder = Path(torch.hub.get_dir())
    folder.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock  # late: for published weights

    with FileLock(folder / ".expt.lock"), impatient():
        yield


@torch.no_grad()
def _see_an_image(
    module: nn.Module, channels: int, image_size: tuple[int, int], num_classes: int
) -> None:
    """Raise the library's error for too small images, and ValueError for other outputs."""
    # Not train: batch norms would count it
    output = module.eval()(torch.zeros(1, channels, *image_size))
    module.train()
    if not isinstance(output, Tensor) or output.shape != (1, num_classes):
        raise ValueError(f"it gives no logits of {num_classes} classes")
