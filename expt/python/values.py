"""A value of Python as the words of a command have it, so that exactly this value comes out at the
other end.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from expt.errors import ConfigError
from expt.python.classes import dotted, instance_of
from expt.runs.typed import quoted

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


_GIVEN = {
    *("channels", "image_size", "num_classes", "train"),
    *("params", "optimizer", "total_steps"),
}
"""What expt gives to the constructors that name it."""


def text_of(key: str, value: Any) -> str:
    """`value` in Hydra's grammar. `key` is what an error calls it.

    Texts are taken as they stand, never for an interpolation or a list. A path is its text, an
    enum's member its value; tuples and arrays are lists. Raises ConfigError for what no YAML could
    hold."""
    value = _plain(key, value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return _quoted(key, value)
    if isinstance(value, list):
        return f"[{','.join(text_of(f'{key}[{at}]', each) for at, each in enumerate(value))}]"
    if isinstance(value, Mapping):
        pairs = (
            f"{_name(key, name)}:{text_of(f'{key}.{name}', each)}" for name, each in value.items()
        )
        return f"{{{','.join(pairs)}}}"
    raise ConfigError(_not_of_yaml(key, value))


def as_setting(value: Any, key: str, group: str | None) -> Any:
    """`value` where a class stands for what is built of it, as in `model=Net`,
    functools.partial(Net, width=16) too.
    """
    if isinstance(value, functools.partial):
        if value.args:
            raise ConfigError(
                f"{key}: name the arguments of functools.partial({_name_of(value.func)}, ...)"
            )
        return {"_target_": dotted(key, value.func, group), **value.keywords}
    return (
        {"_target_": dotted(key, value, group)}
        if isinstance(value, type) and not _is_enum(value)
        else value
    )


def _plain(key: str, value: Any) -> Any:
    """The kinds that YAML has; anything else as it is."""
    if isinstance(value, enum.Enum):
        return _plain(key, value.value)
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        return path if isinstance(path, str) else os.fsdecode(path)
    if isinstance(value, functools.partial):
        return as_setting(value, key, None)
    if isinstance(value, Mapping):
        target = value.get("_target_")
        return (
            {**value, "_target_": dotted(key, target, None)} if isinstance(target, type) else value
        )
    if isinstance(value, tuple | range):
        return list(value)
    if not isinstance(value, type) and callable(getattr(value, "tolist", None)):  # NumPy's, torch's
        return value.tolist()
    return value


def _quoted(key: str, text: str) -> str:
    """A text in quotes: its backslashes, its quotes and what OmegaConf would take for an
    interpolation are escaped.
    """
    if text == "???":
        raise ConfigError(f"{key}='???': stands for a value that is missing; give another")
    if "${" in text:
        text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)
    return quoted(text)


def _name(key: str, name: object) -> str:
    if (
        isinstance(name, str)
        and _KEY.fullmatch(name)
        and name.lower() not in ("null", "true", "false", "nan", "inf")
    ):
        return name
    raise ConfigError(
        f"{key}: has the key {name!r}; use letters, digits, - and _, and a letter first"
    )


def _not_of_yaml(key: str, value: Any) -> str:
    if isinstance(value, type):
        mend = f"{{'_target_': {value.__name__}}} gives an instance of it"
        return f"{key}={value.__name__}: is a class, of which a setting holds none; {mend}"
    if inspect.isroutine(value):
        return (
            f"{key}={_name_of(value)}: is a function, which no record can hold; give a class, or a"
            " value"
        )
    if kind := instance_of(value):
        name = type(value).__name__
        arguments = "".join(
            f"; with arguments as {{'_target_': {name}, '{each}': ...}}"
            for each in _own(type(value))
        )
        why = "each worker builds its own, as a rerun does from the record"
        return (
            f"{key}: is {kind} that is built already, and {why}; give the class {name}{arguments}"
        )
    if isinstance(value, set | frozenset):
        return f"{key}={value!r}: a set has no order; give a list"
    if dataclasses.is_dataclass(value):
        return f"{key}: give a dict, as of dataclasses.asdict"
    shown = repr(value)
    told = shown if len(shown) < 60 else f"{type(value).__name__}(...)"
    return f"{key}={told}: is of no kind that YAML has; give a number, a text, a list or a dict"


def _own(cls: type) -> list[str]:
    """The first argument of the constructor that expt does not give, if there is one."""
    try:
        names = inspect.signature(cls).parameters.values()
    except ValueError:
        return []
    named = [
        each.name for each in names if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return [name for name in named if name not in _GIVEN][:1]


def _is_enum(value: type) -> bool:
    return issubclass(value, enum.Enum)


def _name_of(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))
