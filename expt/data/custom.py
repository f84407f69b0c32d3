"""The samples of a custom Dataset class, and what a task takes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.config import user_code
from expt.data import changes, masks, samples
from expt.data.checked_samples import (
    Check,
    checked,
    class_of,
    in_words,
    labelled,
    like,
    read,
    structure_of,
    to_tensor,
)
from expt.data.image_files import values_of
from expt.data.images import image_part, of_images
from expt.data.memory import NO_TARGET
from expt.data.samples import Labelled
from expt.data.source import Part, Source, are_images
from expt.data.stream import median_read_s, preserved_generators, seeded
from expt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from expt.data.kinds.custom import Custom

_SOME = 8  # samples, whose targets say where all are


def source(dataset: Custom, num_workers: int, task: Any = None) -> Source:
    """Return its parts; the first sample gives the shapes, the `task` what its targets are."""
    cls: type[Dataset[Any]] = user_code.resolve(dataset.target, Dataset)
    if not hasattr(cls, "__len__"):
        raise ConfigError(
            f"dataset._target_={dataset.target}: must have __len__; where an epoch ends, and which"
            " samples are whose, depends on it"
        )
    key = f"dataset._target_={dataset.target}"
    train, test = (
        user_code.construct(key, cls, (), {**dataset.kwargs, **more})
        for more in (dataset.train, dataset.test)
    )
    for name, part in (("training", train), ("test", test)):
        try:
            size = len(cast(Sized, part))
        except Exception as error:
            raise DataError(str(in_words(error, f"{key}: len() of its {name} part"))) from error
        if size == 0:
            raise DataError(f"{key}: its {name} part has no samples")
    found = _source(dataset, train, test, num_workers, task)
    is_picture = dataset.num_classes is not None and not hasattr(train, "collate")
    return dataclasses.replace(found, notes=[*_notes(train, is_picture)])


def _notes(train: Dataset[Any], is_picture: bool) -> Iterator[str]:
    """Yield what the author of a dataset may not have meant; the first sample has been read."""
    with preserved_generators(), contextlib.suppress(Exception):  # training says what is wrong
        before = changes.prints(train)
        is_stream = isinstance(train, IterableDataset)
        index = len(cast(Sized, train)) - 1
        sample = samples.first(train) if is_stream else read(train, index)
        if names := changes.changed(before, changes.prints(train)):
            yield (
                f"reading a sample changes {changes.listed(names)}, which no checkpoint holds and"
                " each reading process has a copy of; draw from the global generators of torch,"
                " NumPy and Python, which are seeded for each sample"
            )
        inputs = sample[0]
        if is_picture and getattr(inputs, "ndim", 0) == 2 and "float" in str(inputs.dtype):
            yield (
                f"samples {[*inputs.shape]} are taken for grey pictures {[1, *inputs.shape]}; of"
                " series [time, features] give the dataset a method collate(samples), such as one"
                " that returns torch.utils.data.default_collate(samples), or give pictures"
                " [1, height, width]"
            )


def _source(
    dataset: Custom, train: Dataset[Any], test: Dataset[Any], num_workers: int, task: Any
) -> Source:
    if dataset.num_classes is not None:
        return _of_classes(dataset, train, test, num_workers, task)
    check = check_for(train, dataset, task)
    found = _own_samples(dataset, train, test, num_workers, check, samples.first(train))
    if getattr(task, "TARGETS", None) == "mask":
        return dataclasses.replace(found, shapes={**found.shapes, "num_classes": task.num_classes})
    # An integer is a class, or a count.
    if getattr(task, "TARGETS", None) == "any" and _is_integer(found.example[1]):
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
    """Return samples (inputs, label): images, or inputs of any kind."""
    names = _names(dataset, train)
    first = samples.first(train)
    inputs, _ = checked(functools.partial(labelled, what="inputs"), 0, first)
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
    seconds = _seconds(dataset, train)
    parts = {
        name: image_part(part, shape, num_workers, len(names), sample_s=seconds)
        for name, part in (("train", train), ("test", test))
    }
    return of_images(shape, names, parts, classes=_classes_of(train))


def _names(dataset: Custom, train: Dataset[Any]) -> tuple[str, ...]:
    number = cast(int, dataset.num_classes)
    names = tuple(map(str, getattr(train, "classes", None) or range(number)))
    if len(names) != dataset.num_classes:
        raise ConfigError(
            f"dataset.num_classes={dataset.num_classes}: {dataset.target}.classes has {len(names)};"
            f" use dataset.num_classes={len(names)}"
        )
    return names


def _image_shape(inputs: Any) -> tuple[int, int, int] | None:
    """Return channels, height and width; None where it is no image."""
    try:
        channels, height, width = to_tensor(inputs).shape
    except DataError:
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
    """Return the time for a sample, where that decides who reads it."""
    is_open = dataset.num_workers == "auto" and not isinstance(train, IterableDataset)
    return median_read_s(train) if is_open else math.inf


def _own_samples(
    dataset: Custom,
    train: Dataset[Any],
    test: Dataset[Any],
    num_workers: int,
    check: Check,
    first: Any,
    labelled: Labelled | None = None,
) -> Source:
    """Return samples of any kind, which are like the `first`."""
    if not hasattr(train, "collate"):  # which may make anything of anything
        check = like(structure_of(first), check)
    example = samples.example(train, first, check)
    labelled = labelled and labelled.of(example)
    if labelled and labelled.channels is not None:
        example = example[0].float(), example[1]  # as they are once they are normalised
    how: Any = {"channels": labelled and labelled.channels, "sample_s": _seconds(dataset, train)}

    def part(found: Dataset[Any]) -> Part:
        own = getattr(found, "collate", None)
        collate = functools.partial(labelled.collated, own=own) if labelled and own else None
        load = samples.loading(found, num_workers, check, collate=collate, **how)
        return Part(len(cast(Sized, found)), load)

    to_train, to_test = part(train), part(test)
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
    """Return each sample's class, by the attribute `targets`; without it all are of one."""
    size = len(cast(Sized, dataset))
    try:
        targets = torch.as_tensor(getattr(dataset, "targets", ()))
    except (TypeError, ValueError, RuntimeError):  # boxes, texts, ...
        targets = torch.empty(0)
    return targets if targets.shape == (size,) else torch.zeros(size)


def check_for(dataset: Dataset[Any], config: Custom, task: Any) -> Check:
    """Return what looks at samples: a GPU says nothing, or little, of a wrong target."""
    targets = getattr(task, "TARGETS", None)
    if targets == "mask":
        return functools.partial(masks.checked_mask, values=values_of(config, task))
    if targets == "labels":
        return _checked_labels
    if targets == "tokens" and hasattr(dataset, "vocab_size"):
        return functools.partial(_checked_tokens, vocab_size=dataset.vocab_size)
    return lambda sample: sample


def checked_class(sample: Any, num_classes: int) -> tuple[Any, int]:
    """Return the sample (inputs, label), its label a number. Raise DataError for no class."""
    inputs, label = labelled(sample, "inputs")
    return inputs, class_of(label, num_classes)


def _parts_of(sample: Any) -> tuple[Any, Any]:
    is_pair = isinstance(sample, list | tuple) and len(sample) == 2
    return (sample[0], sample[1]) if is_pair else (None, None)


def _checked_labels(sample: Any) -> Any:
    _, target = _parts_of(sample)
    if isinstance(target, Tensor | np.ndarray):
        wrong = (target != 0) & (target != 1)
        if wrong.any():
            raise DataError(
                f"its target holds {target[wrong][0].item():g}, expected 0 or 1 for each label; fix"
                " it, or use task=regression"
            )
    return sample


def _checked_tokens(sample: Any, vocab_size: int) -> Any:
    for name, tokens in zip(("inputs", "targets"), _parts_of(sample), strict=True):
        if not isinstance(tokens, Tensor):
            continue
        if tokens.is_floating_point():
            raise DataError(f"its {name} are {tokens.dtype}; let them be tokens, int64")
        wrong = (tokens < 0) | (tokens >= vocab_size)
        if name == "targets":
            wrong &= tokens != NO_TARGET
        if wrong.any():
            more = f", or {NO_TARGET} where nothing counts" if name == "targets" else ""
            raise DataError(
                f"its {name} hold the token {int(tokens[wrong][0])}, expected 0 to"
                f" {vocab_size - 1} (vocab_size){more}; fix it, or vocab_size"
            )
    return sample
