"""A class in the place of a group's choice, as in `model={_target_: mine.Net, width: 16}`: no YAML
file is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from expt.command.overrides import parsed
from expt.config.groups import GROUPS

_GROUPS = "|".join(group for group, choices in GROUPS.items() if "_target_" in choices)
_CLASS = re.compile(rf"({_GROUPS})=(\{{.*\}})", re.DOTALL)
_ADDED = re.compile(rf"\+({_GROUPS})=(\{{.*\}})", re.DOTALL)


def is_class(word: str) -> bool:
    """Whether it chooses a class by itself, and not several things to choose from."""
    if not _CLASS.fullmatch(word) or "_target_" not in word:
        return False
    (override,) = parsed([word])
    value = None if override.is_sweep_override() else override.value()
    return isinstance(value, dict) and "_target_" in value


def spelled_out(words: Sequence[str]) -> list[str]:
    """The words as Hydra takes them: the group's choice is left out, and the class put there,
    before what is set of it.

    Of several choices the last counts.
    """
    last = {word.partition("=")[0]: word for word in words if re.match(rf"({_GROUPS})=", word)}
    chosen = {key: word for key, word in last.items() if is_class(word)}
    if not chosen:
        return list(words)
    classes = [part for key, word in chosen.items() for part in (f"~{key}", f"+{word}")]
    return [*classes, *(word for word in words if word.partition("=")[0] not in chosen)]


def folded(words: Sequence[str]) -> list[str]:
    """The words that `spelled_out` was given."""
    added = {
        found[1] for word in words if (found := _ADDED.fullmatch(word)) and "_target_" in found[2]
    }
    left = [
        word
        for word in words
        if not any(re.fullmatch(rf"~{key}(=(null)?)?", word) for key in added)
    ]
    return [
        word.removeprefix("+") if _ADDED.fullmatch(word) and "_target_" in word else word
        for word in left
    ]


def name_of(value: object) -> str:
    """What a group's choice is called: a class in its place as one of a YAML file, with its
    arguments.
    """
    if not isinstance(value, dict):
        return str(value)
    words = (f"{key}={argument}" for key, argument in value.items() if key != "_target_")
    return " ".join([str(value.get("_target_", "")).rpartition(".")[2], *words])
