"""Words that a configuration refuses, each with the word to type instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from expt.command.conf_files import groups
from expt.command.grammar import Override, OverrideType
from expt.command.mistakes import unknown_key
from expt.config.constraints import kind, typed
from expt.config.key_types import names_around, takes_list
from expt.config.keys import all_keys, example_of, in_a_shell
from expt.config.kinds import CUSTOM_DATASET_KEYS
from expt.errors import ConfigError

_UNSET = object()
"""The value of a key that nothing sets yet."""


def refuse_no_choice(word: Override) -> None:
    """Raise ConfigError for a group of expt's with neither the name of one choice nor its keys."""
    key, value = word.key_or_group, word.value()
    if key == "hydra":
        raise ConfigError(f"{word.input_line}: has keys of its own, e.g. hydra.run.dir=FOLDER")
    is_name = isinstance(value, str) and word.type == OverrideType.CHANGE
    if key not in groups() or word.package is not None or word.is_delete() or is_name:
        return
    if isinstance(value, dict) and value:
        return
    several = value if isinstance(value, list) else [value]
    names = ",".join(each for each in several if isinstance(each, str)) or "NAME"
    fix = f"{'for a sweep: -m' if ',' in names else 'type'} {key}={names}"
    raise ConfigError(f"{word.input_line}: takes the name of one choice; {fix}")


def refuse_unknown(own: Mapping[str, Any], word: Override, choice: str | None) -> None:
    """Raise ConfigError for a key that the settings lack, or one that the value has below it.

    `choice` is the one of its group; None for a custom class.
    """
    path = word.key_or_group.split(".")
    unknown = _unknown(own, path, word.value())
    if not unknown:
        return
    near, names = list[str](), unknown.split(".")
    if choice is None:
        node, at = _descend(own, names)
        if isinstance(node, dict):  # with the keys next to the first one that there is not
            near += [".".join([*names[:at], str(name), *names[at + 1 :]]) for name in node]
        if path[0] == "dataset":
            near += [f"dataset.{key}" for key in CUSTOM_DATASET_KEYS]
    if re.search(r"\.\d+\.", unknown):  # in an element of a list
        above = ".".join(names[:-1])
        near += [f"{above}.{name}" for name in names_around(names, own)]
    raise ConfigError(unknown_key(str(word.input_line), unknown, choice, near))


def refuse_no_list(own: Mapping[str, Any], word: Override) -> None:
    """Raise ConfigError for one element of a key that has no list, with the value to type."""
    if (found := _element_of_no_list(own, word)) is None:
        return
    path, value = found
    key = ".".join(path)
    one = typed(word.value())
    if takes_list(key) and (value is _UNSET or key in all_keys()):
        one = f"[{one}]"
    if value is _UNSET:
        whole = in_a_shell(f"+{key}={one}")
        why = f"nothing sets {key} yet; write the whole list, {whole}"
    elif key in groups():
        why = f"{key} has one value, {typed(kind(value))}; write {in_a_shell(f'{key}={one}')}"
    else:
        has_keys = any(each.startswith(f"{key}.") for each in all_keys())
        whole = example_of(path) if has_keys else in_a_shell(f"{key}={one}")
        why = f"{key} has one value, {typed(value)}; write {whole}"
    raise ConfigError(f"{word.input_line}: {why}")


def _element_of_no_list(own: Mapping[str, Any], word: Override) -> tuple[list[str], Any] | None:
    """Return the path and the value of a key, if the word sets an element and it takes no list."""
    path = word.key_or_group.split(".")
    value, at = _descend(own, path)
    if word.is_delete() or at in (0, len(path)):
        return None
    is_custom = "_target_" in str(own.get(path[0]))
    if isinstance(value, dict) and is_custom and not path[at].isdecimal():
        element = next((place for place in range(at, len(path)) if path[place].isdecimal()), None)
        return None if element is None else (path[:element], _UNSET)
    key = ".".join(path[:at])
    if not path[at].isdecimal() or isinstance(value, list):  # `with_value` names the whole list
        return None
    if isinstance(value, dict) and key not in groups():
        return None
    if value is None and takes_list(key):
        return None
    return path[:at], value


def refuse_to_delete(own: Mapping[str, Any], word: Override) -> NoReturn:
    """Raise ConfigError for an element that is to be deleted, with the list that is left."""
    path = word.key_or_group.split(".")
    end = list_on(own, word) or 0
    left = [each for at, each in enumerate(_descend(own, path[:end])[0]) if str(at) != path[end]]
    whole = in_a_shell(f"{'.'.join(path[:end])}={typed(left)}")
    raise ConfigError(f"{word.input_line}: is in a list; write the list that is left, e.g. {whole}")


def list_on(own: Mapping[str, Any], word: Override) -> int | None:
    """Return how many parts of the word's key lead to the first list on it; None without one."""
    path = word.key_or_group.split(".")
    ends = range(len(path) + 1)
    return next((at for at in ends if isinstance(_descend(own, path[:at])[0], list)), None)


def _unknown(node: Any, path: Sequence[Any], value: Any) -> str:
    """Return the dotted key that `node` lacks: `path`, or one that `value` has below it."""
    names = [*map(str, path)]  # a mapping may have numbers
    found, at = _descend(node, path)
    if at == len(path):
        if isinstance(found, dict) and isinstance(value, dict):
            for key, below in value.items():
                if unknown := _unknown(found, [key], below):
                    return ".".join([*names, unknown])
        return ""
    is_in_list = isinstance(found, list | None) and names[at].isdecimal()
    if at and (is_in_list or (isinstance(found, list) and found)):
        return ""  # `with_value` names the whole list
    in_schema = ".".join(name for name in names if not name.isdecimal()) in all_keys()
    if at and names[at - 1].isdecimal() and in_schema:
        return ""  # elements may lack keys
    return ".".join(names)


def _descend(node: Any, path: Sequence[Any]) -> tuple[Any, int]:
    """Return the deepest value on a path that is there, and how many of its keys lead there."""
    for at, key in enumerate(path):
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and str(key).isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return node, at
    return node, len(path)
