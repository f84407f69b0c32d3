"""One line for each wrong key of a configuration: pydantic's findings, in YAML's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from expt.config import keys
from expt.config.constraints import kind
from expt.config.groups import GROUPS
from expt.config.schema import RunConfig
from expt.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FEW = 8
"""Values that are all listed; of more only the nearest is named."""
_INSTEAD = {"a valid array": "a list", "a valid boolean": "true or false", "an object": "a mapping"}
"""YAML's words for pydantic's."""


def explain(error: ValidationError, node: Mapping[str, Any], root: Any = RunConfig) -> list[str]:
    """Return a line for each wrong key: the key, its value, the rule, the nearest valid name."""
    lines: dict[str, list[str]] = {}
    for problem in error.errors():
        path = _key_path(problem["loc"], node)
        if path[-1] == "kwargs":  # of a class without _target_, which is reported too
            continue
        text = _in_words(problem, path, node, root)
        of_key = lines.setdefault(".".join(path), [])
        of_key.insert(0 if problem["type"] == "value_error" else len(of_key), text)
        if "there is no such key" in text and (meant := re.search(r"Did you mean '(\w+)'", text)):
            lines.pop(".".join([*path[:-1], meant[1]]), None)  # is missing under its right name
    return [_joined(several) for several in lines.values()]


def _in_words(problem: ErrorDetails, path: list[str], node: Mapping[str, Any], root: Any) -> str:
    key, rule, value = ".".join(path), problem["type"], problem["input"]
    if isinstance(problem["loc"][-1], int) and path[-1] != str(problem["loc"][-1]):
        value = _value_at(node, path)  # the whole list, not one of its elements
    if rule == "unexpected_keyword_argument":
        near = did_you_mean(path[-1], keys.names_beside(path, node, root))
        if len(path) == 1 and isinstance(value, Mapping):
            return (
                f"{key}: there is no such key; a group's own YAML begins with # @package _global_"
            )
        return f"{key}={value!r}: there is no such key.{near}"
    if rule in ("missing", "missing_argument") and not isinstance(value, list):
        key = re.sub(r"\btarget$", "_target_", key)
        return f"{key}: has no value; give one, as in {key}=..."
    if rule.startswith("union_tag"):
        names = [name for name in GROUPS[path[0]] if name != "_target_"]
        chosen = kind(value) if isinstance(value, Mapping) else value
        if chosen is None:
            return f"{key}: names none of {', '.join(names)}; its YAML needs a name: or a _target_:"
        return (
            f"{key}.name={chosen}: not one of {', '.join(names)}.{did_you_mean(str(chosen), names)}"
        )
    if rule == "literal_error":
        names = re.findall(r"'([^']+)'", problem["ctx"]["expected"])
        if len(names) > FEW:
            return f"{key}={value}: not one of {', '.join(names)}.{did_you_mean(str(value), names)}"
    if rule in ("dict_type", "dataclass_type", "tuple_type"):
        example = keys.example_of(path)
        if rule == "dataclass_type":
            return f"{key}={value!r}: has keys of its own, as in {example}"
        return f"{key}={value!r}: {_pydantic_s(problem)}, as in {example}"
    return f"{key}={value!r}: {_pydantic_s(problem)}"


def _pydantic_s(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Value error, ")
    for theirs, ours in _INSTEAD.items():
        text = text.replace(theirs, ours)
    return text[0].lower() + text[1:]


def _joined(lines: list[str]) -> str:
    """Return the lines of one key as one: each member of a union has its own."""
    first, *others = lines
    if "input should be" not in first:
        return first
    kinds = dict.fromkeys(line.partition("input should be")[2] for line in others)
    return first + "".join(
        f" or{kind}" for kind in kinds if kind and not first.endswith(f"input should be{kind}")
    )


def own_group(group: str) -> str:
    """Return where the YAML of a custom group belongs."""
    return (
        f"a group of your own has its YAML in conf/{group} here, or in FOLDER/{group} with"
        " --config-dir FOLDER"
    )


def _value_at(node: Any, path: list[str]) -> Any:
    for part in path:
        node = node[int(part) if isinstance(node, list) else part]
    return node


def _key_path(loc: tuple[int | str, ...], node: Any) -> list[str]:
    """Return `loc` without what pydantic adds for the members of a union."""
    path: list[str] = []
    for part in loc[:-1]:
        is_there = part in node if isinstance(node, Mapping) else isinstance(part, int)
        if is_there and isinstance(node, Mapping | list):
            path.append(str(part))
            node = _value_at(node, [str(part)])
    last = str(loc[-1])
    is_key = isinstance(node, Mapping) and (loc[-1] in node or last.isidentifier())
    return [*path, last] if is_key and last not in ("bool", "int", "float", "str") else path
