"""A custom class, named in YAML by `_target_`: imported, checked to be of its group, and built.

`hydra.utils.instantiate` would call whatever the name says (CVE-2026-68508); here nothing is called
before the check.
"""

from __future__ import annotations

import importlib
import inspect
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from expt.config import main_code, secrets, user_code
from expt.config.constraints import DOTTED_NAME
from expt.errors import MISTAKES, ConfigError, did_you_mean

T = TypeVar("T")


def resolve(path: str, base: type[T]) -> type[T]:
    """Return the class that the dotted `path` names.

    Raises ConfigError unless it is a subclass of `base`.
    """
    module_name, _, name = path.rpartition(".")
    user_code.install_finder()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # SystemExit: of a script
        raise ConfigError(f"_target_={path}: {_of_import(module_name, error)}") from error
    found = getattr(module, name, None)
    if found is None:
        near = did_you_mean(name, dir(module))
        raise ConfigError(f"_target_={path}: {module_name} has no {name}.{near}")
    if not (isinstance(found, type) and issubclass(found, base)):
        kind = "" if base is object else f" of {base.__module__}.{base.__qualname__}"
        raise ConfigError(
            f"_target_={path}: refused, it is not a {'sub' if kind else ''}class{kind}"
        )
    return found


def _of_import(module: str, error: BaseException) -> str:
    if main_code.is_of_main(module):
        return (
            f"a class of a notebook's or script's __main__ is not here ({error}); define it there"
        )
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}" if error.filename else module
        return f"{where}: {error.msg}"
    if (frame := user_code.own_frame(error)) is None:
        folder = "its folder must be the current one or on PYTHONPATH"
        return f"cannot import {module} ({error}); {folder}"
    where = f"{frame.filename}, line {frame.lineno}"
    return f"importing {module} raised {secrets.said(error)} ({where})"


def build(path: str, base: type[T], /, *args: Any, **kwargs: Any) -> T:
    """Return an instance of the class that `path` names; see `construct`. Raises ConfigError."""
    cls = resolve(path, base)
    return construct(f"{_GROUPS.get(base.__name__, '')}_target_={path}", cls, args, kwargs)


_GROUPS = {
    "Module": "model.",
    "Task": "task.",
    "Optimizer": "optimizer.",
    "LRScheduler": "scheduler.",
}


def construct(whose: str, cls: type[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """Return an instance of the class; what its arguments name by `_target_` is built before it.

    Raises ConfigError, which begins with `whose`, for a mistake that another try would repeat.
    """
    return _called(whose, cls, args, nested_built(kwargs), kwargs)


def _called(
    whose: str,
    cls: type[T],
    args: Sequence[Any],
    arguments: Mapping[str, Any],
    typed: Mapping[str, Any],
) -> T:
    try:
        return cls(*args, **arguments)
    except Exception as error:
        if not _is_mistake(error):
            raise
        given = ", ".join(
            f"{key}={reprlib.repr(secrets.hidden(value))}" for key, value in typed.items()
        )
        frame = user_code.own_frame(error)
        where = f" ({frame.filename}, line {frame.lineno})" if frame else ""
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            near = did_you_mean(unknown[1], [x for x in _parameters(cls) if x not in arguments])
            where = f".{near}" if near else ""
        raise ConfigError(
            f"{whose}: cannot be built as {cls.__name__}({given}): {secrets.said(error)}{where}"
        ) from error


def _is_mistake(error: Exception) -> bool:
    """Return whether it is a mistake: torch has RuntimeErrors of memory and GPUs too."""
    if type(error) is RuntimeError:
        return not re.search(r"CUDA|allocate|connect", str(error))
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return is_missing or type(error).__name__ in MISTAKES


def taken(cls: type, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the `offered` keyword arguments that the constructor of `cls` takes."""
    parameters = _parameters(cls)
    return {
        name: at for name, at in offered.items() if _takes_any(parameters) or name in parameters
    }


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    found = inspect.signature(cls).parameters
    if _takes_any(found) and "__init__" in vars(cls):  # its __new__ may take anything
        return inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return found


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def nested_built(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arguments` with an instance for each `{_target_: a.B, ...}`, however deep.

    All are resolved before anything is called. Raises ConfigError for what is no class, or one of
    Python's library.
    """
    planned = {key: _planned(value) for key, value in arguments.items()}
    return {key: _made(value) for key, value in planned.items()}


class _Planned(NamedTuple):
    """A class that is checked, and not yet called."""

    cls: type
    path: str
    arguments: dict[str, Any]
    typed: Mapping[str, Any]


def _planned(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_planned, value))
    if not isinstance(value, Mapping):
        return value
    arguments = {key: _planned(below) for key, below in value.items() if key != "_target_"}
    if "_target_" not in value:
        return arguments
    path = value["_target_"]
    if not (isinstance(path, str) and re.fullmatch(DOTTED_NAME, path)):
        example = "_target_: torchvision.transforms.v2.RandAugment"
        raise ConfigError(f"_target_={path}: name a class, as in {example}")
    _refuse_python_s(path, path)  # before anything there is imported
    cls: type = resolve(path, object)
    if cls.__module__ != "__main__":
        _refuse_python_s(path, cls.__module__)
    typed = {key: below for key, below in value.items() if key != "_target_"}
    return _Planned(cls, path, arguments, typed)


def _refuse_python_s(path: str, module: str) -> None:
    """Raise ConfigError for a class of Python's library: no base is known to check it against."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"_target_={path}: refused, it is of Python's own library; name a class of a"
            " package, or your own"
        )


def _made(planned: Any) -> Any:
    if isinstance(planned, _Planned):
        arguments = {key: _made(below) for key, below in planned.arguments.items()}
        return _called(f"_target_={planned.path}", planned.cls, (), arguments, planned.typed)
    if isinstance(planned, dict):
        return {key: _made(below) for key, below in planned.items()}
    return type(planned)(map(_made, planned)) if isinstance(planned, list | tuple) else planned
