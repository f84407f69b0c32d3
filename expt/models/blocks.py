"""The blocks of a model, which are compiled, checkpointed or sharded one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from expt.errors import ConfigError, did_you_mean

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Are never called themselves."""


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of `module` by name, in order; empty where it has none.

    They are the elements of a Sequential, ModuleList or ModuleDict, outermost first, that are all
    of one class and made of further modules: a transformer's blocks, the residual blocks of each
    stage of a ResNet.
    """
    children = dict(module.named_children())
    if isinstance(module, (nn.Sequential, *CONTAINERS)) and _are_blocks([*children.values()]):
        return children
    below = ((name, blocks(child)) for name, child in children.items())
    return {f"{name}.{at}": one for name, found in below for at, one in found.items()}


def matching(module: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """Return the modules whose names match, without CONTAINERS; raise ConfigError for no match."""
    every = module.named_modules()
    named = {name: one for name, one in every if name and not isinstance(one, CONTAINERS)}
    chosen = set[str]()
    for pattern in patterns:
        found = [name for name in named if re.fullmatch(pattern, name)]
        if not found:
            some = f" There are {len(named)}, such as {', '.join([*named][:4])}."
            hint = did_you_mean(pattern.strip("^$.*"), [*named]) or some
            raise ConfigError(
                f"{key}=[{pattern}]: matches the whole name of no module (containers don't"
                f" count).{hint}"
            )
        chosen.update(found)
    return {name: part for name, part in named.items() if name in chosen}


def _are_blocks(children: list[nn.Module]) -> bool:
    classes = {type(child) for child in children}
    if len(classes) != 1 or any(not any(True for _ in child.children()) for child in children):
        return False
    (cls,) = classes
    # One alone may be a block of a class of its own, not any Sequential that has another in it.
    return not issubclass(cls, CONTAINERS) and (
        len(children) > 1 or not cls.__module__.startswith("torch.nn")
    )
