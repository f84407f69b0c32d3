"""Custom classes: found by their dotted names, checked, and built. Free of torch."""

from __future__ import annotations

import importlib
import inspect
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from expt.config import secrets
from expt.config.constraints import DOTTED_NAME
from expt.config.own_code import is_of_main, named_in, place_of
from expt.errors import MISTAKES, ConfigError, did_you_mean

T = TypeVar("T")


def resolve(path: str, base: type[T]) -> type[T]:
    """Return the class that the dotted `path` names.

    Raises ConfigError unless it is a subclass of `base`.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)  # which may import more
    except (Exception, SystemExit) as error:  # SystemExit: of a script
        raise ConfigError(f"_target_={path}: {_of_import(module_name, error)}") from error
    if found is None:
        near = did_you_mean(name, dir(module))
        raise ConfigError(f"_target_={path}: {module_name} has no {name}.{near}")
    if not (isinstance(found, type) and issubclass(found, base)):
        kind = "class" if base is object else f"subclass of {base.__module__}.{base.__qualname__}"
        raise ConfigError(f"_target_={path}: refused, it is not a {kind}")
    return found


def _of_import(module: str, error: BaseException) -> str:
    if is_of_main(module):
        return (
            f"a class of a notebook's or script's __main__ is not here ({error}); define it there"
        )
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}" if error.filename else module
        return f"{where}: {error.msg}"
    place = place_of(error)
    if not place:
        folder = "its folder must be the current one or on PYTHONPATH (in Python: in sys.path)"
        return f"cannot import {module} ({error}); {folder}"
    return f"importing {module} raised {secrets.said(error)}{place}"


def build(path: str, base: type[T], /, *args: Any, **kwargs: Any) -> T:
    """Return an instance of the class that `path` names; see `construct`. Raises ConfigError."""
    return construct(f"_target_={path}", resolve(path, base), args, kwargs)


def construct(whose: str, cls: type[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """Return an instance of the class; arguments with a `_target_` are built before it.

    Raises ConfigError, which begins with `whose`, for a mistake that another try would repeat.
    """
    arguments = nested_built(kwargs)
    try:
        return cls(*args, **arguments)
    except Exception as error:
        if not _is_mistake(error):
            raise
        shown = {key: reprlib.repr(secrets.hidden(value)) for key, value in kwargs.items()}
        given = ", ".join(f"{key}={value}" for key, value in shown.items())
        more = place_of(error)
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            near = did_you_mean(unknown[1], [x for x in _parameters(cls) if x not in arguments])
            more = f".{near}" if near else ""
        raise ConfigError(
            f"{whose}: cannot be built as {cls.__name__}({given}): {secrets.said(error)}{more}"
        ) from error


def _is_mistake(error: Exception) -> bool:
    """Return whether it is a mistake: torch has RuntimeErrors of memory and GPUs too."""
    if type(error) is RuntimeError:
        return not re.search(r"CUDA|allocate|connect", str(error))
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return is_missing or type(error).__name__ in MISTAKES


def taken(cls: type, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the `offered` keyword arguments that the constructor of `cls` takes."""
    known = _parameters(cls)
    return {name: x for name, x in offered.items() if _takes_any(known) or name in known}


def required(cls: type) -> set[str]:
    """Return the arguments without which `cls` can't be built."""
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    known = _parameters(cls).items()
    return {name for name, one in known if one.default is one.empty and one.kind not in several}


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    try:
        found = inspect.signature(cls).parameters
    except ValueError:  # of a compiled class
        return {}
    if _takes_any(found) and "__init__" in vars(cls):  # its __new__ may take anything
        _, *own = inspect.signature(cls.__init__).parameters.items()  # type: ignore[misc]
        return dict(own)
    return found


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def nested_built(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arguments` with an instance for each `{_target_: a.B, ...}`, however deep.

    All are found before anything is called. Raises ConfigError for a name that is no class, or one
    of Python's library.
    """
    for path in named_in(arguments):
        _nested_class(path)
    return {key: _made(value) for key, value in arguments.items()}


def _made(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_made, value))
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {key: _made(below) for key, below in value.items()}
    path, arguments = value["_target_"], {key: value[key] for key in value if key != "_target_"}
    return construct(f"_target_={path}", _nested_class(path), (), arguments)


def _nested_class(path: Any) -> type:
    """Return a class for which no base is known: of Python's library some run commands."""
    if not (isinstance(path, str) and re.fullmatch(DOTTED_NAME, path)):
        example = "_target_: torchvision.transforms.v2.RandAugment"
        raise ConfigError(f"_target_={path}: name a class, e.g. {example}")
    if not _is_python_s(path):  # else it is not even imported
        cls = resolve(path, object)
        if not _is_python_s(cls.__module__):
            return cls
    fix = "name a class of a package, or your own"
    raise ConfigError(f"_target_={path}: refused, it is of Python's own library; {fix}")


def _is_python_s(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names
