"""The blocks of a model, which are compiled, checkpointed or sharded one by one."""

from __future__ import annotations

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Are never called themselves."""


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of `module` by name, in order; empty where it has none.

    They are the elements of a Sequential, ModuleList or ModuleDict, outermost first, that are all
    of one class and made of further modules: a transformer's blocks, the residual blocks of each
    stage of a ResNet.
    """
    found: dict[str, nn.Module] = {}
    _add(module, "", found)
    return found


def _add(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    children = dict(module.named_children())
    if isinstance(module, (nn.Sequential, *CONTAINERS)) and _are_blocks(list(children.values())):
        found |= {prefix + name: child for name, child in children.items()}
        return
    for name, child in children.items():
        _add(child, f"{prefix}{name}.", found)


def _are_blocks(children: list[nn.Module]) -> bool:
    classes = {type(child) for child in children}
    if len(classes) != 1 or any(not any(True for _ in child.children()) for child in children):
        return False
    (cls,) = classes
    # One alone may be a block of a class of its own, not any Sequential that has another in it.
    return not issubclass(cls, CONTAINERS) and (
        len(children) > 1 or not cls.__module__.startswith("torch.nn")
    )
