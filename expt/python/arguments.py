"""Keyword arguments as the words of a command: `optimizer={"lr": 0.1}` as `optimizer.lr=0.1`."""

from __future__ import annotations

import enum
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expt.command.words import Exact
from expt.config import own_code
from expt.config.constraints import typed
from expt.config.groups import GROUPS
from expt.config.keys import holders
from expt.errors import ConfigError, warn
from expt.python import main_module

OF_CLASSES = {group for group, choices in GROUPS.items() if "_target_" in choices}
"""Groups whose choice may be a custom class."""
_LISTS_OF_CLASSES = ("callbacks", "dataset.transforms", "dataset.eval_transforms")
_NAME = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_][a-z0-9_-]*", re.IGNORECASE | re.ASCII)
"""The keys of a mapping that Hydra's grammar takes without quotes."""


def words_of(
    arguments: Sequence[str | Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    sweep: bool = False,
) -> list[str]:
    """Return the overrides for the arguments of expt.run or expt.sweep.

    Raises ConfigError for a value that no override can hold.
    """
    words = list[str]()
    for argument in (*arguments, settings):
        if isinstance(argument, str):
            words.append(argument)
        elif isinstance(argument, Mapping):
            for key, value in argument.items():
                words += _Setting(str(key), sweep).words(value)
        else:
            raise ConfigError(f"{argument!r}: give KEY=VALUE as a text, or by name, e.g. epochs=3")
    return words


def folder_word(folder: str | Path | None, *, sweep: bool) -> list[str]:
    """Return the override of the folder, if one is given; of a sweep `latest` too."""
    key = f"hydra.{'sweep' if sweep else 'run'}.dir"
    return [] if folder is None else [Exact(f"{key}={text_of('folder', folder)}")]


class _Setting:
    """A dotted key, whose value becomes words."""

    def __init__(self, key: str, sweep: bool) -> None:
        key = re.sub(r"\[(\d+)\]", r".\1", key)  # of an element
        self._key = key
        self._sweep = sweep and key.partition(".")[0] != "search"  # a list there is not an axis
        self._is_group = key in GROUPS or key == "search"
        self._is_open = self._is_group or key in holders() or key.partition(".")[0] == "hydra"

    def words(self, value: Any) -> Iterator[str]:
        """Yield the words for `value`; a group's choice comes before its keys."""
        value = self._given(value)
        if self._key == "search.when" and isinstance(value, Mapping):
            several = {key: [it] if isinstance(it, str) else it for key, it in value.items()}
            value = [f"{condition}: {axis}" for condition in several for axis in several[condition]]
        if isinstance(value, Interval):
            yield Exact(f"{self._key}={value}")
        elif self._sweep and (axis := _axis(self._key, value)) is not None:
            yield Exact(f"{self._key}={','.join(self._text(self._given(each)) for each in axis)}")
        elif self._key == "task.metrics" and isinstance(value, Mapping):
            for name, metric in value.items():
                text = text_of(f"{self._key}.{name}", as_setting(metric, name))
                yield Exact(f"++task.metrics.{name}={text}")
        elif isinstance(value, Mapping) and self._is_open and (value or not self._is_group):
            yield from self._below(value)
        else:
            yield Exact(f"{self._key}={self._text(value)}")

    def _given(self, value: Any) -> Any:
        return as_setting(value, self._key) if self._key in OF_CLASSES else value

    def _below(self, values: Mapping[str, Any]) -> Iterator[str]:
        if self._is_group and values.get("_target_") is not None:
            yield from self._class(values)
            return
        if self._is_group and "name" in values:
            yield from _Setting(self._key, self._sweep).words(values["name"])
        for name, value in values.items():
            if not (self._is_group and name == "name"):
                yield from _Setting(f"{self._key}.{name}", self._sweep).words(value)

    def _class(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a class with the first value of each axis, then the axes of its arguments."""
        axes, first = dict[str, Any](), {**values}
        for name, value in values.items() if self._sweep else ():
            if isinstance(value, Interval):
                axes[name], first[name] = value, value.low
            elif axis := _axis(f"{self._key}.{name}", value):
                axes[name], first[name] = axis, axis[0]
        yield Exact(f"{self._key}={self._text(first)}")
        for name, axis in axes.items():
            yield from _Setting(f"{self._key}.{name}", sweep=True).words(axis)

    def _text(self, value: Any) -> str:
        if self._key in _LISTS_OF_CLASSES and value is not None:
            several = value if isinstance(value, list | tuple) else [value]
            value = [as_setting(each, f"{self._key}[{at}]") for at, each in enumerate(several)]
        return text_of(self._key, value)


def _axis(key: str, value: Any) -> list[Any] | None:
    """Return the values of a list, a range or an array; None where `value` is one value.

    A tuple is one value. Raises ConfigError for an axis without values.
    """
    if not isinstance(value, list | range):
        is_array = not isinstance(value, type) and callable(getattr(value, "tolist", None))
        if not is_array or getattr(value, "ndim", 1) == 0:
            return None
        value = value.tolist()
    if not value:
        raise ConfigError(f"{key}={list(value)!r}: an axis of a sweep needs values")
    return list(value)


def text_of(key: str, value: Any) -> str:
    """Return `value` in Hydra's grammar; errors call it `key`.

    Texts are taken as they stand, never for an interpolation or a list. A path is its text, an
    enum's member its value; tuples and arrays are lists. Raises ConfigError for a value that YAML
    has no form for.
    """
    return typed(_plain(key, value), exact=True)


def _plain(key: str, value: Any) -> Any:
    """Return `value` as YAML has it; OmegaConf finds no interpolation in its texts."""
    if isinstance(value, enum.Enum):
        return _plain(key, value.value)
    if isinstance(value, os.PathLike):
        value = os.fsdecode(value)
    if isinstance(value, functools.partial | Mapping):
        items = as_setting(value, key).items()
        return {_checked_name(key, name): _plain(f"{key}.{name}", each) for name, each in items}
    if not isinstance(value, type) and callable(getattr(value, "tolist", None)):  # NumPy's, torch's
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return [_plain(f"{key}[{at}]", each) for at, each in enumerate(value)]
    if isinstance(value, str) and not isinstance(value, Interval):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    if value is None or isinstance(value, int | float):
        return value
    shown = repr(value)
    name = shown if len(shown) < 60 and "\n" not in shown else f"{type(value).__name__}(...)"
    raise ConfigError(
        f"{key}={name}: is of no kind that YAML has; give a number, a text, a list or a dict; for"
        " an object that workers build its class, or {'_target_': CLASS, ...}"
    )


def as_setting(value: Any, key: str) -> Any:
    """Return `value`, of a class or a partial of one as `_target_` and arguments."""
    if isinstance(value, functools.partial):
        if value.args:
            name = getattr(value.func, "__name__", "...")
            raise ConfigError(f"{key}: name the arguments of functools.partial({name}, ...)")
        return {"_target_": dotted(key, value.func), **value.keywords}
    if isinstance(value, Mapping) and isinstance(value.get("_target_"), type):
        return {**value, "_target_": dotted(key, value["_target_"])}
    if isinstance(value, type) and not issubclass(value, enum.Enum):
        return {"_target_": dotted(key, value)}
    return value


def _checked_name(key: str, name: object) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    fix = "use letters, digits, - and _, and a letter first"
    raise ConfigError(f"{key}: has the key {name!r}; {fix}")


def dotted(key: str, cls: Any) -> str:
    """Return the name of `cls`, e.g. `mine.Net`.

    Raises ConfigError if a worker could not import it: a function, a class within another or within
    a function, and one of `__main__` whose source is not known.
    """
    name = getattr(cls, "__qualname__", str(cls))
    if not isinstance(cls, type):
        raise ConfigError(f"{key}={name}: is not a class; give one")
    if "." in name:
        fix = "define it at the top of a module or a cell"
        raise ConfigError(f"{key}={name}: no worker finds it there; {fix}")
    if cls.__module__ in main_module.NAMES:
        return main_module.dotted(key, cls)
    if getattr(sys.modules.get(cls.__module__), name, None) is not cls:
        why = f"{cls.__module__} now has another class of that name, or none; import it again"
        raise ConfigError(f"{key}={name}: {why}")
    full_name = f"{cls.__module__}.{name}"
    if old := own_code.older_here([full_name]):
        warn(f"{key}={name}: {', '.join(old)} changed since its import here; the file is trained")
    return full_name


class Interval(str):
    """The values between two numbers, as Hydra's grammar has them; see `interval`."""

    low: float


def interval(low: float, high: float, *, log: bool = False) -> Interval:
    """Return all numbers from `low` to `high` as an axis of a search.

    They are whole where both ends are, and by their logarithm with `log`.

    >>> interval(1e-4, 1.0, log=True)
    'tag(log,interval(0.0001,1.0))'
    >>> interval(16, 256)
    'int(interval(16,256))'
    """
    ends = [each.item() if hasattr(each, "item") else each for each in (low, high)]  # of NumPy
    text = "interval({!r},{!r})".format(*ends)
    if all(isinstance(each, int) for each in ends):
        text = f"int({text})"
    found = Interval(f"tag(log,{text})" if log else text)
    found.low = ends[0]
    return found
