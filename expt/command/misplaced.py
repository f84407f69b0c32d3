"""Ranges, intervals and choices that stand among other values, or inside of one: what to type
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    RangeSweep,
    Sweep,
)

from expt.command.overrides import is_readable, parsed
from expt.errors import ConfigError


def within_a_value(error: BaseException, overrides: Sequence[str]) -> str:
    """Of a range, say, among the values of a key, or inside of one: OmegaConf cannot hold it."""
    if "Unexpected type annotation" not in f"{error} {error.__cause__}":
        return ""
    for word in filter(is_readable, overrides):
        for override in _with_conditional(*parsed([word])):
            if found := _misplaced(override.value()):
                return f"{word}: {_moved(override.key_or_group, *found)}"
    return (
        "a range, an interval or a choice stands among other values, in a list or in a mapping;"
        " type each value"
    )


def refuse_numbers(word: str) -> None:
    """Raise ConfigError where a group has a range or an interval, by itself or among other values."""
    value = parsed([word])[0].value() if is_readable(word) else None
    for each in value.list if isinstance(value, ChoiceSweep) else [value]:
        if isinstance(each, IntervalSweep | RangeSweep):
            raise ConfigError(has_a_name(word))


def has_a_name(word: str) -> str:
    """What to say of a group's word that has such numbers."""
    key = word.partition("=")[0]
    group = key.lstrip("+").partition("@")[0]
    article = "an" if group[:1] in "aeio" else "a"
    return f"{word}: {article} {group} has a name, and no number; give several, as in {key}=A,B"


def _with_conditional(override: Override) -> Iterator[Override]:
    """The word itself; of search.when those that are given there."""
    yield override
    if override.key_or_group == "search.when" and isinstance(texts := override.value(), list):
        yield from parsed(
            [word for text in texts if is_readable(word := str(text).partition(":")[2].strip())]
        )


def _moved(key: str, what: str, where: str) -> str:
    mends = {
        "among other values": f"type each value, as in {key}=A,B,C, or {what}(...) alone",
        "in a list": f"name whole ones, as in {key}=[32],[64]",
        "in a mapping": f"give the key in it, as in {key}.KEY=...",
    }
    return f"{what}(...) can't stand {where}; {mends[where]}"


def _misplaced(value: object, where: str = "") -> tuple[str, str] | None:
    """What makes several values, and is but a part of a value, and `where` it is that; None where
    there is nothing.
    """
    if where and isinstance(value, Sweep | Glob):
        return _name_of(value), where
    parts, place = list[object](), where
    if isinstance(value, ChoiceSweep):
        parts, place = list(value.list), "among other values"
    elif isinstance(value, list):
        parts, place = value, "in a list"
    elif isinstance(value, dict):
        parts, place = [*value.values()], "in a mapping"
    return next(filter(None, (_misplaced(part, place) for part in parts)), None)


def _name_of(value: Sweep | Glob) -> str:
    """The function that was typed for it."""
    if isinstance(value, ChoiceSweep) and value.simple_form:
        return "shuffle" if value.shuffle else "sort"
    return type(value).__name__.removesuffix("Sweep").lower()
