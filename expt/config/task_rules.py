"""Which task, data and model go together, and what can be measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expt.config import mask_rules, torchvision_rules
from expt.config.constraints import Target
from expt.config.datasets import (
    Diabetes,
    HuggingFace,
    ImageFolder,
    Images,
    SegmentationFolder,
    Table,
    TargetDataset,
    Text,
    Torchvision,
    has_rows,
)
from expt.config.groups import Plateau, Transformer, UNet
from expt.config.tasks import Targets, in_evaluations_alone, kinds, metrics_of
from expt.errors import did_you_mean

if TYPE_CHECKING:
    from expt.config.schema import EarlyStop, RunConfig

_ANY: tuple[Targets, ...] = ("class", "labels", "numbers", "mask", "tokens")
_WORDS: dict[Targets, str] = {
    "class": "one class for each sample",
    "labels": "labels of 0 and 1",
    "numbers": "numbers to predict",
    "mask": "masks",
    "tokens": "tokens",
}


def targets_of(dataset: Any) -> Sequence[Targets]:
    """Return what a dataset may have for targets."""
    if isinstance(dataset, TargetDataset):
        return _ANY
    if isinstance(dataset, Torchvision | HuggingFace):
        return ("class", "labels", "numbers", "mask")
    if isinstance(dataset, Table):
        return ("class", "labels", "numbers")
    if isinstance(dataset, Diabetes):
        return ("numbers",)
    if isinstance(dataset, SegmentationFolder):
        return ("mask",)
    return ("tokens",) if isinstance(dataset, Text) else ("class",)


def of_task(config: RunConfig) -> list[str]:
    """Return what does not go with the task, one line each, with the fix."""
    problems = [*of_samples(config), *config.task.problems(config), *_of_classes(config)]
    return [*problems, *_transforms(config), *_objective(config), *_watched(config)]


def of_samples(config: RunConfig) -> list[str]:
    """Return what of that concerns an evaluation too."""
    return [*_targets(config), *_metrics(config), *_of_pixels(config), *_folds(config)]


def _targets(config: RunConfig) -> list[str]:
    """Return why the task can't be trained on the dataset."""
    task, dataset = config.task, config.dataset
    if task.TARGETS not in (*targets_of(dataset), "any"):
        fits = [
            name
            for name, kind in kinds().items()
            if kind.TARGETS in targets_of(dataset) and name != "_target_"
        ]
        has = " or ".join(_WORDS[kind] for kind in targets_of(dataset))
        return [
            f"task={task.name}: dataset={dataset.name} has {has}; use task={' or '.join(fits)}, or"
            " another dataset"
        ]
    if isinstance(dataset, TargetDataset):
        problems = _of_own(dataset, task)
    elif isinstance(dataset, Table | HuggingFace):
        problems = _of_columns(dataset, task)
    else:
        problems = []
    problems += mask_rules.of_masks(dataset, task)
    if isinstance(dataset, Torchvision):
        problems += torchvision_rules.of_torchvision(dataset, task)
    return problems


def _of_own(dataset: TargetDataset, task: Any) -> list[str]:
    if task.TARGETS == "class" and dataset.num_classes is None:
        return [f"dataset.num_classes: task={task.name} needs it, as in dataset.num_classes=10"]
    if task.TARGETS in ("labels", "numbers", "tokens") and dataset.num_classes is not None:
        return [
            f"dataset.num_classes={dataset.num_classes}: task={task.name} takes no classes; leave"
            " it out of the dataset"
        ]
    return []


def _of_columns(dataset: Table | HuggingFace, task: Any) -> list[str]:
    key = "targets" if isinstance(dataset, Table) else "target"
    targets, problems = getattr(dataset, key), []
    rows = has_rows(dataset)
    if task.TARGETS == "class" and not isinstance(targets, str) and len(targets) > 1:
        problems.append(
            f"task={task.name}: dataset.{key} names {len(targets)} columns, and a class is one;"
            " name one, or use task=multilabel or task=regression"
        )
    predicts = task.TARGETS == "numbers" or (
        isinstance(dataset, HuggingFace) and rows and task.TARGETS != "class"
    )
    if dataset.standardise_targets and task.TARGETS in _ANY and not predicts:
        problems.append("dataset.standardise_targets=true: is of numbers to predict; use false")
    if isinstance(dataset, HuggingFace) and rows and dataset.image_size:
        problems.append(
            f"dataset.image_size={list(dataset.image_size)}: dataset.input names columns of"
            " numbers; use null"
        )
    return problems


def _metrics(config: RunConfig) -> list[str]:
    return [
        f"task.metrics.{name}: the task has one of that name; choose another"
        for name in in_evaluations_alone(config.task)
        if name in {"loss", *getattr(config.task, "METRICS", ())}
    ]


def _of_classes(config: RunConfig) -> list[str]:
    """Return settings of classes where there are none."""
    problems, dataset = [], config.dataset
    settings = {
        "label_smoothing": (config.label_smoothing, 0.0),
        "mixup": (config.mixup, None),
        "cutmix": (config.cutmix, None),
        "dataset.sampling": (dataset.sampling, None),
    }
    for key, (value, default) in settings.items():
        if value != default and config.task.TARGETS != "class":
            default_word = "null" if default is None else default
            problems.append(f"{key}={value}: is of task=classification; use {key}={default_word}")
    if config.cutmix is not None and has_rows(dataset):
        problems.append(
            f"cutmix={config.cutmix}: cuts images, and dataset={dataset.name} has rows of numbers;"
            " use mixup"
        )
    return problems


def _transforms(config: RunConfig) -> list[str]:
    dataset = config.dataset
    if not isinstance(dataset, Images) or dataset.transforms is None:
        return []
    problems = []
    if not dataset.transforms:
        problems.append("dataset.transforms=[]: is empty; use dataset.transforms=null")
    for place, node in enumerate(dataset.transforms):
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
    if has_rows(dataset):
        problems.append(
            "dataset.transforms: are of images, and dataset.input names columns of numbers; leave"
            " them out"
        )
    if isinstance(dataset, ImageFolder) and dataset.cache is True:
        problems.append(
            "dataset.cache=true: dataset.transforms read each image as it lies; use cache=auto"
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
    if isinstance(dataset, Text) and not isinstance(model, Transformer | Target):
        return [
            f"model={model.name}: takes images, and dataset=text has tokens; use model=transformer"
        ]
    if isinstance(model, Transformer) and not isinstance(dataset, Text | TargetDataset):
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
    # Folds, or a folder of its own, which the workers look for.
    has_own = config.dataset.name in ("image_folder", "segmentation_folder")
    may_have_val = config.dataset.folds is not None or has_own
    if config.eval_split == "val" and config.dataset.val_fraction == 0 and not may_have_val:
        problems.append(
            "dataset.val_fraction=0.0: leaves nothing to evaluate on; use eval_split=test"
        )
    problems += _text(config)
    tests = "test" in (config.eval_split, config.objective.partition("/")[2])
    if tests and isinstance(config.dataset, Table | Diabetes) and config.dataset.test_fraction == 0:
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


def _text(config: RunConfig) -> list[str]:
    dataset = config.dataset
    if not isinstance(dataset, Text):
        return []
    if dataset.val_fraction + dataset.test_fraction >= 1:
        val, test = dataset.val_fraction, dataset.test_fraction
        return [
            f"dataset.val_fraction={val}: with dataset.test_fraction={test} it leaves nothing to"
            " train on; use less"
        ]
    if dataset.tokens != "bytes" and not dataset.tokens.endswith(".json"):
        return [
            f"dataset.tokens={dataset.tokens}: is neither bytes nor a tokenizer's .json; use"
            " dataset.tokens=bytes"
        ]
    if dataset.test_fraction == 0 and "test" in (
        config.eval_split,
        config.objective.partition("/")[2],
    ):
        return [
            "dataset.test_fraction=0.0: leaves nothing to test on; use eval_split=val"
            " objective=auto"
        ]
    return []
