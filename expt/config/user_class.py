"""A person's own class, named in YAML by `_target_`: imported, and accepted only if it is what its group builds.

`hydra.utils.instantiate` would call whatever the name says (CVE-2026-68508); here nothing is called before the check.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from expt.config.user_code import is_installed
from expt.errors import ConfigError, did_you_mean

T = TypeVar("T")


def resolve(path: str, base: type[T]) -> type[T]:
    """The class that the dotted `path` names. Raises ConfigError unless it is a subclass of `base`."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else module_name
        raise ConfigError(f"_target_={path}: {where}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # SystemExit of a script without `if __name__ == "__main__"`
        raise ConfigError(f"_target_={path}: {_of_import(module_name, error)}") from error
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"_target_={path}: {module_name} has no {name}.{did_you_mean(name, dir(module))}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"_target_={path}: refused, it is not a subclass of {base.__module__}.{base.__qualname__}")
    return found


def _of_import(module: str, error: BaseException) -> str:
    """What to say where importing `module` raised: that it is not found, or where in the person's own code it fails."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = (frame for frame in frames if not (frame.filename.startswith("<") or is_installed(Path(frame.filename))))
    if (frame := next(own, None)) is None:
        return f"cannot import {module} ({error}); its folder must be the current one or on PYTHONPATH"
    told = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"importing {module} raised {told} ({frame.filename}, line {frame.lineno})"


def build(path: str, base: type[T], *args: Any, **kwargs: Any) -> T:
    """An instance of the class that `path` names.

    Raises ConfigError as `resolve` does, and if its constructor does not take the arguments.
    """
    cls = resolve(path, base)
    signature = inspect.signature(cls)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = _nearest(kwargs, signature)
        raise ConfigError(f"_target_={path}: {error}; it was given {', '.join(kwargs)}{hint}") from error
    return cls(*args, **kwargs)


def _nearest(given: Collection[str], signature: inspect.Signature) -> str:
    """A hint to what the first argument that is not taken may be meant for."""
    free = [name for name in signature.parameters if name not in given]
    unknown = [name for name in given if name not in signature.parameters]
    hint = did_you_mean(unknown[0], free) if unknown else ""
    return f".{hint}" if hint else ""
