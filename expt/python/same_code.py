"""Whether two classes or functions do the same: their instructions, constants and defaults,
whatever their lines.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from expt.config import main_code

_OF_PYTHON = {
    *(
        "__module__",
        "__dict__",
        "__weakref__",
        "__doc__",
        "__firstlineno__",
        "__static_attributes__",
    ),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__abstractmethods__", "_abc_impl", "__parameters__", "__classdictcell__"),
}
"""What Python itself puts into a class."""


def functions_in(named: Any) -> Iterator[types.FunctionType]:
    """The function itself, or those that are written in a class of `__main__`."""
    for value in [named] if not isinstance(named, type) else vars(named).values():
        for part in _parts(value):
            function = inspect.unwrap(part) if callable(part) else part
            if (
                isinstance(function, types.FunctionType)
                and function.__code__.co_filename != "<string>"
            ):
                yield function


class Comparison:
    """Between a class or function that is there, and the one that its text makes in another module."""

    def __init__(self, codes: Iterable[types.CodeType]) -> None:
        """`codes` are the functions that the text has, as Python compiles them where it stands."""
        self._codes_of: dict[tuple[str, int], list[types.CodeType]] = {}
        for code in codes:
            self._codes_of.setdefault(_key(code), []).append(code)

    def difference(self, one: Any, other: Any) -> str:
        """The first part in which `other` is not what `one` is; empty where they are the same."""
        if isinstance(one, types.FunctionType):
            is_same = isinstance(other, types.FunctionType) and self._same_function(
                *map(inspect.unwrap, (one, other))
            )
            return "" if is_same else one.__name__
        kept = [
            {key: value for key, value in vars(cls).items() if key not in _OF_PYTHON}
            for cls in (one, other)
        ]
        if names := kept[0].keys() ^ kept[1].keys():
            return f"{one.__name__}.{min(names)}"
        if [base.__qualname__ for base in one.__mro__] != [
            base.__qualname__ for base in other.__mro__
        ]:
            return "what it is a subclass of"
        return next(
            (
                f"{one.__name__}.{key}"
                for key in kept[0]
                if not self._same(kept[0][key], kept[1][key])
            ),
            "",
        )

    def _same(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, type | types.FunctionType) and _is_compared_elsewhere(one, other):
            return True
        if isinstance(one, types.FunctionType):
            return self._same_function(inspect.unwrap(one), inspect.unwrap(other))
        if isinstance(one, type):
            return one is other or ("." in one.__qualname__ and not self.difference(one, other))
        if isinstance(one, property | staticmethod | classmethod):
            return all(map(self._same, _parts(one), _parts(other)))
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(
                self._same(value, other[key]) for key, value in one.items()
            )
        try:
            return one is other or bool(one == other) or repr(one) == repr(other)
        except Exception:  # of no truth, as several elements of an array
            return repr(one) == repr(other)

    def _same_function(self, one: types.FunctionType, other: types.FunctionType) -> bool:
        if not all(
            self._same(getattr(one, part), getattr(other, part))
            for part in ("__defaults__", "__kwdefaults__")
        ):
            return False
        if (
            one.__module__ != "__main__" or one.__code__.co_filename == "<string>"
        ):  # that of a library, as dataclasses'
            return one.__code__.co_code == other.__code__.co_code
        named_alike = one.__code__.co_name == other.__code__.co_name
        return named_alike and any(
            _same_code(one.__code__, code) for code in self._codes_of.get(_key(one.__code__), ())
        )


def _is_compared_elsewhere(one: type | types.FunctionType, other: Any) -> bool:
    """Whether `other` has been made of what `__main__` now has under the name, in a module of its
    own.
    """
    there: Any = vars(sys.modules["__main__"]).get(one.__name__)
    return (
        there is one
        and main_code.is_of_main(other.__module__)
        and other.__qualname__ == one.__name__
    )


def _key(code: types.CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether their instructions are the same; those of a call depend on where the called name is
    imported.
    """
    parts = (
        "co_code",
        "co_names",
        "co_varnames",
        "co_freevars",
        "co_flags",
        "co_argcount",
        "co_kwonlyargcount",
    )
    if any(getattr(one, part) != getattr(other, part) for part in parts) or len(
        one.co_consts
    ) != len(other.co_consts):
        return False
    return all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType):
        return isinstance(other, types.CodeType) and _same_code(one, other)
    # As written, for 1 equals True; a set's order is no part of it.
    return type(one) is type(other) and (
        repr(one) == repr(other) or (isinstance(one, frozenset) and one == other)
    )


def _parts(value: Any) -> tuple[Any, ...]:
    """The functions of a method as it stands in a class."""
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    return (value.__func__,) if isinstance(value, staticmethod | classmethod) else (value,)
