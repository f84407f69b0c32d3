"""Build a model from its configuration, initialize it and freeze what is not trained."""

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

from expt.config import constraints, groups, user_class
from expt.config.schema import RunConfig
from expt.errors import ConfigError, did_you_mean, type_name
from expt.models import named
from expt.models.transformer import Transformer
from expt.models.vision import MLP, ConvNet, ResNet18, UNet

_CLASSES: dict[type, type[nn.Module]] = {
    groups.MLP: MLP,
    groups.ConvNet: ConvNet,
    groups.ResNet18: ResNet18,
    groups.Transformer: Transformer,
    groups.UNet: UNet,
}

NAMES = ("name", "size")
"""Fields that stand for others."""


def offered(config: RunConfig, shapes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return those of the data's `shapes` that the run's model may ask for.

    Where the dataset gives no number of classes, it is how many numbers a target has; of what a
    custom task makes of these only its model knows.
    """
    dataset, model = config.dataset, config.model
    is_custom = dataset.passes_as_is and config.task.TARGETS == "any"
    if not (is_custom and isinstance(model, constraints.Target)):
        return shapes
    return {
        name: shape
        for name, shape in shapes.items()
        if name != "num_classes" or name not in model.kwargs
    }


def build(
    config: groups.Model,
    init: groups.Init,
    shapes: Mapping[str, Any],
    example: Any,
    *,
    fetch: bool = True,
) -> nn.Module:
    """Return the model for data of these `shapes`, initialized from torch's global generator.

    `example` is a blank batch of one sample, on the CPU, as the model is. Without `fetch` published
    weights are left out, for others are to be loaded. Raises ConfigError if a custom class is no
    Module or does not take the keywords.
    """
    if isinstance(config, constraints.Target):
        wanted = user_class.taken(user_class.resolve(config.target, nn.Module), shapes)
        if given := wanted.keys() & config.kwargs:
            keys = ", ".join(f"model.{key}" for key in shapes if key in given)
            raise ConfigError(
                f"{keys}: expt passes this from the dataset; leave it out of the model's YAML"
            )
        module: nn.Module = user_class.build(config.target, nn.Module, **wanted, **config.kwargs)
    elif isinstance(config, groups.NamedModel):
        wanted = _wanted(named.build, config.name, shapes, example)
        module = named.build(config, **wanted, fetch=fetch)
    else:
        kind: Any = type(config)
        names = (name for name in constraints.names_of(kind) if name not in NAMES)
        cls, own = _CLASSES[kind], {name: getattr(config, name) for name in names}
        module = cls(**_wanted(cls, config.name, shapes, example), **own)
    _refuse_sparse(module)
    _give_shapes(module, example)
    if isinstance(config, constraints.Target):
        _give_memory(module)
    initialise(module, init)
    return module


@torch.no_grad()
def _give_memory(module: nn.Module) -> None:
    """Give expanded tensors memory for each element: else they can't be broadcast, nor loaded.

    Not where another parameter or buffer shows the same memory: it is to follow that one.
    """
    tensors = (*module.parameters(), *module.buffers())
    every = [one for one in tensors if one.layout == torch.strided]
    memory = [StorageWeakRef(one.untyped_storage()) for one in every]
    shown = Counter(memory)
    for tensor, its in zip(every, memory, strict=True):
        if _is_expanded(tensor) and shown[its] == 1:
            tensor.data = tensor.data.contiguous()


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _wanted(
    builder: Callable[..., nn.Module], model: str, shapes: Mapping[str, Any], example: Any
) -> dict[str, Any]:
    """Return those of `shapes` that the builder needs.

    Raises ConfigError where it takes other inputs than the `example`.
    """
    parameters = inspect.signature(builder).parameters.values()
    needs = [
        each.name for each in parameters if each.default is each.empty and each.name != "config"
    ]
    if missing := [name for name in needs if name not in shapes]:
        if "vocab_size" in shapes:
            why = "the dataset gives it tokens; use model=transformer"
        elif missing == ["num_classes"]:
            why = "the dataset has not; give dataset.num_classes=N, or float32 for other targets"
        else:
            why = "the dataset has not; let it have them, or use another model"
        raise ConfigError(f"model={model}: needs {', '.join(missing)}, and {why}")
    if "channels" in needs:
        _refuse_other_inputs(model, example)
    return {name: shapes[name] for name in needs}


def _refuse_other_inputs(model: str, example: torch.Tensor) -> None:
    """Raise ConfigError for what is not a batch of images, or for `mlp` no batch of numbers."""
    if not example.is_floating_point():
        raise ConfigError(
            f"model={model}: takes float32, and a sample's inputs are {type_name(example)}; let the"
            " dataset convert them"
        )
    if example.dim() != 4 and model != "mlp":
        raise ConfigError(
            f"model={model}: takes images [channels, height, width], and a sample's inputs are "
            f"{list(example.shape[1:])}; use model=mlp, or a custom model"
        )


def _refuse_sparse(module: nn.Module) -> None:
    """Raise ConfigError for sparse gradients, which neither optimizers nor sharded models take."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, embeddings) and layer.sparse
    ]
    if layers:
        raise ConfigError(
            f"{type(module).__name__}: {', '.join(layers)} would have sparse gradients, which no"
            " optimiser here takes; build it with sparse=False"
        )


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


INITIALISED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def initialise(module: nn.Module, config: groups.Init) -> None:
    """Draw new weights of linear and convolution layers from torch's global generator."""
    if isinstance(config, groups.DefaultInit):
        return
    draw = _drawing(config)
    for layer in module.modules():
        if isinstance(layer, INITIALISED):
            draw(layer.weight)
            if config.zero_bias and layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _drawing(
    config: groups.NormalInit | groups.XavierInit | groups.KaimingInit | groups.OrthogonalInit,
) -> _Draw:
    if isinstance(config, groups.NormalInit):
        return functools.partial(nn.init.normal_, std=config.std)
    if isinstance(config, groups.OrthogonalInit):
        return functools.partial(nn.init.orthogonal_, gain=config.gain)
    uniform = config.distribution == "uniform"
    if isinstance(config, groups.XavierInit):
        return nn.init.xavier_uniform_ if uniform else nn.init.xavier_normal_
    kaiming = nn.init.kaiming_uniform_ if uniform else nn.init.kaiming_normal_
    return functools.partial(kaiming, mode=config.mode, nonlinearity="relu")


_Draw = Callable[[Tensor], Tensor]


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Let no gradient reach the parameters in whose name one of the regular expressions is found.

    Their batch norms follow the images all the same. Raises ConfigError for one that is found
    nowhere, and where nothing is left to train.
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
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"freeze=[{','.join(patterns)}]: leaves no parameter to train; freeze fewer"
        )
