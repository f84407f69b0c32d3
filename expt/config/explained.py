"""The problems of a configuration in the words of YAML: pydantic's, by key, each with its fix."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.config import auto, keys
from expt.config.constraints import kind
from expt.config.groups import GROUPS
from expt.config.schema import RunConfig
from expt.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

FEW = 8
"""Values that are all listed; of more only the nearest is named."""
_INSTEAD = {"a valid array": "a list", "a valid boolean": "true or false", "an object": "a mapping"}
"""YAML's words for pydantic's."""


def _nowhere(key: str) -> None:
    """Return None: no file sets the key."""


class Origin(NamedTuple):
    """The places that settings came from."""

    texts: Mapping[str, str] = {}
    """The interpolations that gave values, such as `${oc.env:LR}`, by key."""
    yaml: Callable[[str], tuple[str, str] | None] = _nowhere
    """Return the custom file that sets a key, and the key as it stands there; None if none does."""

    def fix(self, key: str, value: str) -> str:
        """Return how a value is written where the key stands."""
        if (place := self.yaml(key)) is None:
            quotes = ("'", '"') if "${" in value else ("", "")
            return f"write {quotes[0]}{key}={quotes[1]}{value}{quotes[1]}{quotes[0]}"
        return f"write {place[1]}: {value} in {place[0]}"

    def several(self, key: str, values: str) -> str:
        """Return how several values of a key are written."""
        if (place := self.yaml(key)) is None:
            return f"for a run of each write -m {key}={values}"
        if place[1] == key:
            return f"for a run of each write {key}: {values} in {place[0]}"
        params = f"{key}: {values} below hydra.sweeper.params in {place[0]}"
        return f"for a run of each type -m {key}={values}, or write {params}"


TYPED = Origin()


def explain(
    error: ValidationError, node: Mapping[str, Any], root: Any = RunConfig, origin: Origin = TYPED
) -> list[str]:
    """Return a line for each wrong key: the key, its value, the rule, the nearest valid name."""
    lines: dict[str, list[str]] = {}
    lists = set[str]()
    for problem in error.errors():
        path = _key_path(problem["loc"], node)
        if path[-1] == "kwargs":  # of a class without _target_, which is reported too
            continue
        text = _in_words(problem, path, node, root)
        if isinstance(problem["loc"][-1], int):  # a wrong element of a list that is right
            lists.add(".".join(path))
        of_key = lines.setdefault(".".join(path), [])
        of_key.insert(0 if problem["type"] == "value_error" else len(of_key), text)
        if "there is no such key" in text and (meant := re.search(r"Did you mean '(\w+)'", text)):
            lines.pop(".".join([*path[:-1], meant[1]]), None)  # is missing under its right name
    return [
        f"{(line := _joined(key, several))}{_fix(key, line, node, origin, lists)}"
        for key, several in lines.items()
    ]


def _in_words(problem: ErrorDetails, path: list[str], node: Mapping[str, Any], root: Any) -> str:
    key, rule, value = ".".join(path), problem["type"], problem["input"]
    if isinstance(problem["loc"][-1], int) and path[-1] != str(problem["loc"][-1]):
        value = value_at(node, path)  # the whole list, not one of its elements
    shown = repr(value) if isinstance(value, float) else keys.typed(value)  # 1.0 is no integer
    if rule == "unexpected_keyword_argument":
        if whole := _as_nested(path, value, node):
            return f"{key}={shown}: a key of YAML is one name; write {whole}"
        near = did_you_mean(path[-1], keys.names_around(path, node, root))
        if below := [each for each in keys.all_keys() if each.endswith(f".{key}")]:
            near = f" Did you mean '{below[0]}'?"  # lr: optimizer.lr
        if len(path) == 1 and isinstance(value, Mapping):
            begins = near or "; a group's own YAML begins with # @package _global_"
            return f"{key}: there is no such key{'.' * bool(near)}{begins}"
        return f"{key}={shown}: there is no such key.{near}"
    if rule in ("missing", "missing_argument") and not isinstance(value, list):
        key = re.sub(r"\btarget$", "_target_", key)
        is_set_alone = len(path) == 1 or path[0] in GROUPS or ".".join(path[:-1]) in keys.holders()
        example = f"{key}=..." if is_set_alone else keys.example_of(path[:-1])
        return f"{key}: has no value; give one, e.g. {example}"
    if rule.startswith("union_tag"):
        names = [name for name in GROUPS[path[0]] if name != "_target_"]
        chosen = kind(value) if isinstance(value, Mapping) else value
        if chosen is None:
            return f"{key}: names none of {', '.join(names)}; its YAML needs a name: or a _target_:"
        if chosen in names and not isinstance(value, Mapping):
            fix = f"write - override /{key}: {chosen} in its defaults"
            return f"{key}={chosen}: chooses a YAML file; {fix}"
        near = did_you_mean(str(chosen), names)
        return f"{key}.name={chosen}: not one of {', '.join(names)}.{near}"
    if rule == "literal_error":
        names = re.findall(r"'([^']+)'", problem["ctx"]["expected"])
        if len(names) > FEW:
            return f"{key}={value}: not one of {', '.join(names)}.{did_you_mean(str(value), names)}"
    if rule in ("dict_type", "dataclass_type", "tuple_type"):
        example = keys.example_of(path)
        if rule == "dataclass_type":
            return f"{key}={shown}: has keys of its own, e.g. {example}"
        return f"{key}={shown}: {_pydantic_s(problem)}, e.g. {example}"
    return f"{key}={shown}: {_pydantic_s(problem)}"


def _as_nested(path: list[str], value: Any, node: Mapping[str, Any]) -> str:
    """Return how a dotted key, or an element of a list, is written in YAML; "" for other keys."""
    *above, last = path
    names = re.sub(r"\[\s*(\d+)\s*\]", r".\1", last).split(".")
    if len(names) == 1 or not all(re.fullmatch(r"\w+", name) for name in names):
        return ""
    known: Any = value_at(node, above)
    for at, name in enumerate(names):
        if isinstance(known, list) and name.isdecimal() and int(name) < len(known):
            value, names = [*known[: int(name)], value, *known[int(name) + 1 :]], names[:at]
            break
        known = known.get(name) if isinstance(known, Mapping) else None
    text = keys.typed(value)
    for name in reversed(names[1:]):
        text = f"{{{name}: {text}}}"
    return f"{names[0]}: {text}"


def _pydantic_s(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Value error, ")
    for theirs, ours in _INSTEAD.items():
        text = text.replace(theirs, ours)
    return text[0].lower() + text[1:]


def _joined(key: str, lines: list[str]) -> str:
    """Return the lines of one key as one: each member of a union has its own."""
    first, *others = lines
    if "input should be" not in first:
        return first
    kinds = dict.fromkeys(line.partition("input should be")[2] for line in others)
    more = [f" or{kind}" for kind in kinds if kind and not first.endswith(f"input should be{kind}")]
    return first + "".join(more) + ", or auto" * (key in auto.KEYS)


_NULLS = ("None", "none", "null", "NULL", "Null", "~", "")
_RESOLVER = r"\$\{(?=[\w.]+:)"
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _fix(
    key: str, line: str, node: Mapping[str, Any], origin: Origin, lists: Collection[str]
) -> str:
    """Return where a value of another type came from, and how it is written.

    `lists` are keys of lists with a wrong element.
    """
    if "input should be" not in line:
        return ""
    value, text = value_at(node, key.split(".")), origin.texts.get(key)
    is_resolved = re.search(_RESOLVER, str(text)) and "oc.decode:" not in str(text)
    if text is not None and not (isinstance(value, str) and is_resolved):
        return f"; it came from {text}"
    kind_of = "variables are texts" if "oc.env:" in str(text) else "is a text"
    came = f"it came from {text}, and {kind_of}; " if text else ""
    what = came or f"{value!r} is a text; " * isinstance(value, str)
    if several := _several(value, line, of_lists=key in lists):
        return f"; {what or 'a list is one value; '}{origin.several(key, ','.join(several))}"
    if isinstance(value, list):
        right = [each if (meant := _meant(each, line)) is None else meant for each in value]
        return f"; {origin.fix(key, keys.typed(right))}" if right != value else ""
    if isinstance(value, str) and (variable := re.fullmatch(r"\$\{?(\w+)\}?", value)):
        decoded = f"${{oc.decode:${{oc.env:{variable[1]}}}}}"
        return f"; {origin.fix(key, decoded)} for that variable"
    is_null = value in _NULLS and keys.takes_null(key)
    meant = None if is_null else _meant(value, line)
    written = "null" if is_null else keys.typed(meant)
    if text is None:
        return f"; {what}{origin.fix(key, written)}" if is_null or meant is not None else ""
    if not is_null and meant is None and value[:1] not in ("[", "{"):
        return f"; it came from {text}"  # as a number, it would be as wrong
    decoded = f"{re.sub(_RESOLVER, '${oc.decode:${', text, count=1)}}}"
    also = f", with {written} in place of {value}" * (meant is not None and written != value)
    return f"; {came}{origin.fix(key, decoded)}{also}"


def _several(value: Any, line: str, *, of_lists: bool) -> list[str]:
    """Return the values, each for a run of its own, that a list or a text with commas holds."""
    if isinstance(value, str) and "a list" not in line:
        values = [_meant(each.strip(), line) for each in value.strip("[]").split(",")]
        return [*map(keys.typed, values)] if len(values) > 1 and None not in values else []
    if not isinstance(value, list) or "a list" in line:
        return []
    if of_lists:
        return [*map(keys.typed, value)] if all(isinstance(each, list) for each in value) else []
    inside = (_several(each, line, of_lists=False) if isinstance(each, list) else [keys.typed(each)]
              for each in value)  # fmt: skip
    return [each for below in inside for each in below]


def _meant(value: Any, line: str) -> float | bool | None:
    """Return a value of the wanted type that is written like this one, or None."""
    if isinstance(value, str) and "true or false" in line and value.lower() in WORDS:
        return WORDS[value.lower()]
    if "a valid integer" not in line and "a valid number" not in line:
        return None
    try:
        if isinstance(value, str) and re.match(r"[-+]?0[xob]", value, re.IGNORECASE):
            return int(value, 0)
        number = float(value) if isinstance(value, str | float) else math.nan
    except ValueError:
        return None
    if math.isfinite(number) and number == int(number):
        return int(number)
    return number if math.isfinite(number) and "a valid number" in line else None


def value_at(node: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys and of numbers of elements."""
    for part in path:
        node = node[int(part) if isinstance(node, list) else part]
    return node


def _key_path(loc: tuple[int | str, ...], node: Any) -> list[str]:
    """Return `loc` without the parts that pydantic adds for the members of a union."""
    path: list[str] = []
    for part in loc[:-1]:
        is_there = part in node if isinstance(node, Mapping) else isinstance(part, int)
        if is_there and isinstance(node, Mapping | list):
            path.append(str(part))
            node = value_at(node, [str(part)])
    last = str(loc[-1])
    is_key = isinstance(node, Mapping) and (last in map(str, node) or last.isidentifier())
    return [*path, last] if is_key and last not in ("bool", "int", "float", "str") else path
