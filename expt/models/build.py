"""Build a model from its configuration, initialize it and freeze parameters."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from expt.config import constraints, groups, user_class
from expt.errors import ConfigError, did_you_mean, listed
from expt.features import Features
from expt.models import hugging_face, named
from expt.models.transformer import Transformer
from expt.models.vision import MLP, ConvNet, ResNet18, UNet

_CLASSES: dict[type, type[nn.Module]] = {
    groups.MLP: MLP,
    groups.ConvNet: ConvNet,
    groups.ResNet18: ResNet18,
    groups.Transformer: Transformer,
    groups.UNet: UNet,
}

_CHOOSERS = ("name", "size")
"""Fields that stand for others."""
INITIALISED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def build(
    config: groups.Model,
    init: groups.Init,
    features: Features,
    example: Any,
    *,
    fetch: bool = True,
    base: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the model for data of these `features`, drawn from torch's global generator.

    `example` is the inputs of a blank sample, on the CPU, as the model is. Without `fetch`
    published weights are left out: others will be loaded. `base` is the published model in the
    record of a run, if there is one. Raises ConfigError if a custom class is
    no Module or does not take the keywords.
    """
    module: nn.Module
    if isinstance(config, constraints.Target):
        module = _custom(config, features)
    elif isinstance(config, groups.NamedModel):
        wanted = _wanted(named.build, config.name, features.shapes)
        module = named.build(config, **wanted, fetch=fetch)
    elif isinstance(config, groups.HuggingFaceModel):
        module = hugging_face.build(config, features, example, fetch=fetch, base=base)
    else:
        kind: Any = type(config)
        names = (name for name in constraints.names_of(kind) if name not in _CHOOSERS)
        cls, own = _CLASSES[kind], {name: getattr(config, name) for name in names}
        module = cls(**_wanted(cls, config.name, features.shapes), **own)
    _give_shapes(module, example)
    if isinstance(config, constraints.Target):
        _give_memory(module)
    initialise(module, init)
    return module


def _custom(config: constraints.Target, features: Features) -> nn.Module:
    """Return a model of a custom class, with the sizes of the data that it takes."""
    shapes = features.shapes
    if not features.targets.each and "num_classes" in config.kwargs:  # the task's own outputs
        shapes.pop("num_classes", None)
    cls = user_class.resolve(config.target, nn.Module)
    wanted = user_class.taken(cls, shapes)
    if given := wanted.keys() & config.kwargs:
        keys = ", ".join(f"model.{key}" for key in shapes if key in given)
        raise ConfigError(
            f"{keys}: expt passes this from the dataset; leave it out of the model's YAML"
        )
    if missing := sorted(user_class.required(cls) - wanted.keys() - config.kwargs.keys()):
        passed = ", ".join(f"{key}={size}" for key, size in shapes.items())
        raise ConfigError(
            f"model._target_={config.target}: needs {listed(map(repr, missing))}; type"
            f" {' '.join(f'model.{key}=...' for key in missing)}, or let it take what"
            f" expt passes from this dataset: {passed or 'nothing'}"
        )
    arguments = {**wanted, **config.kwargs}
    return user_class.construct(f"model._target_={config.target}", cls, (), arguments)


@torch.no_grad()
def _give_memory(module: nn.Module) -> None:
    """Give expanded tensors memory for each element: else they can't be broadcast, nor loaded.

    One that shares its memory with another parameter or buffer stays as it is.
    """
    tensors = (*module.parameters(), *module.buffers())
    every = [one for one in tensors if one.layout == torch.strided]
    memory = [StorageWeakRef(one.untyped_storage()) for one in every]
    uses = Counter(memory)
    for tensor, storage in zip(every, memory, strict=True):
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        if uses[storage] == 1 and any(size > 1 and not stride for size, stride in sizes):
            tensor.data = tensor.data.contiguous()


def _wanted(
    builder: Callable[..., nn.Module], model: str, shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return those of `shapes` that the builder needs; raise ConfigError if some are missing."""
    parameters = inspect.signature(builder).parameters.values()
    needs = [one.name for one in parameters if one.default is one.empty and one.name != "config"]
    if missing := [name for name in needs if name not in shapes]:
        if "vocab_size" in shapes:
            why = "the dataset gives it tokens; use model=transformer or transformers"
        elif missing == ["num_classes"]:
            why = "the dataset has not; give dataset.num_classes=N, or float32 for other targets"
        else:
            why = "the dataset has not; let it have them, or use another model"
        raise ConfigError(f"model={model}: needs {', '.join(missing)}, and {why}")
    return {name: shapes[name] for name in needs}


def _give_shapes(module: nn.Module, example: Any) -> None:
    """Let torch's lazy layers see a sample, without which their parameters have no shape."""
    if not _without_shape(module):
        return
    with torch.no_grad():
        module.eval()(example)  # not train: batch norms would count it
    module.train()
    if left := _without_shape(module):
        raise ConfigError(
            f"{type(module).__name__}: {', '.join(left)} of its lazy layers saw nothing when a"
            " sample went through it in evaluation; give such a layer its sizes"
        )


def _without_shape(module: nn.Module) -> list[str]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [
        name
        for name, tensor in tensors
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    ]


def initialise(module: nn.Module, config: groups.Init) -> None:
    """Draw new weights of linear and convolution layers from torch's global generator."""
    draw: Callable[[Tensor], Tensor]
    if isinstance(config, groups.DefaultInit):
        return
    if isinstance(config, groups.NormalInit):
        draw = functools.partial(nn.init.normal_, std=config.std)
    elif isinstance(config, groups.OrthogonalInit):
        draw = functools.partial(nn.init.orthogonal_, gain=config.gain)
    elif isinstance(config, groups.XavierInit):
        draw = getattr(nn.init, f"xavier_{config.distribution}_")
    else:
        kaiming = getattr(nn.init, f"kaiming_{config.distribution}_")
        draw = functools.partial(kaiming, mode=config.mode, nonlinearity="relu")
    for layer in module.modules():
        if isinstance(layer, INITIALISED):
            if parametrize.is_parametrized(layer, "weight"):  # as by weight_norm
                with torch.no_grad():
                    layer.weight = draw(layer.weight.clone())
            else:
                draw(layer.weight)
            if config.zero_bias and layer.bias is not None:
                nn.init.zeros_(layer.bias)


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters in whose names one of the regular expressions is found.

    Their batch norms still follow the images. Raises ConfigError for an expression that is in no
    name, and where nothing is left to train.
    """
    parameters = dict(module.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if re.search(pattern, name)]
        if not found:
            hint = did_you_mean(pattern.strip("^$.*"), parameters)
            raise ConfigError(
                f"freeze={pattern}: is in no parameter's name.{hint} There are"
                f" {len(parameters)}, such as {', '.join([*parameters][:3])}"
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if patterns and not any(one.requires_grad for one in parameters.values()):
        wanted = ",".join(patterns)
        raise ConfigError(f"freeze=[{wanted}]: leaves no parameter to train; freeze fewer")
