"""The problems of a configuration in the words of YAML: pydantic's, by key, each with its fix."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from expt import registry
from expt.config import auto, keys
from expt.config.constraints import kind, typed
from expt.config.groups import GROUPS, OWN
from expt.config.keys import names_around, takes_null
from expt.config.schema import RunConfig
from expt.errors import did_you_mean, nearest

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_INSTEAD = {"a valid array": "a list", "a valid boolean": "true or false", "an object": "a mapping"}
"""YAML's words for pydantic's."""
_SHOULD_BE = "input should be "
"""The beginning of pydantic's words for a value of another type, or out of range."""
_MISSING = ("missing", "missing_argument")
"""pydantic's rules of a key that is not there."""
_NULLS = ("none", "null", "~", "")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _Line(NamedTuple):
    """A problem of pydantic's in the words of YAML."""

    text: str
    """The key, its value, and the problem."""
    rule: str
    """pydantic's name of the rule that the value breaks, such as int_type."""
    value: Any
    """The value of the key; of a list with a wrong element the whole list."""
    wanted: str = ""
    """The values that the rule takes, such as "a valid integer"; "" if it names none."""
    of_element: bool = False


def explain(
    error: ValidationError,
    node: Mapping[str, Any],
    root: Any = RunConfig,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return a line for each wrong key: the key, its value, the rule, the nearest valid name.

    `texts` are the interpolations that gave values, such as `${oc.env:LR}`, by key.
    """
    found: dict[str, list[_Line]] = {}
    for problem in error.errors():
        path = _key_path(problem["loc"], node)
        if path[-1] == "kwargs":  # of a class without _target_, which is reported too
            continue
        lines = found.setdefault(".".join(path), [])
        line = _in_words(problem, path, node, root)
        lines.insert(0 if line.rule == "value_error" else len(lines), line)
    return [_joined(key, lines) + _fix(key, lines, texts.get(key)) for key, lines in found.items()]


def _in_words(problem: ErrorDetails, path: list[str], node: Mapping[str, Any], root: Any) -> _Line:
    key, rule, value, last = ".".join(path), problem["type"], problem["input"], problem["loc"][-1]
    of_element = isinstance(last, int)
    if of_element and path[-1] != str(last):
        value = keys.value_at(node, path)
    # 1.0 is no integer.
    shown = repr(value) if isinstance(value, float) else typed(value, text=str)
    if rule == "unexpected_keyword_argument":
        return _Line(_of_unknown_key(path, value, shown, node, root), rule, value)
    if rule in _MISSING and not isinstance(value, list):
        return _Line(_of_missing(path), rule, value)
    if rule.startswith("union_tag"):
        return _Line(_of_choice(path, value), rule, value)
    if rule == "dataclass_type":
        text = f"{key}={shown}: has keys of its own, e.g. {keys.example_of(path)}"
        return _Line(text, rule, value)
    text = _pydantic_s(problem)
    if rule in ("dict_type", "tuple_type", *_MISSING):
        text += f", e.g. {keys.example_of(path)}"
    _, _, wanted = text.partition(_SHOULD_BE)
    return _Line(f"{key}={shown}: {text}", rule, value, wanted, of_element)


def _of_unknown_key(
    path: list[str], value: Any, shown: str, node: Mapping[str, Any], root: Any
) -> str:
    key = ".".join(path)
    above, _, last = path[-1].partition("[")[0].rpartition(".")
    if above:
        return f"{key}={shown}: a key of YAML is one name; write {last} below {above}"
    near = "".join(f" Did you mean '{each}'?" for each in _near(path, node, root))
    if len(path) > 1 or not isinstance(value, Mapping):
        return f"{key}={shown}: there is no such key.{near}"
    fix = "YAML of experiments, or of a group of your own, begins with # @package _global_"
    return f"{key}: there is no such key.{near} {fix}"


def _near(path: list[str], node: Mapping[str, Any], root: Any) -> list[str]:
    """Return the key that an unknown one may stand for, such as `optimizer.lr` for `lr`."""
    below = [each for each in keys.all_keys() if each.endswith(f".{'.'.join(path)}")]
    # few mean the keys of trackers, or of an optimizer for some parameters
    below.sort(key=lambda each: (each.split(".")[0] in registry.trackers(), each.count(".")))
    return below[:1] or nearest(path[-1], {*names_around(path, node, root)} - {path[-1]})


def _of_missing(path: list[str]) -> str:
    key = re.sub(r"\btarget$", "_target_", ".".join(path))
    is_set_alone = len(path) == 1 or path[0] in GROUPS or ".".join(path[:-1]) in keys.holders()
    example = f"{key}=..." if is_set_alone else keys.example_of(path[:-1])
    return f"{key}: has no value; give one, e.g. {example}"


def _of_choice(path: list[str], value: Any) -> str:
    key, members = ".".join(path), (GROUPS if len(path) == 1 else OWN)[path[-1]]
    names = [name for name in members if name != "_target_"]
    chosen = kind(value) if isinstance(value, Mapping) else value
    if chosen is None:
        return f"{key}: names none of {', '.join(names)}; its YAML needs a name: or a _target_:"
    if chosen in names and not isinstance(value, Mapping):
        if len(path) > 1:
            return f"{key}={chosen}: has keys of its own; write {{name: {chosen}}}"
        fix = f"write - override /{key}: {chosen} in its defaults"
        return f"{key}={chosen}: chooses a YAML file; {fix}"
    near = did_you_mean(str(chosen), names)
    return f"{key}.name={chosen}: not one of {', '.join(names)}.{near}"


def _pydantic_s(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Value error, ")
    for theirs, ours in _INSTEAD.items():
        text = text.replace(theirs, ours)
    return text[0].lower() + text[1:]


def _joined(key: str, lines: Sequence[_Line]) -> str:
    """Return the lines of one key as one: each member of a union has its own."""
    first, *others = lines
    if not first.wanted:
        return first.text
    more = dict.fromkeys(line.wanted for line in others if line.wanted not in ("", first.wanted))
    text = " or ".join([first.text, *more])
    return f"{text}, or auto" if key in auto.KEYS else text


def _fix(key: str, lines: Sequence[_Line], text: str | None) -> str:
    """Return the interpolation that a value of another type came from, and how it is written."""
    value = lines[0].value
    if not lines[0].wanted:
        return ""
    wanted = {line.rule.partition("_")[0] for line in lines}
    written = _as_wanted(key, value, wanted)
    if text is not None:
        came = f"; it came from {text}"
        is_resolved = re.search(r"\$\{[\w.]+:", text) and "oc.decode:" not in text
        if not is_resolved or not isinstance(value, str):
            return came
        if written is None and value[:1] not in ("[", "{"):
            return came  # as a number, it would be as wrong
        also = f", with {written} in place of {value}" if written not in (None, value) else ""
        return f"{came}, and is a text; write '{key}=\"${{oc.decode:{text}}}\"'{also}"
    if isinstance(value, list):
        if "tuple" in wanted or any(line.of_element for line in lines):
            texts = [each for each in value if isinstance(each, str)]
            return f"; {texts[0]!r} is a text" if texts else ""
        may_be_texts = not wanted <= {"bool", "int", "float"}
        are_meant = (each is None or _meant(each, wanted) is not None for each in value)
        values = ",".join(map(typed, value))
        fix = f"; a list is one value; for a run of each write -m {key}={values}"
        return fix if may_be_texts or all(are_meant) else ""
    why = f"; {value!r} is a text" if isinstance(value, str) else ""
    if written is None:
        return why if value and str(value)[0] in "[{" else ""
    return f"{why}; write {key}={written}"


def _key_path(loc: tuple[int | str, ...], node: Any) -> list[str]:
    """Return `loc` without the parts that pydantic adds for the members of a union."""
    path: list[str] = []
    for part in loc[:-1]:
        is_there = part in node if isinstance(node, Mapping) else isinstance(part, int)
        if is_there and isinstance(node, Mapping | list):
            path.append(str(part))
            node = keys.value_at(node, [str(part)])
    last = str(loc[-1])
    if not isinstance(node, Mapping):
        return path
    is_type = not last.isidentifier() or last in ("bool", "int", "float", "str")
    return path if is_type and last not in map(str, node) else [*path, last]


def _meant(value: Any, wanted: Set[str]) -> float | bool | None:
    """Return a value of a wanted type that is written like this one, or None.

    `wanted` are the types by which pydantic names its rules, such as bool, int, float and tuple.
    """
    if isinstance(value, bool):
        return value if "bool" in wanted else None
    if isinstance(value, str) and "bool" in wanted and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    if "int" not in wanted and "float" not in wanted:
        return None
    try:
        number = float(value) if isinstance(value, str | float | int) else math.nan
    except ValueError:
        return None
    if math.isfinite(number) and number == int(number):
        return int(number)
    return number if math.isfinite(number) and "float" in wanted else None


def _as_wanted(key: str, value: Any, wanted: Set[str]) -> str | None:
    """Return `_meant` as it is typed, or null where the key takes that; None for neither."""
    if str(value).lower() in _NULLS and takes_null(key):
        return "null"
    found = _meant(value, wanted)
    return None if found is None else typed(found)
