"""Tensors in nested tuples, lists and dicts, as samples and batches may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same containers with `function` of each tensor; all else stays as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(function, below) for key, below in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(function, below) for below in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(function, below) for below in tree)
    return tree


def leaves(tree: Any) -> Iterator[Tensor]:
    """Return its tensors, in order."""
    found: list[Tensor] = []
    mapped(found.append, tree)
    return iter(found)


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield its tensors, each with where it is, such as `inputs['row'][0]` of `inputs`."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from named_leaves(below, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for index, below in enumerate(tree):
            yield from named_leaves(below, f"{name}[{index}]")
