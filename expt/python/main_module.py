"""A class that a notebook's cell or a script has defined in `__main__`, as a module for workers.

No worker has that `__main__`, and to run a script again would start another run. So cloudpickle
carries the class, with all that it uses of `__main__`, in a module of its own, which is named by a
digest of the code: the same class has the same name in every process, and a changed one another.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

from expt.config import user_code
from expt.errors import ConfigError

NAMES = ("__main__", "__mp_main__")
"""What a script is called, the second in a process that multiprocessing has spawned."""
_OF_PYTHON = {
    *("__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__annotate__"),
    *("__static_attributes__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
    *("__abstractmethods__", "_abc_impl", "__parameters__", "__classdictcell__"),
}
"""What Python itself puts into a class."""
_MODULE = '''"""{name}, as cloudpickle under Python {version} has it; its source is below."""

import base64
import sys

import cloudpickle
{imports}

{name} = cloudpickle.loads(base64.b85decode(
    {pickled!r}
))
if getattr(sys.modules["__main__"], "{name}", None) is not {name}:  # else it is that one
    {name}.__module__ = __name__

{source}
'''


def dotted(key: str, cls: type) -> str:
    """Return the name by which workers import `cls` of `__main__`.

    Raises ConfigError where it uses what cannot be pickled.
    """
    walk = _Walk()
    try:
        digest = hashlib.sha256("\n".join(walk.of(cls)).encode()).hexdigest()
        pickled = base64.b85encode(_by_value(cls)).decode()
    except Exception as error:  # what a person's objects raise is of many kinds
        raise ConfigError(
            f"{key}={cls.__name__}: cannot be sent to workers ({type(error).__name__}: {error});"
            " put it into a file, as with %%writefile mine.py at the top of a cell, and import it"
        ) from error
    text = _MODULE.format(
        name=cls.__name__,
        version=".".join(map(str, sys.version_info[:2])),
        imports="\n".join(f"import {module}" for module in sorted(walk.modules)),
        pickled=pickled,
        source=textwrap.indent(_source(cls), "# ", lambda _: True),
    )
    return f"{user_code.write(digest, text)}.{cls.__name__}"


def _by_value(cls: type) -> Any:
    module = sys.modules[cls.__module__]
    if module.__name__ == "__main__":
        return cloudpickle.dumps(cls)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(cls)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class _Walk:
    """Spells out a class or function and all that it uses; equal code has equal texts.

    Lines and files do not count, so a cell that is run again is the same.
    """

    def __init__(self) -> None:
        self.modules = set[str]()
        """What is used of other modules, whose source counts by itself."""
        self._seen = dict[int, int]()

    def of(self, value: Any) -> Iterator[str]:
        """Yield the texts."""
        if id(value) in self._seen and not isinstance(value, str | int | float | bool | None):
            yield f"again {self._seen[id(value)]}"
            return
        self._seen[id(value)] = len(self._seen)
        yield type(value).__qualname__
        if isinstance(value, types.ModuleType):
            self.modules.add(value.__name__)
            yield value.__name__
        elif isinstance(value, type | types.FunctionType) and value.__module__ not in NAMES:
            self.modules |= {value.__module__} & sys.modules.keys()
            yield f"{value.__module__}.{value.__qualname__}"
        elif isinstance(value, type):
            yield value.__qualname__
            for base in value.__bases__:
                yield from self.of(base)
            for name in sorted(vars(value).keys() - _OF_PYTHON):
                yield name
                yield from self.of(vars(value)[name])
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, property | staticmethod | classmethod):
            for part in ("fget", "fset", "fdel", "__func__"):
                yield from self.of(getattr(value, part, None))
        elif isinstance(value, types.CodeType):
            yield from self._of_code(value)
        elif isinstance(value, Mapping):
            for key, below in value.items():
                yield from self.of(key)
                yield from self.of(below)
        elif isinstance(value, list | tuple):
            for below in value:
                yield from self.of(below)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(repr, value))
        elif isinstance(value, str | bytes | int | float | complex | None):
            yield repr(value)
        elif hasattr(value, "__dict__") and type(value).__module__ in NAMES:
            yield from self.of(type(value))
            yield from self.of(vars(value))
        else:
            yield hashlib.sha256(cloudpickle.dumps(value)).hexdigest()

    def _of_function(self, function: types.FunctionType) -> Iterator[str]:
        code = function.__code__
        yield from self._of_code(code)
        yield from self.of(function.__defaults__)
        yield from self.of(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                yield from self.of(cell.cell_contents)
            except ValueError:  # not filled yet
                yield "empty"
        for name in sorted({*_names(code)} & function.__globals__.keys()):
            yield name
            yield from self.of(function.__globals__[name])

    def _of_code(self, code: types.CodeType) -> Iterator[str]:
        parts = ("co_name", "co_names", "co_varnames", "co_freevars", "co_flags", "co_argcount")
        yield repr([getattr(code, part) for part in (*parts, "co_kwonlyargcount")])
        yield hashlib.sha256(code.co_code).hexdigest()
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._of_code(constant)
            elif isinstance(constant, frozenset):
                yield from sorted(map(repr, constant))
            else:
                yield repr(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code may look up in its module, at any depth."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _source(cls: type) -> str:
    """Return the text of a class for its readers; empty where it is not known."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # of a notebook: by the cell that its functions are from
        for value in vars(cls).values():
            if isinstance(value, types.FunctionType):
                return "".join(linecache.getlines(value.__code__.co_filename))
        return ""
