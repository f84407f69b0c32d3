"""How many layers there are from each parameter to a model's head, for a learning rate that falls
with them.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from expt.config import secrets
from expt.errors import ConfigError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def depths(module: nn.Module) -> dict[str, int]:
    """Of each parameter, by name: 0 in the last layer, which is the head, 1 in the one before it,
    ...

    Where the model has timm's method `group_matcher`, its layers are what that says. Else they are
    the model's children, in the order in which they were registered; a Sequential, ModuleList or
    ModuleDict counts as its elements, and so does the only child of its class that has such below
    it, as a ViT's encoder. Whatever has no matrix of weights (norms), an embedding after another,
    and what an opened module itself holds (class tokens) belong to the layer before; before the
    first, to the first. Raises ConfigError where that is a single layer."""
    layers = (
        _as_the_model_says(module) if hasattr(module, "group_matcher") else _by_registration(module)
    )
    last = max(layers.values(), default=0)
    if last == 0:
        raise ConfigError(
            f"optimizer.layer_decay: {type(module).__name__} is a single layer, all of which is its"
            " head; leave it out, or give the model a method group_matcher, as those of timm have"
        )
    return {name: last - layers.get(name, last) for name, _ in module.named_parameters()}


def _as_the_model_says(module: Any) -> Mapping[str, int]:
    try:
        timm: Any = importlib.import_module("timm.models")
    except ModuleNotFoundError:
        raise ConfigError(
            f"optimizer.layer_decay: {type(module).__name__}.group_matcher is read by timm; pip"
            " install 'expt[timm]'"
        ) from None
    try:
        found: Mapping[str, int] = timm.group_parameters(
            module, module.group_matcher(coarse=False), reverse=True
        )
    except (TypeError, ValueError, re.error) as error:
        which, why = f"{type(module).__name__}.group_matcher", secrets.said(error)
        raise ConfigError(f"optimizer.layer_decay: {which} is not as timm's are ({why})") from error
    return found


def _by_registration(module: nn.Module) -> dict[str, int]:
    """The number of each parameter's layer, from the input on."""
    found: dict[nn.Parameter, int] = {}
    number, begun_by = -1, None
    for part, parameters in _parts(module):
        new = [
            parameter for parameter in parameters if parameter not in found
        ]  # a weight may be used twice
        another_embedding = isinstance(part, _EMBEDDINGS) and isinstance(begun_by, _EMBEDDINGS)
        if part is not None and any(one.dim() >= 2 for one in new) and not another_embedding:
            number, begun_by = number + 1, part
        found |= dict.fromkeys(new, max(number, 0))
    return {name: found[parameter] for name, parameter in module.named_parameters()}


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module | None, list[nn.Parameter]]]:
    """What may be a layer, with all its parameters; with None those that an opened module itself
    holds.
    """
    yield None, list(module.parameters(recurse=False))
    children = list(module.children())
    of_class = Counter(map(type, children))
    for child in children:
        is_trunk = (
            not isinstance(module, CONTAINERS)
            and of_class[type(child)] == 1
            and _holds_container(child)
        )
        if isinstance(child, CONTAINERS) or is_trunk:
            yield from _parts(child)
        else:
            yield child, list(child.parameters())


def _holds_container(module: nn.Module) -> bool:
    return any(isinstance(below, CONTAINERS) for below in module.modules())
