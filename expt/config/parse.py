"""From composed YAML to a frozen RunConfig, or all problems at once. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import rebuild_dataclass
from pydantic_core import PydanticSerializationError, to_json

from expt.config import conf_dir, keys, read_yaml, rules, secrets
from expt.config.auto import fill_auto
from expt.config.constraints import Target, in_a_shell, names_of, typed
from expt.config.explained import explain
from expt.config.groups import GROUPS, OWN
from expt.config.kinds import TargetMetric
from expt.config.schema import RunConfig
from expt.errors import ConfigError, counted, refuse_undecoded
from expt.machine import Machine


class Settings(dict[str, Any]):
    """Settings as plain containers, without Hydra's own part."""

    texts: Mapping[str, str] = MappingProxyType({})
    """The interpolations that gave values, such as `${oc.env:LR}`, by key."""


def parse(
    settings: Mapping[str, Any],
    machine: Machine | None,
    *,
    problems_of: Callable[[RunConfig, Machine], list[str]] | None = rules.impossible,
) -> RunConfig:
    """Check settings, as composed or of a record, and give each `auto` its value on `machine`.

    A record has such values already, and needs no machine. `problems_of` returns the combinations
    that cannot run. Raises ConfigError with every problem found: unknown keys, wrong types, values
    out of range, or else those combinations.
    """
    node = _as_in_schema(fill_auto(settings, machine) if machine else settings)
    try:
        # JSON, because pydantic then takes a list for a tuple and is strict all the same.
        config = _adapter().validate_json(_as_json(node))
    except ValidationError as error:
        texts = getattr(settings, "texts", Settings.texts)
        raise ConfigError(explain(error, node, texts=texts)) from None
    if machine and problems_of and (problems := problems_of(config, machine)):
        raise ConfigError(problems)
    return config


def _as_in_schema(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with custom classes, and the short forms of YAML, as the schema has them."""
    node = dict(settings)
    for group, members in GROUPS.items():
        node[group] = _untarget(node.get(group), members.get("_target_"), members)
    if isinstance(send := node.get("send", ()), str | None):
        node["send"] = [send] if send else []
    if isinstance(callbacks := node.get("callbacks"), list):
        node["callbacks"] = [_untarget(callback, Target) for callback in callbacks]
    task, optimizer = (
        x if isinstance(x, Mapping) else {} for x in (node["task"], node["optimizer"])
    )
    if isinstance(metrics := task.get("metrics"), Mapping):
        custom = {name: _untarget(metric, TargetMetric) for name, metric in metrics.items()}
        node["task"] = {**task, "metrics": custom}
    if isinstance(optimizer, Mapping) and isinstance(own := optimizer.get("groups"), list):
        node["optimizer"] = {**optimizer, "groups": [*map(_whole_group, own)]}
    return node


def wrong_values(
    composed: Mapping[str, Any], values: Mapping[str, Iterable[Any]], machine: Machine
) -> list[str]:
    """Return which of the `values` have a wrong type or are out of range, each by itself.

    `composed` has the other settings. Combinations are not checked.
    """
    found = list[str]()
    for key, several in values.items():
        of_list = re.sub(r"(\.\d+)+$", "", key)  # an element is shown with its whole list
        for value in several:
            try:
                node = Settings(with_value(composed, key.split("."), value, merge=True))
                node.texts = getattr(composed, "texts", Settings.texts)
                parse(node, machine, problems_of=None)
            except ConfigError as error:
                begins = (f"{key}=", f"{key}.", f"{of_list}=")
                found += [line for line in error.problems if line.startswith(begins)]
    return found


def with_value(
    settings: Any, path: Sequence[str], value: Any, *, merge: bool = False, holder: str = ""
) -> Any:
    """Return `settings`, which the key `holder` has, with another value at `path`.

    All else is shared. With `merge` a mapping changes only the keys that it names, as where it is
    typed. Raises ConfigError for an element that a list lacks.
    """
    known = [*settings] if isinstance(settings, list) else []
    is_element = isinstance(settings, list) or (settings is None and holder)
    if path and is_element and (path[0].isdecimal() or known):
        if not (path[0].isdecimal() and int(path[0]) < len(known)):
            raise ConfigError(_no_element(holder, known, path, value))
        at, key = int(path[0]), f"{holder}.{path[0]}"
        known[at] = with_value(known[at], path[1:], value, merge=merge, holder=key)
        return known
    above = settings if isinstance(settings, Mapping) else {}
    if path:
        key = ".".join(filter(None, (holder, path[0])))
        below = with_value(above.get(path[0]), path[1:], value, merge=merge, holder=key)
        return {**above, path[0]: below}
    if not (merge and isinstance(value, Mapping)):
        return value
    named = {key: with_value(above.get(key), (), each, merge=True) for key, each in value.items()}
    return {**above, **named}


def _no_element(key: str, known: list[Any], path: Sequence[str], value: Any) -> str:
    """Return the error for an element that the list of `key` lacks, with the whole list to type."""
    word = f"{key}.{'.'.join(path)}={typed(value)}"
    for name in reversed(path[1:]):
        value = {name: value}
    has = f"has {counted(len(known), 'element')}, counted from 0" if known else "is empty"
    whole = in_a_shell(f"{key}={typed([*known, value])}")
    return f"{word}: {key} {has}; write the whole list, e.g. {whole}"


def settings_of(shown: Mapping[str, Any], *, trains: bool = True) -> dict[str, Any]:
    """Return the settings of a run's record with the values of today's environment.

    Raises ConfigError where a variable is not set, unless the run `trains` no further.
    """
    found = dict(secrets.interpolations(shown))
    node = {key: value for key, value in shown.items() if key != "following"}
    node = secrets.restored(node, all_of_them=trains)
    secrets.remember(found, node)
    return {**node, "secrets": found, "following": shown.get("following", {})}


def recorded(shown: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run's record, whether it can run here or not."""
    return parse(settings_of(shown, trains=False), None)


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


def _whole_group(node: Any) -> Any:
    """Return a group of parameters; its own optimizer and schedule get the defaults of conf/."""
    if not isinstance(node, Mapping):
        return node
    own = {key: _untarget(node[key], Target) for key in node.keys() & OWN.keys()}
    for key, one in own.items():
        name = str(one.get("name")) if isinstance(one, Mapping) else ""
        if name in OWN[key].keys() - {"_target_"}:
            known = _choice(key, name)
            own[key] = {each: known[each] for each in names_of(OWN[key][name])} | {**one}
    return {**node, **own}


def _choice(group: str, name: str) -> dict[str, Any]:
    """Return the settings of one of expt's choices, with those of the choices below it."""
    node: dict[str, Any] = read_yaml(conf_dir() / group / f"{name}.yaml")
    above = (_choice(group, base) for base in node.get("defaults", ()) if base != "_self_")
    return functools.reduce(operator.or_, above, {}) | node


def as_typed(node: Any) -> Any:
    """Return settings of a record as YAML has them: the reverse of `_untarget`."""
    if isinstance(node, list | tuple):
        return [as_typed(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    if node.get("name") != "_target_":
        return {key: as_typed(value) for key, value in node.items()}
    others = {key: value for key, value in node.items() if key not in ("name", "target", "kwargs")}
    return {"_target_": node["target"], **node["kwargs"], **as_typed(others)}
