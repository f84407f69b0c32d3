"""From a model's configuration to the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from expt.config import groups, user_class
from expt.errors import ConfigError
from expt.models.convnet import ConvNet
from expt.models.init import initialise
from expt.models.mlp import MLP
from expt.models.resnet import ResNet18

_CLASSES: dict[type, type[nn.Module]] = {groups.MLP: MLP, groups.ConvNet: ConvNet, groups.ResNet18: ResNet18}


def build(
    config: groups.MLP | groups.ConvNet | groups.ResNet18 | groups.Target,
    init: groups.Init,
    *,
    channels: int,
    image_size: tuple[int, int],
    num_classes: int,
) -> nn.Module:
    """The model for images of `channels` x `image_size`, on the CPU, initialised from torch's global generator.

    Raises ConfigError if a person's own class is no Module or does not take the keywords.
    """
    shape: dict[str, Any] = {"channels": channels, "image_size": image_size, "num_classes": num_classes}
    if isinstance(config, groups.Target):
        if given := shape.keys() & config.kwargs:
            keys = ", ".join(f"model.{key}" for key in shape if key in given)
            raise ConfigError(f"{keys}: the dataset says what it is; leave it out of the model's YAML")
        module: nn.Module = user_class.build(config.target, nn.Module, **shape, **config.kwargs)
    else:
        names = (field.name for field in dataclasses.fields(config) if field.name != "name")
        module = _CLASSES[type(config)](**shape, **{name: getattr(config, name) for name in names})
    _give_shapes(module, channels, image_size)
    initialise(module, init)
    return module


def _give_shapes(module: nn.Module, channels: int, image_size: tuple[int, int]) -> None:
    """Let torch's lazy layers see an image, without which their parameters have no shape."""
    if not _without_shape(module):
        return
    with torch.no_grad():
        module.eval()(torch.zeros(1, channels, *image_size))  # not train: batch norms would count it
    module.train()
    if left := _without_shape(module):
        raise ConfigError(
            f"{type(module).__name__}: {', '.join(left)} of its lazy layers saw nothing when an image went through it "
            "in evaluation; give such a layer its sizes"
        )


def _without_shape(module: nn.Module) -> list[str]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if isinstance(tensor, UninitializedParameter | UninitializedBuffer)]
