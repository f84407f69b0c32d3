"""From composed YAML to a frozen RunConfig, or all problems at once. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import rebuild_dataclass
from pydantic_core import PydanticSerializationError, to_json

from expt.config import auto, keys, rules, secrets
from expt.config.auto import fill_auto, fill_auto_of_a_sweep
from expt.config.constraints import Target, kind
from expt.config.groups import GROUPS
from expt.config.kinds import TargetMetric
from expt.config.schema import RunConfig
from expt.errors import ConfigError, did_you_mean, refuse_undecoded
from expt.machine import Machine

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pydantic_core import ErrorDetails


def plain(composed: DictConfig, *, sweep: bool = False) -> dict[str, Any]:
    """Return a composed configuration as plain containers, without Hydra's own part.

    Interpolations are resolved. Raises MissingMandatoryValue for a `???`.
    """
    from omegaconf import OmegaConf  # late: a worker composes nothing

    def contained(value: Any) -> Any:  # a copy of all but Hydra's part would take four times
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value

    own = [str(key) for key in composed if key != "hydra"]
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    found = dict(secrets.interpolations({key: unresolved[key] for key in own}))
    secrets.remember(found)  # first, for an error may show them
    content = {key: contained(composed[key]) for key in own}
    secrets.remember(found, content)
    node = {**content, "secrets": found}
    return fill_auto_of_a_sweep(node) if sweep else node


def parse(settings: Mapping[str, Any], machine: Machine, *, measures: bool = False) -> RunConfig:
    """Check settings, as of `plain` or of a record, and give each `auto` its value on `machine`.

    Where the run only `measures`, nothing of training is checked. Raises ConfigError with every
    problem found: unknown keys, wrong types, values out of range, combinations that cannot run.
    """
    config = _typed(_complete(settings, machine))
    if problems := (rules.unmeasurable if measures else rules.impossible)(config, machine):
        raise ConfigError(problems)
    return config


def wrong_values(
    composed: Mapping[str, Any], values: Mapping[str, Iterable[Any]], machine: Machine
) -> list[str]:
    """Return which of the `values` have a wrong type or are out of range, each by itself.

    `composed` has the other settings. Combinations are not checked.
    """
    found = list[str]()
    for key, several in values.items():
        for value in several:
            try:
                _typed(_complete(with_value(composed, key.split("."), value, merge=True), machine))
            except ConfigError as error:
                found += [
                    line for line in error.problems if line.startswith((f"{key}=", f"{key}."))
                ]
    return found


def with_value(settings: Any, path: Sequence[str], value: Any, *, merge: bool = False) -> Any:
    """Return `settings` with another value at `path`; all else is shared.

    With `merge` a mapping changes only the keys that it names, as where it is typed.
    """
    if path and isinstance(settings, list):
        at = int(path[0])
        below = with_value(settings[at], path[1:], value, merge=merge)
        return [*settings[:at], below, *settings[at + 1 :]]
    above = settings if isinstance(settings, Mapping) else {}
    if path:
        return {**above, path[0]: with_value(above.get(path[0]), path[1:], value, merge=merge)}
    if not (merge and isinstance(value, Mapping)):
        return value
    named = {key: with_value(above.get(key), (), each, merge=True) for key, each in value.items()}
    return {**above, **named}


def _complete(composed: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    node = fill_auto(composed, machine)
    for group in GROUPS:
        node[group] = _untarget(node.get(group), GROUPS[group].get("_target_"), GROUPS[group])
    task = node["task"]
    if isinstance(task, Mapping) and isinstance(metrics := task.get("metrics"), Mapping):
        node["task"] = {
            **task,
            "metrics": {name: _untarget(metric, TargetMetric) for name, metric in metrics.items()},
        }
    if isinstance(send := node.get("send", ()), str | None):
        node["send"] = [send] if send else []
    if isinstance(callbacks := node.get("callbacks"), list):
        node["callbacks"] = [_untarget(callback, Target) for callback in callbacks]
    return node


def settings_of(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's record with the values of today's environment."""
    found = dict(secrets.interpolations(shown))
    node = secrets.restored(shown)
    secrets.remember(found, node)
    return {**node, "secrets": found}


def recorded(shown: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run's record, whether it can run here or not."""
    return _typed(settings_of(shown))


def _typed(node: dict[str, Any]) -> RunConfig:
    try:
        # JSON, because pydantic then takes a list for a tuple and is strict all the same.
        return _adapter().validate_json(_as_json(node))
    except ValidationError as error:
        raise ConfigError(explain(error, node)) from None


@functools.cache  # takes 45 ms to make
def _adapter() -> TypeAdapter[RunConfig]:
    rebuild_dataclass(cast(Any, RunConfig))  # or dataclasses.replace makes it once more
    return TypeAdapter(RunConfig)


def _as_json(node: Mapping[str, Any]) -> str | bytes:
    try:
        return to_json(node, fallback=str, inf_nan_mode="constants")  # in a third of the time
    except PydanticSerializationError:
        refuse_undecoded(f"{key}={value}" for key, value in keys.flat(dict(node)).items())
        return json.dumps(node, default=str)


def _untarget(node: Any, cls: Any, members: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return `{_target_: a.B, x: 1}` as `{name: _target_, target: a.B, kwargs: {x: 1}}`.

    A `name` before `_target_` that is one of `members` is the choice that the class replaces; any
    other is an argument.
    """
    if cls is None or not isinstance(node, Mapping) or "_target_" not in node:
        return node
    known = {field.name for field in dataclasses.fields(cls)} - {"name", "target", "kwargs"}
    own = {key: value for key, value in node.items() if key in known}
    kwargs = {key: value for key, value in node.items() if key not in known and key != "_target_"}
    name = node.get("name")
    order = [key for key in node if key in ("name", "_target_")]
    if order == ["name", "_target_"] and isinstance(name, str) and name in members:
        del kwargs["name"]
    return {"name": "_target_", "target": node["_target_"], "kwargs": kwargs, **own}


def as_typed(node: Any) -> Any:
    """Return settings of a record as YAML has them: the reverse of `_untarget`."""
    if isinstance(node, list | tuple):
        return [as_typed(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    found = {key: as_typed(value) for key, value in node.items()}
    if not {"target", "kwargs"} <= found.keys():
        return found
    found.pop("name", None)
    return {"_target_": found.pop("target"), **found.pop("kwargs"), **found}


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
    return [_joined(key, several) for key, several in lines.items()]


def _in_words(problem: ErrorDetails, path: list[str], node: Mapping[str, Any], root: Any) -> str:
    key, rule, value = ".".join(path), problem["type"], problem["input"]
    if isinstance(problem["loc"][-1], int) and path[-1] != str(problem["loc"][-1]):
        value = _value_at(node, path)  # the whole list, not one of its elements
    shown = repr(value) if isinstance(value, float) else keys.typed(value)  # 1.0 is no integer
    if rule == "unexpected_keyword_argument":
        near = did_you_mean(path[-1], keys.names_around(path, node, root))
        if len(path) == 1 and isinstance(value, Mapping):
            begins = "a group's own YAML begins with # @package _global_"
            return f"{key}: there is no such key; {begins}"
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


def _value_at(node: Any, path: list[str]) -> Any:
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
            node = _value_at(node, [str(part)])
    last = str(loc[-1])
    is_key = isinstance(node, Mapping) and (loc[-1] in node or last.isidentifier())
    return [*path, last] if is_key and last not in ("bool", "int", "float", "str") else path
