"""Which of torchvision's datasets go with which task, and what may be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from expt.config.datasets import Torchvision, has_masks
from expt.config.torchvision_sets import OPTIONS, POSITIONS, SEVERAL, options_of, targets_of
from expt.errors import did_you_mean

_GOES_WITH = {
    "classes": ("one class", "class", "classification"),
    "labels": ("labels of 0 and 1", "labels", "multilabel"),
    "numbers": ("numbers to predict", "numbers", "regression"),
}


def of_torchvision(dataset: Torchvision, task: Any) -> list[str]:
    """What does not go together, one line each, with the mend."""
    if problems := _options(dataset):
        return problems
    targets = targets_of(dataset.set, dataset.options)
    has, fits, use = _GOES_WITH[targets]
    counts = dataset.set == "CLEVRClassification" and task.TARGETS == "numbers"
    takes_others = task.TARGETS in {"class", "labels", "numbers"} - {fits}
    if takes_others and not counts and not has_masks(dataset, segments=False):
        other = ", or another target_type in dataset.options" if dataset.set == "CelebA" else ""
        return [
            f"task={task.name}: torchvision's {dataset.set} has {has} for each image; use"
            f" task={use}{other}"
        ]
    if dataset.standardise_targets and (
        task.TARGETS == "mask" or not (targets == "numbers" or counts)
    ):
        return ["dataset.standardise_targets=true: is of numbers to predict; use false"]
    return _moved(dataset)


def _moved(dataset: Torchvision) -> list[str]:
    target = (dataset.options or {}).get("target_type")
    if target not in POSITIONS:
        return []
    moves = {"augment": dataset.augment.is_set, "transforms": bool(dataset.transforms)}
    return [
        f"dataset.{key}: would move images, and not their {target}; leave it out"
        for key, is_set in moves.items()
        if is_set
    ]


def _options(dataset: Torchvision) -> list[str]:
    known = OPTIONS.get(dataset.set, {})
    problems = []
    for key, value in options_of(dataset.set, dataset.options).items():
        if key not in known:
            has = f"it takes {', '.join(known)}" if known else "it takes none"
            problems.append(
                f"dataset.options.{key}: is none of {dataset.set}, {has}.{did_you_mean(key, known)}"
            )
        elif wrong := _wrong(value, known[key], several=(dataset.set, key) in SEVERAL):
            choices = [*map(_typed, known[key])]
            hint = did_you_mean(_typed(wrong[0]), choices)
            problems.append(
                f"dataset.options.{key}={_typed(value)}: not of {', '.join(choices)}.{hint}"
            )
    return problems or _levels(dataset)


def _levels(dataset: Torchvision) -> list[str]:
    """INaturalist of 2021 has other ones than its versions before."""
    if dataset.set != "INaturalist":
        return []
    chosen = options_of(dataset.set, dataset.options)
    level, version = chosen.get("target_type", "full"), chosen.get("version", "2021_train")
    if level == "full" or (level == "super") != version.startswith("2021"):
        return []
    other = "full, or a level as genus" if level == "super" else "full or super"
    return [
        f"dataset.options.target_type={level}: version {version} of INaturalist has none; use"
        f" {other}"
    ]


def _wrong(value: Any, known: Sequence[Any], *, several: bool) -> list[Any]:
    if several != isinstance(value, list) or value == []:
        return [value]
    return [each for each in (value if several else [value]) if each not in known]


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
