"""Parameters that an optimizer treats differently: by names, by layers, by shapes."""

from __future__ import annotations

import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from expt.config import secrets
from expt.config.groups import ParameterGroup
from expt.errors import ConfigError, did_you_mean, listed

LR_SCALE = "lr_scale"
"""Key of a group: its share of the optimizer's learning rate; a group without it has all."""
TRAINED_EPOCHS = "trained_epochs"
"""Key of a group: the epochs after which its learning rate is 0; without it, never."""
SHOWN_NAMES = 3


def parameter_groups(
    module: nn.Module,
    groups: Sequence[ParameterGroup],
    *,
    decay_biases_and_norms: bool = True,
    layer_decay: float | None = None,
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return what an optimizer takes: the parameters, or where they differ, torch's groups of them.

    First come those that no group matches, and of each group the parameters nearest to the head;
    empty groups are left out. Biases and norms, which are all parameters of fewer than two
    dimensions, decay in no group unless `decay_biases_and_norms`. With `layer_decay` the rate is
    multiplied by it once for each layer up to the head, see `depths`. Raises ConfigError for a
    group that matches nothing.
    """
    named = dict(module.named_parameters())
    if decay_biases_and_norms and not groups and layer_decay is None:
        return list(named.values())
    chosen = {name: _first_match(name, groups) for name in named}
    _refuse_idle(named, chosen, groups)
    depth = dict.fromkeys(named, 0) if layer_decay is None else depths(module)
    found: list[dict[str, Any]] = []
    for group, layer, decays in itertools.product(
        (None, *groups), sorted({*depth.values()}), (True, False)
    ):
        members = [
            parameter
            for name, parameter in named.items()
            if chosen[name] is group and depth[name] == layer
        ]
        part = [one for one in members if (decay_biases_and_norms or one.dim() >= 2) == decays]
        if part:
            scale = 1.0 if layer_decay is None else layer_decay**layer
            found.append({"params": part, **_settings(group, scale=scale, decays=decays)})
    return found


def _first_match(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    return next((group for group in groups if re.search(group.match, name)), None)


def _settings(group: ParameterGroup | None, *, scale: float, decays: bool) -> dict[str, float]:
    weight_decay = 0.0 if not decays else group.weight_decay if group else None
    settings = {LR_SCALE: scale * (group.lr_scale if group else 1.0)}
    if group and group.epochs:
        settings[TRAINED_EPOCHS] = group.epochs
    return settings if weight_decay is None else {**settings, "weight_decay": weight_decay}


def _refuse_idle(
    names: Mapping[str, object],
    chosen: Mapping[str, ParameterGroup | None],
    groups: Sequence[ParameterGroup],
) -> None:
    problems = []
    for index, group in enumerate(groups):
        if not any(one is group for one in chosen.values()):
            hint = did_you_mean(group.match, [name for name in names if chosen[name] is None])
            problems.append(
                f"optimizer.groups.{index}.match={group.match}: matches no parameter of the model"
                f" that no group before it has; there are {listed(names, SHOWN_NAMES)}.{hint}"
            )
    if problems:
        raise ConfigError(problems)


def scale_rates(optimizer: Optimizer) -> None:
    """Give each group its share of the optimizer's learning rate.

    Raises ConfigError where the optimizer has no such setting, and would pass over a group's.
    """
    keys = {key for group in optimizer.param_groups for key in group}
    for key, wanted in (("lr", LR_SCALE), ("weight_decay", "weight_decay")):
        if wanted in keys and key not in optimizer.defaults:
            name = type(optimizer).__name__
            raise ConfigError(
                f"optimizer: {name} has no {key}, which optimizer.groups, layer_decay or"
                " decay_biases_and_norms=false would change; leave them out, or use another"
                " optimizer"
            )
    for group in optimizer.param_groups:
        if group.get(LR_SCALE, 1.0) != 1.0:
            group["lr"] = group["lr"] * group[LR_SCALE]


def members(groups: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the parameters of an optimizer's groups, one group after another."""
    return itertools.chain.from_iterable(group["params"] for group in groups)


def rate_of(optimizer: Optimizer) -> float:
    """Return the learning rate of a group that has all of it."""
    group, *others = optimizer.param_groups
    if others:
        group = min(optimizer.param_groups, key=lambda group: TRAINED_EPOCHS in group)
    lr, scale = group["lr"], group.get(LR_SCALE, 1.0)
    rate = lr if scale == 1.0 else lr / scale
    return rate if type(rate) is float else float(rate)


CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def depths(module: nn.Module) -> dict[str, int]:
    """Return each parameter's number of layers up to the head, by name: 0 in the last layer.

    Where the model has timm's method `group_matcher`, it says what the layers are. Else they are
    the model's children in the order of registration; a Sequential, ModuleList or ModuleDict counts
    as its elements, and so does the only child of its class that has such below it, such as a ViT's
    encoder. Whatever has no matrix of weights (norms), an embedding after another, and what an
    opened module itself holds (class tokens) belong to the layer before; before the first, to the
    first. Raises ConfigError where that is a single layer.
    """
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
    """Return the number of each parameter's layer, from the input on."""
    found: dict[nn.Parameter, int] = {}
    number, begun_by = -1, None
    for part, parameters in _parts(module):
        # a weight may be used twice
        new = [parameter for parameter in parameters if parameter not in found]
        another_embedding = isinstance(part, _EMBEDDINGS) and isinstance(begun_by, _EMBEDDINGS)
        if part is not None and any(one.dim() >= 2 for one in new) and not another_embedding:
            number, begun_by = number + 1, part
        found |= dict.fromkeys(new, max(number, 0))
    return {name: found[parameter] for name, parameter in module.named_parameters()}


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module | None, list[nn.Parameter]]]:
    """Yield what may be a layer with its parameters; None with those of an opened module itself."""
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
