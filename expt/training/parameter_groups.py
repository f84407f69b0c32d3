"""Parameters that an optimizer treats differently: by names, by layers, by shapes."""

from __future__ import annotations

import importlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from expt.config import groups, secrets
from expt.errors import ConfigError, did_you_mean, listed
from expt.models.blocks import CONTAINERS

LR_SCALE = "lr_scale"
"""Key of a group: its share of the optimizer's learning rate; a group without it has all."""
TRAINED_EPOCHS = "trained_epochs"
"""Key of a group: the epochs after which its learning rate is 0; without it, never."""
OWN = "own"
"""Key of a group: its number in `optimizer.groups`, if it has an optimizer or schedule there."""
SHOWN_NAMES = 3
OPENED = (nn.Sequential, *CONTAINERS)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
Groups = list[dict[str, Any]]
"""An optimizer's groups of parameters, as torch takes them."""


def parameter_groups(module: nn.Module, config: groups.Optimizer) -> Groups:
    """Return a module's parameters in the groups that the settings of an optimizer ask for.

    First come those that no group matches, and of each group the parameters nearest to the head;
    empty groups are left out. Biases (by their names), norms, and all other parameters of fewer
    than two dimensions decay in no group unless `decay_biases_and_norms`. With `layer_decay` the
    rate is multiplied by it once for each layer up to the head, see `depths`. Raises ConfigError
    for a group that matches nothing.
    """
    named, every_decays = dict(module.named_parameters()), config.decay_biases_and_norms
    if every_decays and not config.groups and config.layer_decay is None:
        return [{"params": [*named.values()]}] if named else []
    chosen = {  # the number of its group; -1 for none
        name: next((n for n, group in enumerate(config.groups) if re.search(group.match, name)), -1)
        for name in named
    }
    left = [name for name, number in chosen.items() if number < 0]
    near = [*left, *(part for name in left for part in name.split("."))]
    if problems := [
        f"optimizer.groups.{number}.match={group.match}: matches no parameter of the model that no"
        f" group before it has; there are {listed(chosen, SHOWN_NAMES)}."
        f"{did_you_mean(group.match, near)}"
        for number, group in enumerate(config.groups)
        if number not in chosen.values()
    ]:
        raise ConfigError(problems)
    depth = dict.fromkeys(named, 0) if config.layer_decay is None else depths(module)
    parts = defaultdict[tuple[int, int, bool], list[nn.Parameter]](list)
    for name, one in named.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        is_of_few = one.dim() < 2 or "bias" in name or isinstance(owner, nn.LayerNorm | nn.RMSNorm)
        is_undecayed = not every_decays and is_of_few
        parts[chosen[name], depth[name], is_undecayed].append(one)
    found: Groups = []
    for (number, layer, is_undecayed), part in sorted(parts.items()):
        scale = 1.0 if config.layer_decay is None else config.layer_decay**layer
        settings: dict[str, Any] = {"params": part, LR_SCALE: scale}
        if number >= 0:
            group = config.groups[number]
            settings[LR_SCALE] *= group.lr_scale
            if group.optimizer or group.scheduler:
                settings[OWN] = number
            if group.epochs:
                settings[TRAINED_EPOCHS] = group.epochs
            if group.weight_decay is not None:
                settings["weight_decay"] = group.weight_decay
        if is_undecayed:
            settings["weight_decay"] = 0.0
        found.append(settings)
    return found


def scale_rates(optimizer: Optimizer) -> None:
    """Scale the groups' learning rates; raise ConfigError for an optimizer without such."""
    name = type(optimizer).__name__
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer: {name} has no lr, which schedules change and each step records; let its"
            " groups have one, which it may ignore"
        )
    keys = {key for group in optimizer.param_groups for key in group}
    if "weight_decay" in keys and "weight_decay" not in optimizer.defaults:
        raise ConfigError(
            f"optimizer: {name} has no weight_decay, which optimizer.groups, layer_decay or"
            " decay_biases_and_norms=false would change; leave them out, or use another optimizer"
        )
    for group in optimizer.param_groups:
        if group.get(LR_SCALE, 1.0) != 1.0:
            group["lr"] = group["lr"] * group[LR_SCALE]


def members(groups: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the parameters of an optimizer's groups, one group after another."""
    return itertools.chain.from_iterable(group["params"] for group in groups)


def rate_of(optimizer: Optimizer, own: int | None = None) -> float:
    """Return the learning rate of a group that has all of it, or all of that `own` one's."""
    mine = [group for group in optimizer.param_groups if group.get(OWN) == own]
    group = min(mine or optimizer.param_groups, key=lambda group: TRAINED_EPOCHS in group)
    lr, scale = group["lr"], group.get(LR_SCALE, 1.0)
    return float(lr if scale == 1.0 else lr / scale)


def own_numbers(optimizer: Optimizer) -> list[int]:
    """Return the numbers of the groups that have an optimizer or a schedule for themselves."""
    return sorted({group[OWN] for group in optimizer.param_groups if OWN in group})


def sparse_weights(module: nn.Module) -> frozenset[Tensor]:
    """Return the trained weights whose gradients have only the rows that a batch uses."""
    layers = (one for one in module.modules() if isinstance(one, _EMBEDDINGS) and one.sparse)
    return frozenset(layer.weight for layer in layers if layer.weight.requires_grad)


def depths(module: nn.Module) -> dict[str, int]:
    """Return each parameter's number of layers up to the head, by name: 0 in the last layer.

    timm's method `group_matcher`, if the model has it, gives the layers. Else they are the model's
    children in the order of registration; a Sequential, ModuleList or ModuleDict is opened, and so
    is the only child of its class that has one below it, such as a ViT's encoder. Norms, further
    embeddings, and an opened module's own parameters (class tokens) belong to the layer before, or
    to the first. Raises ConfigError where that is a single layer.
    """
    by = _as_the_model_says if hasattr(module, "group_matcher") else _by_registration
    layers = by(module)
    last = max(layers.values(), default=0)
    if last == 0:
        raise ConfigError(
            f"optimizer.layer_decay: {type(module).__name__} is a single layer, all of which is its"
            " head; leave it out, or give the model a method group_matcher, as those of timm have"
        )
    return {name: last - layers.get(name, last) for name, _ in module.named_parameters()}


def _as_the_model_says(module: Any) -> Mapping[str, int]:
    which = f"optimizer.layer_decay: {type(module).__name__}.group_matcher is"
    try:
        timm: Any = importlib.import_module("timm.models")
        matcher = module.group_matcher(coarse=False)
        found: Mapping[str, int] = timm.group_parameters(module, matcher, reverse=True)
    except ModuleNotFoundError:
        raise ConfigError(f"{which} read by timm; pip install 'expt[timm]'") from None
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"{which} not as timm's are ({secrets.said(error)})") from error
    return found


def _by_registration(module: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's layer, from the input on."""
    found: dict[nn.Parameter, int] = {}
    number, begun_by = -1, None
    for part, parameters in _parts(module):
        new = [one for one in parameters if one not in found]  # a weight may be used twice
        another_embedding = isinstance(part, _EMBEDDINGS) and isinstance(begun_by, _EMBEDDINGS)
        if part is not None and any(one.dim() >= 2 for one in new) and not another_embedding:
            number, begun_by = number + 1, part
        found |= dict.fromkeys(new, max(number, 0))
    return {name: found[parameter] for name, parameter in module.named_parameters()}


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module | None, list[nn.Parameter]]]:
    """Yield possible layers with their parameters; None with an opened module's own parameters."""
    yield None, list(module.parameters(recurse=False))
    of_class = Counter(map(type, module.children()))
    for child in module.children():
        is_alone = of_class[type(child)] == 1 and not isinstance(module, OPENED)
        below = child.modules() if is_alone else [child]
        # Of one module it is no series of layers, such as peft's adapters and trained copies.
        several = (x for x in below if not (isinstance(x, nn.ModuleDict) and len(x) < 2))
        if any(isinstance(part, OPENED) for part in several):
            yield from _parts(child)
        else:
            yield child, list(child.parameters())
