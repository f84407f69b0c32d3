"""Which task, data and model go together, and what can be measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from expt.config.tasks import (
    Classification,
    LanguageModel,
    Multilabel,
    Regression,
    Segmentation,
    TargetTask,
    in_evaluations_alone,
    metrics_of,
)
from expt.errors import did_you_mean

if TYPE_CHECKING:
    from expt.config.schema import EarlyStop, RunConfig

TASK_DATASETS: dict[str, tuple[type, ...]] = {
    "multilabel": (TargetDataset, Table, HuggingFace, Torchvision),
    "regression": (TargetDataset, Table, Diabetes, HuggingFace, Torchvision),
    "language_model": (Text, TargetDataset),
    "segmentation": (SegmentationFolder, TargetDataset, Torchvision, HuggingFace),
}
"""What each task but classification can be trained on."""
_TARGETS = {
    "table": "columns of numbers or classes; use task=regression, multilabel or classification",
    "diabetes": "one number to predict; use task=regression",
}


def of_task(config: RunConfig) -> list[str]:
    """What does not go with the task, one line each, with the mend."""
    problems = [
        *_task(config),
        *_of_pixels(config),
        *_classes(config),
        *_mixed(config),
        *_folds(config),
    ]
    return [*problems, *_objective(config), *_watched(config)]


def of_samples(config: RunConfig) -> list[str]:
    """What of that concerns an evaluation too."""
    return [*_task(config), *_of_pixels(config), *_folds(config)]


def _mixed(config: RunConfig) -> list[str]:
    """What is done to training samples alone."""
    problems, dataset = [], config.dataset
    for key in ("mixup", "cutmix"):
        alpha = getattr(config, key)
        if alpha is not None and not isinstance(config.task, Classification):
            problems.append(f"{key}={alpha}: is of task=classification; use {key}=null")
    if config.cutmix is not None and has_rows(dataset):
        problems.append(
            f"cutmix={config.cutmix}: cuts images, and dataset={dataset.name} has rows of numbers;"
            " use mixup"
        )
    if not isinstance(dataset, Images) or dataset.transforms is None:
        return problems
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
                f"dataset.transforms.{place}: would normalise training images alone; give"
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


def _classes(config: RunConfig) -> list[str]:
    """What evens out classes, where there are any, once."""
    task, sampling = config.task, config.dataset.sampling
    if not isinstance(task, Classification):
        return (
            [f"dataset.sampling={sampling}: is of task=classification; use dataset.sampling=null"]
            if sampling
            else []
        )
    if isinstance(task.class_weights, tuple) and not any(task.class_weights):
        return [
            "task.class_weights: all are 0, which leaves nothing to train on; give a class a weight"
        ]
    if sampling and task.class_weights == "balanced":
        return [
            f"task.class_weights=balanced: dataset.sampling={sampling} evens the classes out too;"
            " use one of them"
        ]
    return []


def _of_pixels(config: RunConfig) -> list[str]:
    """Models of a class for each pixel with such a task alone, and the other way round."""
    model, task = config.model, config.task
    if isinstance(model, UNet) and not isinstance(task, Segmentation | TargetTask):
        return [
            f"model=unet: gives a class for each pixel, and task={task.name} takes one for a"
            " sample; use model=mlp"
        ]
    if isinstance(task, Segmentation) and not isinstance(model, UNet | Target):
        return [
            f"model={model.name}: gives a class for each image; task=segmentation needs model=unet,"
            " or one of your own"
        ]
    return []


def of_tokens(config: RunConfig) -> list[str]:
    """Models for tokens with data of such alone, and the other way round."""
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


def _task(config: RunConfig) -> list[str]:
    problems, task, dataset = [], config.task, config.dataset
    has_classes = getattr(dataset, "num_classes", 1) is not None
    if isinstance(task, Classification) and not has_classes:
        problems.append(
            "dataset.num_classes: task=classification needs it, as in dataset.num_classes=10"
        )
    if (
        isinstance(dataset, TargetDataset)
        and isinstance(task, Multilabel | Regression | LanguageModel)
        and has_classes
    ):
        problems.append(
            f"dataset.num_classes={dataset.num_classes}: task={task.name} takes no classes; leave"
            " it out of the dataset"
        )
    if isinstance(task, Classification) and isinstance(dataset, Diabetes):
        problems.append(
            "task=classification: dataset=diabetes has a number to predict, no class; use"
            " task=regression"
        )
    key = "target" if isinstance(dataset, HuggingFace) else "targets"
    targets = getattr(dataset, key) if isinstance(dataset, Table | HuggingFace) else ""
    if isinstance(dataset, HuggingFace):
        problems += _rows_or_images(dataset, task)
    if isinstance(task, Classification) and not isinstance(targets, str) and len(targets) > 1:
        problems.append(
            f"task=classification: dataset.{key} names {len(targets)} columns, and a class is one;"
            " name one, or use task=multilabel or task=regression"
        )
    if (
        isinstance(dataset, Table)
        and isinstance(task, Classification)
        and dataset.standardise_targets
    ):
        problems.append(
            "dataset.standardise_targets=true: is of numbers to predict, and a class is none; use"
            " false"
        )
    problems += mask_rules.of_masks(dataset, task)
    if isinstance(dataset, Torchvision):
        problems += torchvision_rules.of_torchvision(dataset, task)
    for name in in_evaluations_alone(task):
        if name in {"loss", *getattr(task, "METRICS", ())}:
            problems.append(f"task.metrics.{name}: the task has one of that name; choose another")
    if isinstance(dataset, Text) and not isinstance(task, LanguageModel | TargetTask):
        problems.append(f"task={task.name}: dataset=text has tokens alone; use task=language_model")
    elif isinstance(task, LanguageModel) and not isinstance(dataset, TASK_DATASETS[task.name]):
        problems.append(
            f"task=language_model: dataset={dataset.name} has no tokens; use dataset=text"
        )
    elif not isinstance(task, Classification | TargetTask) and not isinstance(
        dataset, TASK_DATASETS.get(task.name, ())
    ):
        has = _TARGETS.get(dataset.name, "one class for each image; use task=classification")
        problems.append(
            f"task={task.name}: dataset={dataset.name} has {has}, or a dataset of your own with"
            " _target_"
        )
    for name in task.metrics if isinstance(task, TargetTask) else ():
        if name == "loss" or not name.isidentifier():
            why = (
                "is always there; leave it out"
                if name == "loss"
                else "use letters, digits and underscores alone"
            )
            problems.append(f"task.metrics.{name}: {why}")
    if config.label_smoothing and not isinstance(task, Classification):
        problems.append(
            f"label_smoothing={config.label_smoothing}: is of task=classification; use"
            " label_smoothing=0.0"
        )
    return problems


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


def _rows_or_images(dataset: HuggingFace, task: object) -> list[str]:
    if has_rows(dataset):
        size = dataset.image_size
        return (
            [f"dataset.image_size={list(size)}: dataset.input names columns of numbers; use null"]
            if size
            else []
        )
    mend = f"name columns of numbers, as in 'dataset.input=[{dataset.input}]'"
    if dataset.standardise_targets and not isinstance(task, Regression):
        return [
            "dataset.standardise_targets=true: is of numbers to predict; use task=regression, or "
            + mend
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
