"""The samples of a custom Dataset class, and what a task takes of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.config import user_class
from expt.data import masks, samples
from expt.data.checked_samples import (
    Check,
    class_of,
    in_words,
    labelled,
    like,
    read,
    structure_of,
    to_tensor,
)
from expt.data.images import of_images, streamed
from expt.data.samples import Labelled
from expt.data.source import Part, Source, are_images
from expt.data.stream import seconds_for, seeded
from expt.data.windows import NO_TARGET
from expt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from expt.data.kinds.custom import Custom

_SOME = 8  # samples, whose targets tell where all lie


def source(dataset: Custom, num_workers: int, task: Any = None) -> Source:
    """Its parts; its first sample tells the shapes, and the configured `task` what its targets are.

    Raises ConfigError and DataError.
    """
    cls: type[Dataset[Any]] = user_class.resolve(dataset.target, Dataset)
    if not hasattr(cls, "__len__"):
        raise ConfigError(
            f"dataset._target_={dataset.target}: must have __len__; where an epoch ends, and which"
            " samples are whose, depends on it"
        )
    train = _construct(dataset, cls, {**dataset.kwargs, **dataset.train})
    test = _construct(dataset, cls, {**dataset.kwargs, **dataset.test})
    for name, part in (("training", train), ("test", test)):
        if _size(part, dataset.target, name) == 0:
            raise DataError(f"dataset._target_={dataset.target}: its {name} part has no samples")
    if dataset.num_classes is not None:
        return _of_classes(dataset, train, test, num_workers, task)
    check = check_for(train, dataset, task)
    found = _own_samples(dataset, train, test, num_workers, check, samples.first(train))
    if getattr(task, "TARGETS", None) == "mask":
        return dataclasses.replace(found, shapes={**found.shapes, "num_classes": task.num_classes})
    if getattr(task, "TARGETS", None) == "any" and _is_integer(
        found.example[1]
    ):  # a class of how many, or a count
        shapes = {name: shape for name, shape in found.shapes.items() if name != "num_classes"}
        return dataclasses.replace(found, shapes=shapes)
    return found


def _of_classes(
    dataset: Custom,
    train: Dataset[Any],
    test: Dataset[Any],
    num_workers: int,
    task: Any,
) -> Source:
    """Samples (inputs, label): images, or inputs of any kind."""
    names = _names(dataset, train)
    try:
        inputs, _ = first = samples.first(train)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"dataset._target_={dataset.target}: its sample 0 is not (inputs, label): {error}"
        ) from error
    shape = None if hasattr(train, "collate") else _image_shape(inputs)
    if shape is None:  # a row of numbers, several tensors, ..., or whatever `collate` makes
        check = functools.partial(checked_class, num_classes=len(names))
        kind = Labelled(len(names), getattr(task, "TARGETS", "class") == "class")
        found = _own_samples(dataset, train, test, num_workers, check, first, kind)
        if are_images(names, found.example):
            _refuse_channels_last(dataset.target, tuple(found.example[0].shape))
        shapes = {**found.shapes, "num_classes": len(names)}
        return dataclasses.replace(
            found, shapes=shapes, class_names=names, classes=_classes_of(train), targets_of=None
        )
    _refuse_channels_last(dataset.target, shape)
    to_train, to_test = (
        streamed(part, shape, len(names), num_workers, _seconds(dataset, train))
        for part in (train, test)
    )
    return of_images(shape, names, to_train, to_test, classes=_classes_of(train))


def _names(dataset: Custom, train: Dataset[Any]) -> tuple[str, ...]:
    """Of its classes."""
    names = tuple(
        map(str, getattr(train, "classes", None) or range(cast(int, dataset.num_classes)))
    )
    if len(names) != dataset.num_classes:
        raise ConfigError(
            f"dataset.num_classes={dataset.num_classes}: {dataset.target}.classes has {len(names)};"
            f" use dataset.num_classes={len(names)}"
        )
    return names


def _image_shape(inputs: Any) -> tuple[int, int, int] | None:
    """Channels, height and width; None where it is no image."""
    try:
        channels, height, width = to_tensor(inputs).shape
    except TypeError:
        return None
    return channels, height, width


def _refuse_channels_last(target: str, shape: tuple[int, ...]) -> None:
    channels, height, width = shape
    if height == channels and width in (1, 3, 4) and channels not in (1, 3, 4):
        raise DataError(
            f"dataset._target_={target}: its images are {shape}, read as (channels, height, width),"
            " and look like (height, width, channels); give tensors as image.permute(2, 0, 1)"
        )


def _seconds(dataset: Custom, train: Dataset[Any]) -> float:
    """For a sample, where that decides who reads it."""
    is_open = dataset.num_workers == "auto" and not isinstance(train, IterableDataset)
    return seconds_for(train) if is_open else math.inf


def _own_samples(
    dataset: Custom,
    train: Dataset[Any],
    test: Dataset[Any],
    num_workers: int,
    check: Check,
    first: Any,
    labelled: Labelled | None = None,
) -> Source:
    """Samples of any kind, which are like the `first`."""
    if not hasattr(train, "collate"):  # which may make anything of anything
        check = like(structure_of(first), check)
    example = samples.example(train, first, check)
    labelled = labelled and labelled.of(example)
    if labelled and labelled.channels is not None:
        example = example[0].float(), example[1]  # as they are once they are normalised
    how = num_workers, check, labelled, _seconds(dataset, train)
    loads = (samples.loading(part, *how) for part in (train, test))
    to_train, to_test = (
        Part(len(cast(Sized, part)), load) for part, load in zip((train, test), loads, strict=True)
    )
    shapes, alike = samples.shapes(train, *example), torch.zeros(to_train.size)
    targets_of = functools.partial(some_targets, train) if isinstance(example[1], Tensor) else None
    return Source(shapes, (), example, to_train, to_test, alike, targets_of=targets_of)


def _is_integer(target: Any) -> bool:
    if not isinstance(target, Tensor) or target.dim() or target.dtype == torch.bool:
        return False
    return not (target.is_floating_point() or target.is_complex())


def some_targets(train: Dataset[Any], indices: Tensor) -> Tensor:
    """Return targets of a few samples, spread evenly over those at `indices`."""
    places = torch.linspace(0, len(indices) - 1, _SOME).long()
    with seeded(0):
        if isinstance(train, IterableDataset):
            found = [*itertools.islice(train, _SOME)]
        else:
            found = [read(train, index) for index in indices[places].unique().tolist()]
    # One by one: they may differ in length.
    targets = [samples.collated([sample], getattr(train, "collate", None))[1] for sample in found]
    return torch.cat([target.flatten() for target in targets if isinstance(target, Tensor)])


def _classes_of(dataset: Dataset[Any]) -> Tensor:
    """The class of each sample, by the attribute `targets` that torchvision's datasets have; else
    all are of one.
    """
    size = len(cast(Sized, dataset))
    try:
        targets = torch.as_tensor(getattr(dataset, "targets", ()))
    except (TypeError, ValueError, RuntimeError):  # boxes, texts, ...
        targets = torch.empty(0)
    return targets if targets.shape == (size,) else torch.zeros(size)


def _size(part: Dataset[Any], target: str, name: str) -> int:
    try:
        return len(cast(Sized, part))
    except Exception as error:
        told = in_words(error, f"dataset._target_={target}: len() of its {name} part")
        raise DataError(f"{told}; let __len__ return the number of its samples") from error


def _construct(dataset: Custom, cls: type[Dataset[Any]], arguments: dict[str, Any]) -> Dataset[Any]:
    return user_class.construct(f"dataset._target_={dataset.target}", cls, (), arguments)


_Wrong = Callable[[Any, Any], "str | None"]
"""Says what is wrong with a sample's inputs and targets, which may be of any kind."""


def check_for(dataset: Dataset[Any], config: Custom, task: Any) -> Check:
    """What looks at the samples of `dataset`, where the configured `task` takes not any."""
    if getattr(task, "TARGETS", None) == "mask":
        return functools.partial(masks.checked_mask, values=masks.values_of(config, task))
    if getattr(task, "TARGETS", None) == "labels":
        return functools.partial(_unless, wrong=functools.partial(_target, dataset, _label))
    if getattr(task, "TARGETS", None) == "numbers":
        return functools.partial(_unless, wrong=functools.partial(_target, dataset, _number))
    if getattr(task, "TARGETS", None) == "tokens" and hasattr(dataset, "vocab_size"):
        return functools.partial(_unless, wrong=_tokens(dataset.vocab_size))
    return _any


def _any(sample: Any) -> Any:
    return sample


def checked_class(sample: Any, num_classes: int) -> tuple[Any, int]:
    """The sample (inputs, label), its label a number. Raises DataError where it is no class."""
    inputs, label = labelled(sample, "inputs")
    return inputs, class_of(label, num_classes)


def _unless(sample: Any, wrong: _Wrong) -> Any:
    """The sample as it is. Raises DataError where something is wrong with its inputs and targets."""
    if isinstance(sample, list | tuple) and len(sample) == 2 and (told := wrong(*sample)):
        raise DataError(told)
    return sample


def _target(
    dataset: Dataset[Any], wrong: Callable[[Tensor], str | None], _: Any, target: Any
) -> str | None:
    """What is wrong with the numbers of a target; of a dataset with a method `collate` it may be no
    tensor yet.
    """
    if isinstance(target, Tensor | np.ndarray | np.number | float | int):
        return wrong(torch.as_tensor(target))
    if hasattr(dataset, "collate"):
        return None
    return (
        f"its target is a {type(target).__name__}, expected a tensor; return torch.tensor(target)"
    )


def _label(target: Tensor) -> str | None:
    if not (wrong := (target != 0) & (target != 1)).any():
        return None
    return (
        f"its target holds {target[wrong][0].item():g}, expected 0 or 1 for each label; mend it, or"
        " use task=regression"
    )


def _number(target: Tensor) -> str | None:
    if not (wrong := ~torch.isfinite(target)).any():
        return None
    return f"its target holds {target[wrong][0].item()}; mend it, or leave the sample out"


def _tokens(vocab_size: int) -> _Wrong:
    def check(inputs: Any, targets: Any) -> str | None:
        for name, tokens, also in (("inputs", inputs, ()), ("targets", targets, (NO_TARGET,))):
            if not isinstance(tokens, Tensor):
                continue
            if tokens.is_floating_point():
                return f"its {name} are {tokens.dtype}; let them be tokens, int64"
            wrong = (tokens < 0) | (tokens >= vocab_size)
            for number in also:
                wrong &= tokens != number
            if wrong.any():
                more = "".join(f", or {number} where nothing counts" for number in also)
                return (
                    f"its {name} hold the token {int(tokens[wrong][0])}, expected 0 to"
                    f" {vocab_size - 1} (vocab_size){more}; mend it, or vocab_size"
                )
        return None

    return check
