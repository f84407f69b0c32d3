"""Models by the name that torchvision or timm has for them.

Neither is imported where no such model is chosen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expt.config import secrets
from expt.config.groups import NamedModel
from expt.errors import ConfigError, did_you_mean
from expt.machine import impatient
from expt.models.partial_load import load_some, what_fits

_WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")  # in training they would return three outputs


class _Shape(NamedTuple):
    """The sizes of a classifier's inputs and outputs."""

    channels: int
    image_size: tuple[int, int]
    num_classes: int


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
    shape = _Shape(channels, image_size, num_classes)
    build_one = _torchvision if config.name == "torchvision" else _timm
    try:
        with _fetching_alone() if fetches else contextlib.nullcontext():
            module = build_one(config, shape, fetches)
        _see_an_image(module, shape)
    except ConfigError:
        raise
    except Exception as error:
        # OSError, ValueError, RuntimeError, AssertionError, ... of the library
        raise ConfigError(_in_words(error, config, shape)) from error
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


def _kept_in(config: NamedModel) -> str:
    """Return the folder of published weights."""
    return f"{torch.hub.get_dir()}/checkpoints" if config.name == "torchvision" else "$HF_HOME"


def _in_words(error: Exception, config: NamedModel, shape: _Shape) -> str:
    why = secrets.said(error)
    if config.pretrained and isinstance(error, OSError):
        problem = f"the weights of {config.arch} can't be fetched ({why})"
        fix = f"put them in {_kept_in(config)}, or use model.pretrained=false"
        return f"model.pretrained=true: {problem}; {fix}"
    wanted, remedy = "", "use another arch"
    if config.pretrained:
        wanted = f" with published weights, which are kept in {_kept_in(config)},"
        remedy += " or model.pretrained=false"
    images = f"{shape.channels} x {shape.image_size[0]} x {shape.image_size[1]}"
    problem = f"can't be built{wanted} for images of {images} ({why})"
    return f"model.arch={config.arch}: {problem}; {remedy}"


def _torchvision(config: NamedModel, shape: _Shape, fetches: bool) -> nn.Module:
    """Build a model of torchvision's, its first convolution adapted to the images' channels."""
    models: Any = importlib.import_module("torchvision.models")
    # The classifiers; segmentation and the like are in modules of their own
    known = models.list_models(module=models)
    if config.arch not in known:
        raise _unknown(config, known)
    kwargs = {"num_classes": shape.num_classes, **_options(config, shape)}
    module: nn.Module = models.get_model(config.arch, weights=None, **kwargs)
    if fetches:
        weights = models.get_model_weights(config.arch).DEFAULT
        state: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
        if isinstance(module, models.VisionTransformer):
            transformer: Any = importlib.import_module("torchvision.models.vision_transformer")
            sizes = module.image_size, module.patch_size
            state = transformer.interpolate_embeddings(*sizes, state)
        fit = what_fits(module, state)  # all but the classifier, where there are other classes
        load_some(module, {name: state[name] for name in fit.loaded})
    if shape.channels != 3:
        _adapt_first_convolution(module, shape.channels)
    return module


def _options(config: NamedModel, shape: _Shape) -> dict[str, Any]:
    """Return further arguments of a network of torchvision's."""
    height, width = shape.image_size
    # The published weights saw images normalised otherwise
    if config.arch in _WITH_AUXILIARY_HEADS:
        of_three = config.pretrained and shape.channels == 3
        return {"aux_logits": False, "init_weights": True, "transform_input": of_three}
    if config.arch == "maxvit_t":
        return {"input_size": shape.image_size}
    if not config.arch.startswith("vit_"):
        return {}
    if height != width:
        size = f"{height}x{width}"
        raise ConfigError(f"model.arch={config.arch}: takes square images, and these are {size}")
    return {"image_size": height}


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


def _timm(config: NamedModel, shape: _Shape, fetches: bool) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ModuleNotFoundError:
        raise ConfigError("model=timm: needs timm; pip install 'expt[timm]'") from None
    if not timm.is_model(config.arch):
        raise _unknown(config, timm.list_models())
    sizes = {"num_classes": shape.num_classes, "in_chans": shape.channels}
    create = functools.partial(timm.create_model, config.arch, pretrained=fetches, **sizes)
    try:
        module: nn.Module = create(img_size=shape.image_size)
    except TypeError as error:
        # Of a network that takes images of any size; nothing has been drawn yet
        if "img_size" not in str(error):
            raise
        module = create()
    return module


def _unknown(config: NamedModel, known: list[str]) -> ConfigError:
    some = f" It has {len(known)}, such as {', '.join(known[:: max(1, len(known) // 5)][:5])}."
    hint = did_you_mean(config.arch, known) or some
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
def _see_an_image(module: nn.Module, shape: _Shape) -> None:
    """Raise the library's error for too small images, and ValueError for other outputs."""
    # Not train: batch norms would count it
    output = module.eval()(torch.zeros(1, shape.channels, *shape.image_size))
    module.train()
    if not isinstance(output, Tensor) or output.shape != (1, shape.num_classes):
        raise ValueError(f"it gives no logits of {shape.num_classes} classes")
