"""Overrides such as `optimizer.lr=0.1`: how Hydra's grammar reads them, and which of them count."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    FloatRange,
    Glob,
    IntervalSweep,
    Override,
    RangeSweep,
)
from hydra.errors import OverrideParseException

from expt.config.constraints import plain, quoted
from expt.config.groups import GROUPS
from expt.config.keys import takes_text
from expt.config.parse import with_value
from expt.errors import ConfigError, first_line
from expt.runs.overrides import NAMES_A_RUN, is_resume_auto, values_of
from expt.runs.result import Record

__all__ = ["ChoiceSweep", "IntervalSweep", "Override", "RangeSweep"]

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
"""Keys whose value is one text, commas and all."""
TEXTS = ("search.constraints", "search.when", "search.warm_start")
"""Keys outside of the schema whose value is a list of texts."""
NOT_OF_A_TRY = {"fork", "hydra", "resume", "search", "sweep"}
"""Keys, or their first parts, that make no single run from its beginning, or name a folder."""

lock = threading.RLock()
"""Held while Hydra is used: its state, and the resolvers of interpolations, are the process's."""
# A process that another thread forks has Hydra's state whole, and no lock that nobody releases.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


_NESTED = re.compile(r"(?<![^,:\[])\$\{[^{}]*\$\{(?:[^{}]|\$\{[^{}]*\})*\}[^{}]*\}(?=[],}]|$)")
"""An interpolation in an interpolation, which Hydra's grammar takes in quotes."""


def readable(word: str) -> str:
    """Return the word with quotes around each text, by its key, that Hydra would read otherwise.

    So `'dataset.root=my data (old)'` and `hydra.run.dir=lr=0.1` need no second pair of quotes, and
    `~` is the home.
    """
    word = _of_element(word)
    key, equals, value = word.partition("=")
    if ("/" in key or not equals) and os.path.isdir(word):
        raise ConfigError(f"{word}: is a folder, and here are settings, of the form key=value")
    if not equals or not re.fullmatch(r"[+~]*[\w./@:-]+", key):
        return word
    home = os.path.expanduser("~")
    value = re.sub(r"""((?:^|[,[])\s*["']?)~(?=/|["']?\s*([],]|$))""", lambda x: x[1] + home, value)
    if "'" not in value and '"' not in value:
        value = _NESTED.sub(lambda found: quoted(found[0]), value)
    changed, name = f"{key}={value}", key.lstrip("+~")
    if key in FOLDERS and value[:1] not in ("'", '"'):
        return f"{key}={quoted(value)}"
    if not (takes_text(name) or re.sub(r"\.\d+$", "", name) in TEXTS):
        is_nested = value.startswith("${") and not is_readable(changed)  # ${oc.decode:${oc.env:X}}
        return f"{key}={quoted(value)}" if is_nested else changed
    if listed := re.fullmatch(r"\[([^][{}]*)\]", value):
        in_quotes = r"\s*'(?:[^'\\]|\\.)*'|\s*\"(?:[^\"\\]|\\.)*\""
        parts = re.findall(rf"{in_quotes}|[^,]+", listed[1])
    elif re.match(r"['\"[{]|\w+\(.*\)$", value):
        return changed
    else:
        parts = values_of(value) if key in NAMES_A_RUN else re.split(r"(?<!\\),", value)
    texts = ",".join(
        _as_text(part.strip(), of_group=name.partition(".")[0] in GROUPS) for part in parts
    )
    return f"{key}=[{texts}]" if listed else f"{key}={texts}"


def _of_element(word: str) -> str:
    """Return `key.1=x` for `key[1]=x`, also within a second pair of quotes.

    Raises ConfigError for a number below 0.
    """
    if word[:1] in ("'", '"') and re.fullmatch(r"""(["'])([+~]*[\w.\[\]/@-]+=.*)\1""", word):
        word = word[1:-1]
    found = re.fullmatch(r"""(["']?)([+~]*[\w./@-]+(?:\[\s*-?\d+\s*\][\w.]*)+)\1(=.*)?""", word)
    if found is None:
        return word
    if "[-" in found[2]:
        raise ConfigError(f"{word}: elements of a list are counted from 0")
    return re.sub(r"\[\s*(\d+)\s*\]", r".\1", found[2]) + (found[3] or "")


def _as_text(part: str, *, of_group: bool) -> str:
    """Quote a text that Hydra reads as another value, as 2024_01 as 202401, or can't read.

    An integer stays one in a group, where texts may be integers (see Name): a custom class may have
    a parameter of that name, which is a number.
    """
    word = f"key={part}"
    value = parse_one(word).value() if is_readable(word) else None
    if isinstance(value, str) or part == "null" or (of_group and part == str(value)):
        return part
    return quoted(part)


def parse(words: Sequence[str]) -> list[Override]:
    """Read overrides by Hydra's grammar. Raises ConfigError for one that has no reading."""
    return [parse_one(word) for word in words]


def refuse_for_one_run(overrides: Sequence[Override], command: str, unused: Set[str]) -> None:
    """Raise ConfigError for several values, or a key without effect, where a `command` tries a run.

    `unused` are such keys, and the first parts of others.
    """
    for each in overrides:
        key = each.key_or_group
        if each.is_sweep_override():
            raise ConfigError(f"{each.input_line}: {command} is about one run; name one value")
        if {key, re.split("[./]", key)[0]} & unused:
            raise ConfigError(f"{each.input_line}: has no effect on {command}; leave it out")


@functools.lru_cache(maxsize=10_000)  # a word takes 0.5 ms
def parse_one(word: str) -> Override:
    """Read one override; it is shared, so leave it unchanged."""
    with lock:
        try:
            override = _parser().parse_overrides([word])[0]
        except OverrideParseException as error:
            raise ConfigError(f"{word}: {_unreadable(word, error)}") from error
    if isinstance(several := override.value(), ChoiceSweep):
        several.list = [*_elements(word, several)]
    return override


def _elements(word: str, value: Any) -> Iterator[Any]:
    """Yield the values of an axis, also of ranges and choices in it, which Hydra can't list."""
    if isinstance(value, ChoiceSweep):
        for each in value.list:
            yield from _elements(word, each)
    elif isinstance(value, RangeSweep):
        yield from numbers_of(word, value)
    elif isinstance(value, IntervalSweep | Glob):
        raise ConfigError(f"{word}: an interval or glob is an axis by itself; list values instead")
    else:
        yield value


def numbers_of(word: object, sweep: RangeSweep) -> Iterator[float]:
    """Yield the numbers of a range by the decimals that are typed: 0.8, not 0.7999999999999999."""
    if not sweep.step:
        raise ConfigError(f"{word}: a range has a step other than 0")
    if isinstance(found := sweep.range(), range):
        yield from found
    else:
        ends = (sweep.start, sweep.stop, sweep.step)
        yield from FloatRange(*(decimal.Decimal(str(end)) for end in ends))


def words_of(override: Override, options: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the words for each of several values, of a group among its `options`.

    Raises ConfigError where there is none.
    """
    value, key, word = override.value(), override.key_or_group, override.input_line
    if isinstance(value, IntervalSweep):
        raise ConfigError(
            f"{word}: a grid needs a list of values, and an interval has infinitely many; list"
            " some, or add search=tpe"
        )
    if isinstance(value, RangeSweep):
        listed = ChoiceSweep(list=[*numbers_of(word, value)], shuffle=value.shuffle)
        override = dataclasses.replace(override, _value=listed)
    known = value.filter([*options(key)]) if isinstance(value, Glob) else None
    texts = known if known is not None else [*override.sweep_string_iterator()]
    if not texts:
        raise ConfigError(f"{word}: has no value")
    return [f"{override.get_key_element()}={text}" for text in texts]


def _unreadable(word: str, error: Exception) -> str:
    """Return why the grammar has no reading for a word, and how it is written."""
    if ("=" not in word and not word.startswith("~")) or re.match(r"[^=]*\s=", word):
        return "is not of the form key=value; write both in one word, without spaces"
    if error.__cause__:  # of a function
        return f"{' '.join(str(error.__cause__).split())}; quote it if it is a text"
    problem = first_line(error)
    if "<EOF>" in problem:
        return "ends where more is expected: a comma is left over, or a bracket or quote is open"
    if problem.startswith("LexerNoViableAlt"):
        problem = "has a sign that needs quotes"
    return f"{problem}; quote each text in it: \"key=['a (b)',c]\""


def is_readable(word: str) -> bool:
    """Return whether Hydra's grammar has a reading for the override."""
    try:
        parse_one(word)
    except ConfigError:
        return False
    return True


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def key_of(override: Override) -> str:
    """Return its key, or the group with where its choice goes, such as `aug@model.opts`."""
    at = "" if override.package is None else f"@{override.package}"
    return f"{override.key_or_group}{at}"


def replaces(later: Override, earlier: Override) -> bool:
    """Return whether nothing of the earlier override counts; of two mappings both do."""
    if later.is_delete() or earlier.is_delete():
        return False
    below = key_of(earlier).removeprefix(key_of(later))
    if re.match(r"\.\d", below):  # of this list
        return not isinstance(later.value(), dict)
    if below.startswith(".") and later.value() is None:
        return True
    if key_of(later) != key_of(earlier):
        return False
    return not (_names_keys(later) and _names_keys(earlier))


def _names_keys(override: Override) -> bool:
    """Return whether it changes only the keys that it names, unlike a class for a group."""
    value = override.value()
    several = value.list if isinstance(value, ChoiceSweep) else [value]
    is_below = "." in override.key_or_group
    return all(isinstance(each, dict) and (is_below or "_target_" not in each) for each in several)


def last_of_each(words: Sequence[str]) -> list[Override]:
    """Return the overrides that count; where the one before had a `+`, the last has one too."""
    found: list[Override] = []
    for override in parse(words):
        typed = override.get_key_element()
        before = [each for each in found if replaces(override, each)]
        found = [each for each in found if each not in before]
        of_key = (each for each in before if key_of(each) == typed)
        plus = (each.get_key_element().removesuffix(typed) for each in of_key)
        found.append(parse_one(f"{next(plus, '')}{override.input_line}"))
    return found


def as_dict(words: Sequence[str]) -> dict[str, Any]:
    """Return `{"optimizer.lr": 0.1}` for `["optimizer.lr=0.1"]`."""
    found: dict[str, Any] = {}
    for each in last_of_each(words):  # of two mappings both count
        found = with_value(found, [key_of(each)], each.value(), merge=True)
    return found


def about_run(name: str, words: Sequence[str], config: object = None) -> Record:
    """Return the fields of result.json with the name of the run and the words of its command."""
    typed = as_dict([word for word in words if not is_resume_auto(word)])
    overrides = {key: _of_kind(config, key, value) for key, value in typed.items()}
    return {"name": name, "overrides": overrides, "arguments": list(words)}


def _of_kind(config: Any, key: str, value: Any) -> Any:
    """Return 1 as 1.0 where the key has that: typed as 1 or 1.0 it is one setting.

    An interpolation is the value that it gave, unless that may be a secret.
    """
    if isinstance(value, str) and "${" in value and key in getattr(config, "secrets", ()):
        return value
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    if isinstance(value, str) and "${" in value:
        return value if config is None else plain(config)
    return config if type(value) is int and type(config) is float and config == value else value


def with_classes_added(words: Sequence[str]) -> list[str]:
    """Return the words as Hydra takes them: a class in place of a group's choice is added.

    `model={_target_: mine.Net, width: 16}` is `~model` and `+model={...}`.
    """
    chosen = {word.partition("=")[0]: word for word in words if _is_class(word)}
    if not chosen:
        return list(words)
    added = [each for key, word in chosen.items() for each in (f"~{key}", f"+{word}")]
    return [*added, *(word for word in words if word.partition("=")[0] not in chosen)]


def _is_class(word: str) -> bool:
    key, _, value = word.partition("=")
    if key.lstrip("+~") != key or "." in key or value[:1] != "{" or "_target_" not in value:
        return False
    override = parse_one(word)
    return not override.is_sweep_override() and isinstance(override.value(), dict)
