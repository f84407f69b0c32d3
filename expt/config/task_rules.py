"""Which task, data and model go together, and what can be measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expt.config.constraints import Target
from expt.config.groups import Plateau, Transformer, UNet
from expt.config.tasks import in_evaluations_alone, kinds, metrics_of
from expt.errors import did_you_mean

if TYPE_CHECKING:
    from expt.config.schema import EarlyStop, RunConfig


def of_task(config: RunConfig) -> list[str]:
    """Return what does not go with the task, one line each, with the fix."""
    problems = [*of_samples(config), *config.task.problems(config), *_of_classes(config)]
    return [*problems, *_transforms(config), *_objective(config), *_watched(config)]


def of_samples(config: RunConfig) -> list[str]:
    """Return what of that concerns an evaluation too."""
    return [*_task(config), *_of_pixels(config), *_folds(config)]


def _task(config: RunConfig) -> list[str]:
    task, dataset = config.task, config.dataset
    problems: list[str] = dataset.problems(task)
    if task.TARGETS not in {"any", *(kinds()[name].TARGETS for name in dataset.TASKS)}:
        problems = [
            f"task={task.name}: dataset={dataset.name} is of task={' or '.join(dataset.TASKS)}, or"
            " of a custom one"
        ]
    return problems + [
        f"task.metrics.{name}: the task has one of that name; choose another"
        for name in in_evaluations_alone(task)
        if name in {"loss", *getattr(task, "METRICS", ())}
    ]


def _of_classes(config: RunConfig) -> list[str]:
    """Return settings of classes where there are none."""
    settings = {
        "label_smoothing": (config.label_smoothing, 0.0),
        "mixup": (config.mixup, None),
        "cutmix": (config.cutmix, None),
        "dataset.sampling": (config.dataset.sampling, None),
    }
    problems = [
        f"{key}={value}: is of task=classification; use {key}="
        + ("null" if default is None else str(default))
        for key, (value, default) in settings.items()
        if value != default and config.task.TARGETS != "class"
    ]
    if config.cutmix is not None and config.dataset.has_rows:
        problems.append(
            f"cutmix={config.cutmix}: cuts images, and dataset={config.dataset.name} has rows of"
            " numbers; use mixup"
        )
    return problems


def _transforms(config: RunConfig) -> list[str]:
    transforms = getattr(config.dataset, "transforms", None)
    if transforms is None:
        return []
    problems = []
    if not transforms:
        problems.append("dataset.transforms=[]: is empty; use dataset.transforms=null")
    for place, node in enumerate(transforms):
        if "_target_" not in node:
            example = "{_target_: torchvision.transforms.v2.RandomResizedCrop, size: 96}"
            problems.append(
                f"dataset.transforms.{place}: names no class; give its _target_, as in {example}"
            )
        elif str(node["_target_"]).endswith(".Normalize"):
            problems.append(
                f"dataset.transforms.{place}: would normalise training images only; give"
                " dataset.mean and std instead"
            )
    return problems


def _of_pixels(config: RunConfig) -> list[str]:
    """Models of a class for each pixel go with such a task only, and the other way round."""
    model, task = config.model, config.task
    if isinstance(model, UNet) and task.TARGETS not in ("mask", "any"):
        return [
            f"model=unet: gives a class for each pixel, and task={task.name} takes one for a"
            " sample; use model=mlp"
        ]
    if task.TARGETS == "mask" and not isinstance(model, UNet | Target):
        return [
            f"model={model.name}: gives a class for each image; task={task.name} needs model=unet,"
            " or one of your own"
        ]
    return []


def of_tokens(config: RunConfig) -> list[str]:
    """Models for tokens go with data of such only, and the other way round."""
    model, dataset = config.model, config.dataset
    if dataset.has_tokens and not isinstance(model, Transformer | Target):
        return [
            f"model={model.name}: takes images, and dataset=text has tokens; use model=transformer"
        ]
    if isinstance(model, Transformer) and "language_model" not in dataset.TASKS:
        return [
            f"model=transformer: takes tokens, and dataset={dataset.name} has no vocabulary; use"
            " dataset=text"
        ]
    return []


def _folds(config: RunConfig) -> list[str]:
    folds, fold = config.dataset.folds, config.dataset.fold
    if folds is None and fold is not None:
        return [
            f"dataset.fold={fold}: is one of dataset.folds; say how many there are, as in"
            " dataset.folds=5"
        ]
    if folds is not None and fold is None:
        return [
            f"dataset.folds={folds}: say which one validates, as in dataset.fold=0 or -m"
            f" 'dataset.fold=range({folds})'"
        ]
    if folds is not None and fold is not None and fold >= folds:
        return [
            f"dataset.fold={fold}: dataset.folds={folds} are counted from 0; use 0 to {folds - 1}"
        ]
    return []


def _objective(config: RunConfig) -> list[str]:
    problems = []
    dataset = config.dataset
    may_have_val = dataset.folds is not None or dataset.may_have_val
    if config.eval_split == "val" and dataset.val_fraction == 0 and not may_have_val:
        problems.append(
            "dataset.val_fraction=0.0: leaves nothing to evaluate on; use eval_split=test"
        )
    tests = "test" in (config.eval_split, config.objective.partition("/")[2])
    if tests and getattr(dataset, "test_fraction", 1) == 0:
        key = "eval_split=test" if config.eval_split == "test" else f"objective={config.objective}"
        problems.append(
            f"{key}: dataset.test_fraction=0.0 leaves no test set; use dataset.test_fraction=0.2"
        )
    metrics, (metric, _, split) = metrics_of(config.task), config.objective.partition("/")
    tags = _tags(
        config, ["train", "test"] if config.eval_split == "test" else ["train", "val", "test"]
    )
    if metric in metrics and split == "val" and config.eval_split == "test":
        problems.append(
            f"objective={config.objective}: eval_split=test has no val; use objective={metric}/test"
        )
    elif config.objective not in tags:
        hint = did_you_mean(config.objective, tags)
        problems.append(f"objective={config.objective}: not one of {', '.join(tags)}.{hint}")
    return problems


def _tags(config: RunConfig, splits: Sequence[str]) -> list[str]:
    """What is measured of these splits: in training not those that evaluations alone measure."""
    metrics, untrained = metrics_of(config.task), in_evaluations_alone(config.task)
    return [
        f"{name}/{split}"
        for name in metrics
        for split in splits
        if split != "train" or name not in untrained
    ]


def measured_each_epoch(config: RunConfig) -> list[str]:
    """The tags of metrics that a run has after each epoch."""
    return _tags(config, ["train", config.eval_split])


def _watched(config: RunConfig) -> list[str]:
    """What early stopping and a plateau look at must be there after each epoch."""
    watched: dict[str, EarlyStop | Plateau] = {}
    if config.early_stop is not None:
        watched["early_stop"] = config.early_stop
    if isinstance(config.scheduler, Plateau):
        watched["scheduler"] = config.scheduler
    measured = measured_each_epoch(config) if watched else []
    return [
        f"{key}.metric={wanted}: is not measured after each epoch; use one of"
        f" {', '.join(measured)}.{did_you_mean(wanted, measured)}"
        for key, watching in watched.items()
        if (wanted := watching.metric) not in measured
    ]
