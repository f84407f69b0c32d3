"""What is wrong with a configuration, a line for each key: pydantic's findings in words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from expt.config.constraints import kind
from expt.config.datasets import Augment
from expt.config.groups import GROUPS, ParameterGroup
from expt.config.schema import (
    DDP,
    Checkpoint,
    EarlyStop,
    Patches,
    RunConfig,
    TensorBoard,
)
from expt.config.torchvision_sets import INSTEAD, OTHER_SETS
from expt.config.trackers import MLflow, Wandb
from expt.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PLAIN_GROUPS: dict[str, Any] = {
    "ddp": DDP,
    "checkpoint": Checkpoint,
    "tensorboard": TensorBoard,
    "patches": Patches,
}
PLAIN_GROUPS |= {"early_stop": EarlyStop}
PLAIN_GROUPS |= {"mlflow": MLflow, "wandb": Wandb}
"""Keys that have others below them, and no choices."""
NOT_SET = {
    "early_stop": "early_stop={metric: loss/val, patience: 5}",
}
"""Such keys that are null at first, so that those below them must be typed together."""
FEW = 8
"""Values of which all are read at a glance: of more the nearest is told."""
BELOW_A_CHOICE: dict[str, Any] = {"augment": Augment, "groups": ParameterGroup}
"""Keys of a group's choice that have others below them, or a list of such."""
_OF_TEXTS = ("freeze", "dataset.features", "dataset.input", "wandb.tags")
"""Keys that are lists of texts."""
_EXAMPLES = {
    "sharding.wrap": "'sharding.wrap=[\"blocks\\..*\"]'",
    "activation_checkpointing": "'activation_checkpointing=[\"blocks\\..*\"]'",
    "optimizer.betas": "optimizer.betas=[0.9,0.999]",
    "model.paddings": "model.paddings=[same,valid,same]",
}
"""Keys that are lists of what neither whole numbers nor the value that was given may be."""
_MAPPINGS = {
    "task.metrics": "give each metric the way that is better, as in 'task.metrics={near: max}'",
    "dataset.transforms": "give each a class, as in 'dataset.transforms=[{_target_: mine.Noise}]'",
}
"""Keys whose values, or those in their list, have keys of their own."""


def explain(error: ValidationError, node: Mapping[str, Any]) -> list[str]:
    """One line for each wrong key: the key, its value, the rule, the nearest valid name."""
    rules_by_key: dict[str, list[str]] = {}
    for problem in error.errors():
        path = _key_path(problem["loc"], node)
        key, value, rule = ".".join(path), problem["input"], problem["type"]
        if path[0] == "callbacks" and rule != "string_pattern_mismatch":
            index = next((part for part in problem["loc"][1:2] if isinstance(part, int)), None)
            key = "callbacks" if index is None else f"callbacks.{index}"
            shown = node["callbacks"] if index is None else node["callbacks"][index]
            line = (
                f"{key}={shown!r}: give a list of classes of your own, as in"
                " 'callbacks=[{_target_: mine.Watch}]'"
            )
        elif (
            rule == "unexpected_keyword_argument" and len(path) == 1 and isinstance(value, Mapping)
        ):
            what = f"sets {', '.join(map(str, value))} below '{key}'" if value else "is empty"
            line = (
                f"{key}: its YAML {what}; begin it with # @package"
                f" _global_{'' if value else ', and what it sets'}"
            )
        elif rule == "unexpected_keyword_argument":
            near = did_you_mean(path[-1], _keys_beside(path, node))
            is_choice = (
                not near
                and len(path) == 1
                and isinstance(value, str)
                and re.fullmatch(r"[\w-]+", value)
            )
            line = (
                f"{key}={value!r}: there is no such"
                f" key{f'; {own_group(key)}' if is_choice else f'.{near}'}"
            )
        elif key == "objective" and isinstance(value, list):
            line = (
                f"{key}=[{','.join(map(str, value))}]: several are of a search; add -m and"
                " search=nsga2, or give one"
            )
        elif rule == "missing" and isinstance(value, list):
            line = f"{key}={value!r}: input should be longer"
        elif rule in ("missing", "missing_argument"):
            line = f"{key}: has no value; give one, as in {key}=..."
        elif rule.startswith("union_tag") and value is None:
            names = [name for name in GROUPS[path[0]] if name != "_target_"]
            line = (
                f"{key}: is empty; choose one, as in {key}={names[0]}, of {', '.join(names)} and"
                " your own"
            )
        elif rule.startswith("union_tag") and isinstance(value, str):
            line = (
                f"{key}={value}: is text; in YAML a choice stands in 'defaults: [override /{key}:"
                f" {value}]'"
            )
        elif rule.startswith("union_tag") and kind(value) is None:
            own = "_target_" in GROUPS[path[0]]
            line = f"{key}: its YAML names none; add a line to it, as in " + (
                f"_target_: mine.{key.title()}" if own else "name: normal"
            )
        elif rule.startswith("union_tag"):
            names = [name for name in GROUPS[path[0]] if name != "_target_"]
            line = (
                f"{key}.name={kind(value)}: not one of"
                f" {', '.join(names)}.{did_you_mean(str(kind(value)), names)}"
            )
        elif rule == "literal_error" and key == "dataset.set" and value in {*OTHER_SETS, *INSTEAD}:
            line = f"{key}={value}: {_other_set(value)}"
        elif rule == "literal_error" and len(names := _names_in(problem)) > FEW:
            line = f"{key}={value}: not one of {', '.join(names)}.{did_you_mean(str(value), names)}"
        elif rule == "dict_type" and (mend := _MAPPINGS.get(key)):
            line = f"{key}={value!r}: {mend}"
        elif rule == "dataclass_type" and path[0] == "task":
            line = (
                f"{key}={value!r}: input should be of torchmetrics, {{_target_: ..., better: max}}"
            )
        elif rule == "dataclass_type":
            line = f"{key}={value!r}: has keys of its own; {_first_key_set(key, path, problem)}"
        else:
            line = (
                f"{key}={value!r}:"
                f" {_told(problem)}{_as_a_list(key, value) if rule == 'tuple_type' else ''}"
            )
        rules_by_key.setdefault(key, []).append(line)
    for key, (line, *_) in [
        *rules_by_key.items()
    ]:  # what is missing is there, under the wrong name
        if "there is no such key" in line and (meant := re.search(r"Did you mean '(\w+)'", line)):
            missing = f"{key.rpartition('.')[0]}.{meant[1]}"
            if "has no value" in rules_by_key.get(missing, [""])[0]:
                del rules_by_key[missing]
    return [_joined(lines) for lines in rules_by_key.values()]


def own_group(group: str) -> str:
    """What to do where a name may be that of a group of a person's own."""
    return (
        f"a group of your own has its YAML in conf/{group} here, or in FOLDER/{group} with"
        " --config-dir FOLDER"
    )


def _joined(lines: list[str]) -> str:
    """The lines of one key: one of several types has a line for each, as `gpus` is an integer or a
    list.
    """
    first, *others = lines
    kinds = dict.fromkeys(line.partition("input should be")[2] for line in others)
    return first + "".join(
        f" or{kind}" for kind in kinds if kind and not first.endswith(f"input should be{kind}")
    )


def _told(problem: ErrorDetails) -> str:
    """Pydantic's words, but for those that are not YAML's."""
    if problem["type"] == "too_long":
        return f"input should have at most {problem['ctx']['max_length']} values"
    text = (
        problem["msg"]
        .replace("a valid array", "a list")
        .replace("a valid boolean", "true or false")
    )
    return text[0].lower() + text[1:]


def _other_set(name: str) -> str:
    """What to do with one of torchvision's datasets that is not read by its name."""
    if name in INSTEAD:
        return f"use {INSTEAD[name]}"
    return (
        f"has {OTHER_SETS[name]}, of which no task here makes a loss; give it as a dataset of your"
        " own with a method collate, and a task of your own (docs/own.md)"
    )


def _names_in(problem: ErrorDetails) -> list[str]:
    """The values that a key may have."""
    return re.findall(r"'([^']+)'", problem["ctx"]["expected"])


def _as_a_list(key: str, value: object) -> str:
    if cls := BELOW_A_CHOICE.get(key.rpartition(".")[2]):
        return f", as in {key}=[{{{dataclasses.fields(cls)[0].name}: ...}}]"
    if key in _EXAMPLES:
        return f", as in {_EXAMPLES[key]}"
    if key in _OF_TEXTS:
        return f", as in '{key}=[\"{value}\"]'"
    example = (
        f"{value},{value}"
        if isinstance(value, int | float) and value > 0 and value is not True
        else "1,2"
    )
    return f", as in {key}=[{example}]"


def _first_key_set(key: str, path: list[str], problem: ErrorDetails) -> str:
    if key in NOT_SET:
        return f"set them together, as in '{NOT_SET[key]}'"
    first = dataclasses.fields(BELOW_A_CHOICE.get(path[-1]) or PLAIN_GROUPS[path[0]])[0].name
    in_a_list = isinstance(problem["loc"][-1], int)
    return (
        f"set one, as in {key}=[{{{first}: ...}}]"
        if in_a_list
        else f"set one, as in {key}.{first}=..."
    )


def _key_path(loc: tuple[int | str, ...], node: Any) -> list[str]:
    """`loc` without what pydantic adds for the members of a union."""
    path = []
    for part in loc[:-1]:
        found = (
            part in node
            if isinstance(node, Mapping)
            else isinstance(node, list) and isinstance(part, int)
        )
        if found:
            path.append(str(part))
            node = node[part]
    last = loc[-1]
    return (
        [*path, str(last)]
        if isinstance(node, Mapping) and (last in node or not _is_union_tag(last))
        else path
    )


def _is_union_tag(part: int | str) -> bool:
    return not str(part).isidentifier() or part in (
        "bool",
        "int",
        "float",
        "str",
        "constrained-int",
    )


def _keys_beside(path: list[str], node: Mapping[str, Any]) -> list[str]:
    above = next((part for part in reversed(path[1:-1]) if not part.isdigit()), "")
    cls = RunConfig if len(path) == 1 else PLAIN_GROUPS.get(path[0]) or BELOW_A_CHOICE.get(above)
    return [
        field.name for field in dataclasses.fields(cls or GROUPS[path[0]][str(kind(node[path[0]]))])
    ]
