"""The types of settings, as annotated in the schema: which values a key takes. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from expt.config.constraints import kind, names_of, typed
from expt.config.groups import GROUPS
from expt.config.schema import RunConfig


def hints_at(path: Sequence[str], member: str | None = None, root: Any = RunConfig) -> list[Any]:
    """Return the types of the key at a path, of each class that may have it."""
    *above, last = path
    every = map(hints_of, classes_at(above, member, root))
    return [hints[last] for hints in every if last in hints]


def classes_at(path: Sequence[str], member: str | None = None, root: Any = RunConfig) -> list[Any]:
    """Return the dataclasses that may lie at a path, where `member` is chosen of its group."""
    if not path:
        return [root]
    if root is RunConfig and len(path) == 1 and path[0] in GROUPS:
        members = GROUPS[path[0]]
        return [members[member]] if member in members else [*members.values()]
    if path[-1].isdigit():  # the elements of a list have the class that its type names
        return classes_at(path[:-1], member, root)
    return [cls for hint in hints_at(path, member, root) for cls in classes_in(hint)]


def names_around(path: Sequence[str], node: Mapping[str, Any], root: Any = RunConfig) -> list[str]:
    """Return the keys that there are next to the last one of `path`, in a configuration `node`."""
    member = kind(node.get(path[0])) if path[0] in GROUPS else None
    return [name for cls in classes_at(path[:-1], member, root) for name in names_of(cls)]


def classes_in(hint: Any) -> Iterator[type]:
    """Yield the dataclasses that a type names, also in unions and lists."""
    return filter(dataclasses.is_dataclass, _leaves([hint]))


def choices_of(key: str) -> tuple[str, ...]:
    """Return the values of a setting as they are typed; none for a number or a text."""
    values = dict.fromkeys(value for leaf in _types_of(key) for value in _values(leaf))
    return tuple(values) if values.keys() - {"null"} else ()


def _values(leaf: Any) -> Iterable[str]:
    if typing.get_origin(leaf) is typing.Literal:
        return map(typed, typing.get_args(leaf))
    return {bool: ("true", "false"), types.NoneType: ("null",)}.get(leaf, ())


def takes_null(key: str) -> bool:
    """Return whether a setting may be null."""
    return types.NoneType in _types_of(key)


def takes_list(key: str) -> bool:
    """Return whether a setting may be a list; any may that is not in the schema."""
    hints = hints_at(key.split("."))
    return not hints or any(typing.get_origin(each) is tuple for each in _leaves(hints, ()))


def takes_keys(key: str) -> bool:
    """Return whether a setting may have keys below it, also in the elements of its list."""
    types_in = _types_of(key)
    return any(dataclasses.is_dataclass(x) or typing.get_origin(x) is dict for x in types_in)


@functools.cache
def takes_text(key: str) -> bool:
    """Return whether a setting is a text, or a list of texts, whichever word stands there."""
    found = _types_of(key)
    return bool(found) and found.keys() <= {str, types.NoneType, Ellipsis}


@functools.cache
def may_be_text(key: str) -> bool:
    """Return whether a setting, or an element of it, may be any text, as a secret is."""
    found = _types_of(key)
    literals = {leaf for leaf in found if typing.get_origin(leaf) is typing.Literal}
    return not found or not found.keys() - literals <= {bool, int, float, types.NoneType, Ellipsis}


def _types_of(key: str) -> dict[Any, None]:
    """Return the types of a setting, or of the elements of its list, in the order of the schema."""
    path = re.sub(r"(\.\d+)+$", "", key).split(".")
    return dict.fromkeys(_leaves(hints_at(path)))


def _leaves(hints: Iterable[Any], lists: tuple[type, ...] = (tuple,)) -> Iterator[Any]:
    """Yield the types in types: of unions their members, of `lists` their elements."""
    for hint in hints:
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Annotated, typing.Union, types.UnionType, *lists):
            yield from _leaves(inside[:1] if origin is typing.Annotated else inside, lists)
        else:
            yield hint


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the annotated types of a dataclass's fields."""
    return typing.get_type_hints(kind, include_extras=True)
