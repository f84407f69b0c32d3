"""From composed YAML to a frozen RunConfig, or all problems at once. Free of torch."""

from __future__ import annotations

import contextlib
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

from expt.config import keys, rules, secrets
from expt.config.auto import fill_auto, fill_auto_of_a_sweep
from expt.config.constraints import Target, typed
from expt.config.explained import TYPED, Origin, explain
from expt.config.groups import GROUPS
from expt.config.key_types import may_be_text
from expt.config.kinds import TargetMetric
from expt.config.schema import RunConfig
from expt.errors import ConfigError, counted, refuse_undecoded
from expt.machine import Machine

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Settings(dict[str, Any]):
    """Settings as plain containers, without Hydra's own part."""

    origin: Origin = TYPED


def plain(composed: DictConfig, *, sweep: bool = False) -> Settings:
    """Return the settings of a composed configuration, interpolations resolved.

    Raises MissingMandatoryValue for a `???`.
    """
    from omegaconf import OmegaConf  # late: a worker composes nothing

    def contained(value: Any) -> Any:  # a copy of all but Hydra's part would take four times
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value

    own = [str(key) for key in composed if key != "hydra"]
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    leaves = dict(secrets.leaves({key: unresolved[key] for key in own}))
    texts = {key: text for key, text in leaves.items() if isinstance(text, str) and "${" in text}
    of_environment = dict(secrets.interpolations(texts))
    found = {
        key: text
        for key, text in of_environment.items()
        if may_be_text(key) or f"{key.partition('.')[0]}._target_" in leaves
    }
    secrets.remember(found)  # first, for an error may show them
    content = {key: contained(composed[key]) for key in own}
    secrets.remember(found, content)
    node = {**content, "secrets": found}
    if texts and (following := _following(composed, texts)):
        node["following"] = following
    settings = Settings(fill_auto_of_a_sweep(node) if sweep else node)
    settings.origin = Origin(texts)
    return settings


def _following(composed: DictConfig, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the interpolations whose values another seed or fold would change."""
    from omegaconf import OmegaConf, flag_override

    def values() -> dict[str, Any]:
        return {key: _value(composed, key) for key in texts}

    repeated = {key: OmegaConf.select(composed, key) for key in keys.varying("repetition")}
    repeated = {key: value for key, value in repeated.items() if isinstance(value, int)}
    found = values()
    with flag_override(composed, ["struct", "readonly"], [False, False]):
        try:
            for key, value in repeated.items():
                OmegaConf.update(composed, key, value + 1)
            others = values()
        finally:
            for key, value in repeated.items():
                OmegaConf.update(composed, key, texts.get(key, value))
    moved = {key for key in texts if others[key] != found[key]} - repeated.keys()
    return {key: texts[key] for key in texts if key in moved}


def _value(composed: DictConfig, key: str) -> Any:
    """Return the value of a key, as its text; None for one that has none with this seed."""
    from omegaconf import OmegaConf

    with contextlib.suppress(Exception):  # of a custom resolver, too
        return str(OmegaConf.select(composed, key))
    return None


def parse(settings: Mapping[str, Any], machine: Machine, *, measures: bool = False) -> RunConfig:
    """Check settings, as of `plain` or of a record, and give each `auto` its value on `machine`.

    Where the run only `measures`, nothing of training is checked. Raises ConfigError with every
    problem found: unknown keys, wrong types, values out of range, combinations that cannot run.
    """
    config = _typed(_complete(settings, machine), getattr(settings, "origin", TYPED))
    if problems := (rules.unmeasurable if measures else rules.impossible)(config, machine):
        raise ConfigError(problems)
    return config


def wrong_values(
    composed: Mapping[str, Any], values: Mapping[str, Iterable[Any]], machine: Machine
) -> list[str]:
    """Return which of the `values` have a wrong type or are out of range, each by itself.

    `composed` has the other settings. Combinations are not checked.
    """
    found, origin = list[str](), getattr(composed, "origin", TYPED)
    for key, several in values.items():
        of_list = re.sub(r"(\.\d+)+$", "", key)  # an element is shown with its whole list
        for value in several:
            try:
                node = with_value(composed, key.split("."), value, merge=True)
                _typed(_complete(node, machine), origin)
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
    whole = keys.in_a_shell(f"{key}={typed([*known, value])}")
    return f"{word}: {key} {has}; write the whole list, e.g. {whole}"


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
    return _typed(settings_of(shown, trains=False))


def _typed(node: dict[str, Any], origin: Origin = TYPED) -> RunConfig:
    try:
        # JSON, because pydantic then takes a list for a tuple and is strict all the same.
        return _adapter().validate_json(_as_json(node))
    except ValidationError as error:
        raise ConfigError(explain(error, node, origin=origin)) from None


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
