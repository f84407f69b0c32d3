"""Keyword arguments as the words of a command: `optimizer={"lr": 0.1}` as `optimizer.lr=0.1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expt.command.words import Exact
from expt.config.groups import GROUPS
from expt.config.keys import holders
from expt.errors import ConfigError
from expt.python.interval import Interval
from expt.python.values import as_setting, text_of

OF_CLASSES = {group for group, choices in GROUPS.items() if "_target_" in choices}
"""Groups whose choice may be a person's own class."""
_LISTS_OF_CLASSES = ("callbacks", "dataset.transforms")


def words_of(
    arguments: Sequence[str | Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    sweep: bool = False,
) -> list[str]:
    """The words for what expt.run or expt.sweep is called with.

    Raises ConfigError for what cannot be said in words.
    """
    words = list[str]()
    for argument in arguments:
        if isinstance(argument, str):
            words.append(argument)
        elif isinstance(argument, Mapping):
            words += [
                word
                for key, value in argument.items()
                for word in _Setting(str(key), sweep).words(value)
            ]
        else:
            raise ConfigError(f"{argument!r}: give KEY=VALUE as a text, or by name, as in epochs=3")
    return words + [
        word for key, value in settings.items() for word in _Setting(key, sweep).words(value)
    ]


def folder_word(folder: str | Path | None, *, sweep: bool) -> list[str]:
    """The word that chooses the folder, if one is given; of a sweep `latest` too."""
    key = f"hydra.{'sweep' if sweep else 'run'}.dir"
    if sweep and folder == "latest":
        return [f"{key}=latest"]
    return [] if folder is None else [Exact(f"{key}={text_of('folder', folder)}")]


class _Setting:
    """One key, dotted, and how its value becomes words."""

    def __init__(self, key: str, sweep: bool) -> None:
        self._key, self._sweep = key, sweep
        group, _, below = key.partition(".")
        self._is_group = not below and group in GROUPS
        self._is_open = self._is_group or key in holders() or group == "hydra"

    def words(self, value: Any) -> Iterator[str]:
        """One or several for `value`; the choice of a group comes before what is set of it."""
        value = as_setting(value, self._key, self._key) if self._may_be_class else value
        if isinstance(value, Interval):
            if not self._sweep:
                raise ConfigError(
                    f"{self._key}={value}: many values make a search; use expt.sweep with"
                    " search=..."
                )
            yield Exact(f"{self._key}={value}")
        elif self._key == "search":
            yield from _of_search(value)
        elif self._sweep and (axis := _axis(self._key, value)) is not None:
            yield self._word(axis, ",".join(map(self._text, axis)))
        elif self._key == "task.metrics" and isinstance(value, Mapping):
            for name, metric in value.items():
                yield Exact(
                    f"++task.metrics.{name}={text_of(f'{self._key}.{name}', as_setting(metric, name, None))}"
                )
        elif isinstance(value, Mapping) and self._is_open:
            yield from self._below(value)
        else:
            yield self._word([value], self._text(value))

    @property
    def _may_be_class(self) -> bool:
        return self._key in OF_CLASSES

    def _word(self, values: Sequence[Any], text: str) -> str:
        if self._is_group:
            self._refuse_no_choice(values)
        return Exact(f"{self._key}={text}")

    def _refuse_no_choice(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, list | tuple) and not self._sweep:
                raise ConfigError(
                    f"{self._key}={value!r}: several values make a sweep; use expt.sweep"
                )
            if isinstance(value, Mapping) and "_target_" not in value:
                one = f"{self._key}={{'name': ..., 'key': [...]}}"
                raise ConfigError(
                    f"{self._key}={value!r}: an axis has names and classes; sweep a key of one as"
                    f" in {one}"
                )
            if not isinstance(value, str | Mapping) and not (
                self._may_be_class and hasattr(value, "__name__")
            ):
                self._text(value)  # says what an instance is
                names = [name for name in GROUPS[self._key] if name != "_target_"]
                raise ConfigError(f"{self._key}={value!r}: not one of {', '.join(names)}.")

    def _below(self, values: Mapping[str, Any]) -> Iterator[str]:
        target = values.get("_target_")
        if self._is_group and target is not None:
            yield from self._class(values)
            return
        if self._is_group and "name" in values:
            yield from _Setting(self._key, self._sweep).words(values["name"])
        for name, value in values.items():
            if not (self._is_group and name == "name"):
                yield from _Setting(f"{self._key}.{name}", self._sweep).words(value)

    def _class(self, values: Mapping[str, Any]) -> Iterator[str]:
        """The class with its arguments; of one that is an axis the first value, and the axis by
        itself.
        """
        axes = {}
        if self._sweep:
            axes = {
                name: axis
                for name, value in values.items()
                if (axis := _axis(f"{self._key}.{name}", value))
            }
        first = {**values, **{name: axis[0] for name, axis in axes.items()}}
        yield Exact(f"{self._key}={self._text(first)}")
        for name, axis in axes.items():
            yield from _Setting(f"{self._key}.{name}", sweep=True).words(axis)

    def _text(self, value: Any) -> str:
        if self._may_be_class:
            value = as_setting(value, self._key, self._key)
            if isinstance(value, Mapping) and isinstance(value.get("_target_"), type):
                value = {**value, **as_setting(value["_target_"], self._key, self._key)}
            return text_of(self._key, value)
        if self._key in _LISTS_OF_CLASSES and value is not None:
            if not isinstance(value, list | tuple):
                axis = "; in a sweep a list is an axis" if self._sweep else ""
                one = getattr(value, "__name__", "...")
                raise ConfigError(
                    f"{self._key}={one}: several may be given{axis}; give a tuple, as in ({one},)"
                )
            group = self._key if self._key == "callbacks" else None
            value = [as_setting(each, f"{self._key}[{at}]", group) for at, each in enumerate(value)]
        return text_of(self._key, value)


def _of_search(value: Any) -> Iterator[str]:
    """The words of a sampler's name, or of a dict of its `name` and keys, in which a list is no
    axis.
    """
    settings = value if isinstance(value, Mapping) else {"name": value}
    if "name" not in settings:
        raise ConfigError(
            f"search={value!r}: names no sampler; give one, as in search={{'name': 'tpe', 'runs':"
            " 64}"
        )
    yield Exact(f"search={text_of('search', settings['name'])}")
    for name, setting in settings.items():
        if name == "when" and isinstance(setting, Mapping):
            several = {
                key: [words] if isinstance(words, str) else words for key, words in setting.items()
            }
            setting = [f"{key}: {word}" for key, words in several.items() for word in words]
        if name != "name":
            yield Exact(f"search.{name}={text_of(f'search.{name}', setting)}")


def _axis(key: str, value: Any) -> list[Any] | None:
    """The values of an axis of a sweep: those of a list, a range or an array; None where `value` is
    one value.

    A tuple is one value. Raises ConfigError for an axis without values.
    """
    if not isinstance(value, list | range):
        if (
            isinstance(value, type)
            or not callable(getattr(value, "tolist", None))
            or getattr(value, "ndim", 1) == 0
        ):
            return None
        value = value.tolist()
    if not value:
        raise ConfigError(
            f"{key}={list(value)!r}: an axis of a sweep needs values; one value that is empty is ()"
        )
    return list(value)
