"""The typed gate: composed YAML in, a frozen dataclass or all problems at once out. Free of torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from expt import redaction, rules
from expt.errors import ConfigError, did_you_mean
from expt.machine import Machine
from expt.schema import DDP, GROUPS, Checkpoint, RunConfig, TensorBoard, kind


def plain(composed: DictConfig, *, sweep: bool = False) -> dict[str, Any]:
    """The composed configuration as plain containers, without Hydra's own part, interpolations resolved.

    Raises MissingMandatoryValue for a `???`. In a sweep on the CPU, runs share the cores: `threads=auto` is one, for
    every launcher, so that their numbers are equal; `tensorboard.images=auto` is as much as the time allows.
    """
    keys = [str(key) for key in composed if key != "hydra"]
    with redaction.environment_read() as read:
        content = OmegaConf.to_container(OmegaConf.masked_copy(composed, keys), resolve=True, throw_on_missing=True)
    assert isinstance(content, dict)
    content["secrets"] = read
    if sweep and content.get("threads") == "auto":
        content["threads"] = 1
    if sweep and isinstance(shown := content.get("tensorboard"), dict) and shown.get("images") == "auto":
        shown["images"] = "spare"
    return {str(key): value for key, value in content.items()}


def parse(composed: Mapping[str, Any], machine: Machine) -> RunConfig:
    """Check `composed` (plain containers, interpolations resolved) and give each `auto` its value on `machine`.

    Raises ConfigError with every problem found: unknown keys, wrong types, values out of range, combinations
    that cannot run.
    """
    node = rules.fill_auto(dict(composed), machine)
    for group in GROUPS:
        node[group] = _untarget(node.get(group), GROUPS[group].get("_target_"))
    return _checked(node, machine)


def parse_elsewhere(hidden: Mapping[str, Any], machine: Machine) -> RunConfig:
    """What `parse` gives for settings whose secrets `expt.redaction.hidden` has taken out, on their way here."""
    node, read = _with_secrets(hidden)
    return parse({**node, "secrets": read}, machine)


def parse_again(shown: Mapping[str, Any], machine: Machine) -> RunConfig:
    """The configuration that `expt.identity.shown` gave for a run. Raises ConfigError where it can't run here now."""
    node, read = _with_secrets(shown)
    return _checked({**node, "secrets": read}, machine)


def _with_secrets(hidden: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    read: dict[str, str] = {}
    node = redaction.restored(hidden, read)
    redaction.remember(read)
    return node, read


def _checked(node: dict[str, Any], machine: Machine) -> RunConfig:
    try:
        # JSON, because pydantic then takes a list for a tuple and is strict all the same.
        config = TypeAdapter(RunConfig).validate_json(json.dumps(node, default=str))
    except ValidationError as error:
        raise ConfigError(_explain(error, node)) from None
    problems = rules.impossible(config, machine)
    if problems:
        raise ConfigError(problems)
    return config


def _untarget(node: Any, cls: Any) -> Any:
    """`{_target_: a.B, x: 1}` as `{name: _target_, target: a.B, kwargs: {x: 1}}`."""
    if cls is None or not isinstance(node, Mapping) or "_target_" not in node:
        return node
    known = {field.name for field in dataclasses.fields(cls)} - {"name", "target", "kwargs"}
    own = {key: value for key, value in node.items() if key in known}
    kwargs = {key: value for key, value in node.items() if key not in known and key not in ("_target_", "name")}
    return {"name": "_target_", "target": node["_target_"], "kwargs": kwargs, **own}


def _explain(error: ValidationError, node: Mapping[str, Any]) -> list[str]:
    """One line for each wrong key: the key, its value, the rule, the nearest valid name."""
    rules_by_key: dict[str, list[str]] = {}
    for problem in error.errors():
        path = _key_path(problem["loc"], node)
        key, value, rule = ".".join(path), problem["input"], problem["type"]
        if rule == "unexpected_keyword_argument":
            line = f"{key}={value!r}: there is no such key.{did_you_mean(path[-1], _keys_beside(path, node))}"
        elif rule == "missing" and isinstance(value, list):
            line = f"{key}={value!r}: input should be longer"
        elif rule in ("missing", "missing_argument"):
            line = f"{key}: has no value; give one, as in {key}=..."
        elif rule.startswith("union_tag"):
            names = [name for name in GROUPS[path[0]] if name != "_target_"]
            line = f"{key}.name={kind(value)}: not one of {', '.join(names)}.{did_you_mean(str(kind(value)), names)}"
        else:
            line = f"{key}={value!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
        rules_by_key.setdefault(key, []).append(line)
    # A key of several types has a line for each type: `gpus` is an integer or a list.
    return [
        first + "".join(" or" + line.partition("input should be")[2] for line in others)
        for first, *others in map(dict.fromkeys, rules_by_key.values())
    ]


def _key_path(loc: tuple[int | str, ...], node: Any) -> list[str]:
    """`loc` without what pydantic adds for the members of a union."""
    path = []
    for part in loc[:-1]:
        found = part in node if isinstance(node, Mapping) else isinstance(node, list) and isinstance(part, int)
        if found:
            path.append(str(part))
            node = node[part]
    last = loc[-1]
    return [*path, str(last)] if isinstance(node, Mapping) and (last in node or not _is_union_tag(last)) else path


def _is_union_tag(part: int | str) -> bool:
    return not str(part).isidentifier() or part in ("bool", "int", "float", "str", "constrained-int")


def _keys_beside(path: list[str], node: Mapping[str, Any]) -> list[str]:
    plain_groups: dict[str, Any] = {"ddp": DDP, "checkpoint": Checkpoint, "tensorboard": TensorBoard}
    cls = RunConfig if len(path) == 1 else plain_groups.get(path[0]) or GROUPS[path[0]][str(kind(node[path[0]]))]
    return [field.name for field in dataclasses.fields(cls)]
