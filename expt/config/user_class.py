"""A person's own class, named in YAML by `_target_`: imported, and accepted only if it is what its
group builds.

`hydra.utils.instantiate` would call whatever the name says (CVE-2026-68508); here nothing is called
before the check."""

from __future__ import annotations

import importlib
import inspect
import re
import reprlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from expt.config import own_source, secrets
from expt.config.constraints import DOTTED_NAME
from expt.config.main_code import PREFIX
from expt.config.user_code import own_frame
from expt.errors import MISTAKES, ConfigError, did_you_mean

T = TypeVar("T")


def resolve(path: str, base: type[T]) -> type[T]:
    """The class that the dotted `path` names.

    Raises ConfigError unless it is a subclass of `base`.
    """
    module_name, _, name = path.rpartition(".")
    own_source.install()
    try:
        module = importlib.import_module(module_name)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else module_name
        raise ConfigError(f"_target_={path}: {where}: {error.msg}") from error
    except (
        Exception,
        SystemExit,
    ) as error:  # SystemExit of a script without `if __name__ == "__main__"`
        raise ConfigError(f"_target_={path}: {_of_import(module_name, error)}") from error
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(
            f"_target_={path}: {module_name} has no {name}.{did_you_mean(name, dir(module))}"
        )
    if not isinstance(found, type) and base is object:
        raise ConfigError(f"_target_={path}: refused, it is no class")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"_target_={path}: refused, it is not a subclass of"
            f" {base.__module__}.{base.__qualname__}"
        )
    return found


def _of_import(module: str, error: BaseException) -> str:
    """What to say where importing `module` raised: that it is not found, or where in the person's
    own code it fails.
    """
    if module.startswith(PREFIX):
        return (
            f"it is of a notebook's or script's __main__ ({error}); give the class there, or use"
            " expt rerun FOLDER"
        )
    if (frame := own_frame(error)) is None:
        return (
            f"cannot import {module} ({error}); its folder must be the current one or on PYTHONPATH"
        )
    return (
        f"importing {module} raised {secrets.said(error)} ({frame.filename}, line {frame.lineno})"
    )


def build(path: str, base: type[T], /, *args: Any, **kwargs: Any) -> T:
    """An instance of the class that `path` names; what its arguments name by `_target_` is built
    too, before it.

    Raises ConfigError as `resolve` does, and if its constructor does not take the arguments.
    """
    cls = resolve(path, base)
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(
            f"_target_={path}: lacks {', '.join(lacking)}, which a {base.__name__} must have;"
            " define it"
        )
    _check_arguments(path, cls, args, kwargs)
    return construct(f"{_GROUPS.get(base.__name__, '')}_target_={path}", cls, args, kwargs)


_GROUPS = {
    "Module": "model.",
    "Task": "task.",
    "Optimizer": "optimizer.",
    "LRScheduler": "scheduler.",
}


def construct(whose: str, cls: type[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """An instance of the class; what its arguments name by `_target_` is built too, before it.

    `whose` it is, is told.

    Raises ConfigError for a mistake of the constructor's, or in what it is given: the next try
    would be no other."""
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
        frame, told = own_frame(error), secrets.said(error)
        given = ", ".join(
            f"{key}={reprlib.repr(secrets.hidden(value))}" for key, value in typed.items()
        )
        where = (
            f" ({frame.filename}, line {frame.lineno}); mend that line, or" if frame else "; mend"
        )
        raise ConfigError(
            f"{whose}: cannot be built as {cls.__name__}({given}): {told}{where} what it is given"
        ) from error


def _is_mistake(error: Exception) -> bool:
    """Whether it is no matter of the network, of a GPU or of the memory: of all these torch has
    RuntimeErrors.
    """
    if type(error) is RuntimeError:
        return not re.search(r"CUDA|allocate|connect", str(error))
    return (
        isinstance(error, FileNotFoundError | NotADirectoryError)
        or type(error).__name__ in MISTAKES
    )


def taken(cls: type, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `offered` keyword arguments that the constructor of `cls` names, or all where it
    takes any.
    """
    parameters = _signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in offered.items() if takes_any or name in parameters}


def nested_built(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments` with each `{_target_: a.B, ...}` among them, however deep, replaced by an
    instance of a.B.

    All is resolved and checked before anything is called. Raises ConfigError for what is no class,
    or one of Python's."""
    return {
        key: _made(planned)
        for key, planned in [(key, _planned(value)) for key, value in arguments.items()]
    }


class _Planned(NamedTuple):
    """A class that is checked, and not yet called."""

    path: str
    cls: type
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
        raise ConfigError(
            f"_target_={path}: name a class, as in _target_: torchvision.transforms.v2.RandAugment"
        )
    if path.partition(".")[0] in sys.stdlib_module_names:  # before anything there is imported
        raise ConfigError(_of_python(path))
    cls: type = resolve(path, object)
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names and cls.__module__ != "__main__":
        raise ConfigError(_of_python(path))
    _check_arguments(path, cls, (), arguments)
    return _Planned(
        path, cls, arguments, {key: below for key, below in value.items() if key != "_target_"}
    )


def _of_python(path: str) -> str:
    """Of what no base class is known, a class as `subprocess.Popen` or `ctypes.CDLL` would do."""
    return (
        f"_target_={path}: refused, it is of Python's own library; name a class of a package, or"
        " your own"
    )


def _made(planned: Any) -> Any:
    if isinstance(planned, _Planned):
        return _called(
            f"_target_={planned.path}", planned.cls, (), _made(planned.arguments), planned.typed
        )
    if isinstance(planned, dict):
        return {key: _made(below) for key, below in planned.items()}
    return type(planned)(map(_made, planned)) if isinstance(planned, list | tuple) else planned


def _check_arguments(path: str, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = _signature(cls)
    except ValueError:  # of an extension module, which does not say what it takes
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = _nearest(kwargs, signature) or _mend(str(error))
        raise ConfigError(
            f"_target_={path}: {error}; it was given {', '.join(kwargs) or 'nothing'}{hint}"
        ) from error


def _signature(cls: type) -> inspect.Signature:
    """What the class takes: where its `__new__` takes anything, what its `__init__` does."""
    found = inspect.signature(cls)
    if any(
        each.kind is each.VAR_KEYWORD for each in found.parameters.values()
    ) and "__init__" in vars(cls):
        _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return found.replace(parameters=parameters)
    return found


def _nearest(given: Collection[str], signature: inspect.Signature) -> str:
    """A hint to what the first argument that is not taken may be meant for."""
    free = [name for name in signature.parameters if name not in given]
    unknown = [name for name in given if name not in signature.parameters]
    hint = did_you_mean(unknown[0], free) if unknown else ""
    return f".{hint}" if hint else ""


def _mend(error: str) -> str:
    """Of what Python says where arguments do not fit."""
    if missing := re.search(r"missing a required .*'(\w+)'", error):
        return f"; add {missing[1]} beside _target_"
    return "; leave it out" if "unexpected" in error else ""
