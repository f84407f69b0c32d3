"""Whether two classes or functions do the same: their instructions, constants and defaults, whatever their lines."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

_OF_PYTHON = {
    *("__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__abstractmethods__", "_abc_impl", "__parameters__", "__classdictcell__"),
}
"""What Python itself puts into a class."""


def functions_in(named: Any) -> Iterator[types.FunctionType]:
    """The function itself, or those that are written in a class of `__main__`."""
    for value in [named] if not isinstance(named, type) else vars(named).values():
        for part in _parts(value):
            function = inspect.unwrap(part) if callable(part) else part
            if isinstance(function, types.FunctionType) and function.__code__.co_filename != "<string>":
                yield function


def difference(one: Any, other: Any) -> str:
    """The first part of a class or function in which `other` is not what `one` is; empty where they are the same."""
    if isinstance(one, type) and isinstance(other, type):
        kept = [{key: value for key, value in vars(cls).items() if key not in _OF_PYTHON} for cls in (one, other)]
        if names := kept[0].keys() ^ kept[1].keys():
            return f"{one.__name__}.{min(names)}"
        if [base.__qualname__ for base in one.__mro__] != [base.__qualname__ for base in other.__mro__]:
            return "what it is a subclass of"
        return next((f"{one.__name__}.{key}" for key in kept[0] if not _same(kept[0][key], kept[1][key])), "")
    return "" if _same(one, other) else str(getattr(one, "__name__", one))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, types.FunctionType):
        one, other = inspect.unwrap(one), inspect.unwrap(other)
        defaults = all(_same(getattr(one, part), getattr(other, part)) for part in ("__defaults__", "__kwdefaults__"))
        return defaults and _same_code(one.__code__, other.__code__)
    if isinstance(one, type):
        return one is other or not difference(one, other)
    if isinstance(one, property | staticmethod | classmethod):
        return all(_same(*pair) for pair in zip(_parts(one), _parts(other), strict=True))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    try:
        return one is other or bool(one == other) or repr(one) == repr(other)
    except Exception:  # of no truth, as several elements of an array
        return repr(one) == repr(other)


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_flags", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, part) != getattr(other, part) for part in parts) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType):
        return isinstance(other, types.CodeType) and _same_code(one, other)
    # As written, for 1 equals True; a set's order is no part of it.
    return type(one) is type(other) and (repr(one) == repr(other) or (isinstance(one, frozenset) and one == other))


def _parts(value: Any) -> tuple[Any, ...]:
    """The functions of a method as it stands in a class."""
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    return (value.__func__,) if isinstance(value, staticmethod | classmethod) else (value,)
