"""A class that a notebook's cell or a script has defined in `__main__`, as a module for workers.

No worker has that `__main__`, and to run a script again would start another run. So cloudpickle
carries the class, with all that it uses of `__main__`, in a module of its own, which is named by a
digest of the code: the same class has the same name in every process, and a changed one another.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import io
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

from expt.config import kept_code
from expt.errors import ConfigError

NAMES = ("__main__", "__mp_main__")
"""The names of a script's module, the second in a process that multiprocessing has spawned."""
_OF_PYTHON = {
    *("__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__annotate__"),
    *("__static_attributes__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
    *("__abstractmethods__", "_abc_impl", "__parameters__", "__classdictcell__"),
}
"""Attributes that Python itself puts into a class."""
_PLAIN = (str, bytes, int, float, complex, types.NoneType)
_PARTS = (
    *("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    *("co_name", "co_names", "co_varnames", "co_freevars", "co_flags", "co_argcount"),
    *("co_kwonlyargcount", "co_code", "co_consts", "fget", "fset", "fdel", "__func__"),
    *("func", "args", "keywords", "__wrapped__"),
)
"""Attributes that count, of a function, its code, and its wrappers."""
_MODULE = '''"""{name}, as cloudpickle under Python {version} has it; its source is below."""

import base64

import cloudpickle
{imports}

{name} = cloudpickle.loads(base64.b85decode(
    {pickled!r}
))
{name}.__module__ = __name__

{source}
'''


def dotted(key: str, cls: type) -> str:
    """Return the name by which workers import `cls` of `__main__`.

    Raises ConfigError where it uses an object that cannot be pickled.
    """
    walk = _Walk()
    try:
        digest = hashlib.sha256("\n".join(walk.of(cls)).encode()).hexdigest()
        pickled = base64.b85encode(_by_value(cls)).decode()
    except Exception as error:  # objects of a person's raise errors of many classes
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
    return f"{kept_code.write(digest, text)}.{cls.__name__}"


class _Pickler(cloudpickle.Pickler):
    """Leaves out the id by which cloudpickle finds a class that this process has.

    It would set the pickled attributes on that one. Without the id each module has its own class.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ in NAMES:
            return _cached, (obj.__wrapped__, *obj.cache_parameters().values())
        reduced = super().reducer_override(obj)  # type: ignore[no-untyped-call]
        if not isinstance(obj, type) or not isinstance(reduced, tuple):
            return reduced
        build, arguments, *rest = reduced
        return build, tuple(None if _is_id(each) else each for each in arguments), *rest


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _by_value(cls: type) -> bytes:
    module, file = sys.modules[cls.__module__], io.BytesIO()
    cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(file).dump(cls)  # type: ignore[no-untyped-call]
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _Walk:
    """Spells out a class or function and all that it uses; equal code has equal texts.

    Lines and files do not count, so a cell that is run again is the same.
    """

    def __init__(self) -> None:
        self.modules = set[str]()
        """Names used from other modules, whose source counts by itself."""
        self._seen = dict[int, tuple[int, Any]]()

    def of(self, value: Any) -> Iterator[str]:
        """Yield the texts."""
        if id(value) in self._seen:
            yield f"again {self._seen[id(value)][0]}"
            return
        if not isinstance(value, (*_PLAIN, tuple, frozenset)):
            self._seen[id(value)] = len(self._seen), value  # held, so that no other has its id
        yield type(value).__qualname__
        match value:
            case types.ModuleType():
                self.modules.add(value.__name__)
                yield value.__name__
            case type() | types.FunctionType() if value.__module__ not in NAMES:
                self.modules |= {value.__module__} & sys.modules.keys()
                yield f"{value.__module__}.{value.__qualname__}"
            case type():
                yield value.__qualname__
                yield from self.of(value.__bases__)
                yield from self._named(vars(value), vars(value).keys() - _OF_PYTHON)
            case (
                types.FunctionType()
                | types.CodeType()
                | property()
                | staticmethod()
                | classmethod()
                | functools.partial()
                | functools.cached_property()
                | functools._lru_cache_wrapper()
            ):
                for part in (part for part in _PARTS if hasattr(value, part)):
                    yield from self.of(getattr(value, part))
                if isinstance(value, types.FunctionType):
                    of_main = value.__globals__
                    yield from self._named(of_main, {*_names(value.__code__)} & of_main.keys())
            case types.CellType():
                if value != types.CellType():  # filled
                    yield from self.of(value.cell_contents)
            case Mapping():
                yield from self.of([*value.items()])
            case list() | tuple():
                for below in value:
                    yield from self.of(below)
            case set() | frozenset():
                yield from sorted("\n".join(_Walk().of(each)) for each in value)
            case str() | bytes() | int() | float() | complex() | None:
                yield repr(value)
            case _ if hasattr(value, "__dict__") and type(value).__module__ in NAMES:
                yield from self.of((type(value), vars(value)))
            case _:
                yield hashlib.sha256(cloudpickle.dumps(value)).hexdigest()

    def _named(self, scope: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
        for name in sorted(names):
            yield name
            yield from self.of(scope[name])


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
