"""The samples of a custom Dataset class, as a task takes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.config import user_class
from expt.data import checked_samples, samples
from expt.data.images import stacked
from expt.data.loader import loading
from expt.data.samples import MEDIAN_OF, Collate, Reading, median_read_s
from expt.data.seeding import Read, preserved_generators, seeded
from expt.data.source import Part, Source
from expt.errors import ConfigError, DataError, described, listed
from expt.features import Anything, Classes, Feature, Features, Image, Tokens
from expt.features.feature import labelled

if TYPE_CHECKING:
    from expt.data.kinds.custom import Custom

_ROUNDING = 1e-3  # of the sum of shares
_SOME = 8  # samples, whose targets say where all are


def source(dataset: Custom, num_workers: int, task: Any = None) -> Source:
    """Return its parts; the first sample gives the shapes, the `task` the kind of targets."""
    parts = _construct(dataset)
    train = parts["train"]
    threads = threading.active_count()
    with samples.left_as_it_was(train):
        first = samples.first(train)
        if threading.active_count() > threads:  # a forked process has none of the threads
            num_workers = 0
        found = _Parts(dataset, parts, first, num_workers, task).source()
        is_picture = dataset.num_classes is not None and not samples.collate_of(train)
        notes = [*_notes(train, first, is_picture)]
    groups = _groups(parts, dataset.group) if dataset.group else {}
    is_stream = isinstance(train, IterableDataset)
    return dataclasses.replace(found, notes=notes, groups=groups, is_stream=is_stream)


def _construct(dataset: Custom) -> dict[str, Dataset[Any]]:
    """Return the parts that there are. Raise ConfigError for arguments that do not fit."""
    key = f"dataset._target_={dataset.target}"
    cls: type[Dataset[Any]] = user_class.resolve(dataset.target, Dataset)
    if not (hasattr(cls, "__len__") or issubclass(cls, IterableDataset)):
        raise ConfigError(f"{key}: must have __len__")
    more = {name: each for part in dataset.given.values() for name, each in part.items()}
    if unknown := sorted(more.keys() - user_class.taken(cls, more)):
        given = listed(f"dataset.{part}={each}" for part, each in dataset.given.items())
        raise ConfigError(
            f"{key}: takes no {listed(map(repr, unknown))} of {given}; add the parameter, give"
            " others, e.g. '+dataset.train={split: train}' '+dataset.test={split: test}', or, of a"
            " dataset that is only trained on, none: '+dataset.train={}' '+dataset.test=null'"
        )
    parts = {
        part: user_class.construct(key, cls, (), {**dataset.kwargs, **each})
        for part, each in dataset.given.items()
    }
    for name, part in parts.items():
        try:
            size = samples.size_of(part)
        except Exception as error:
            raise checked_samples.in_words(error, f"{key}: len() of its {name} part") from error
        if size == 0:
            raise DataError(f"{key}: its {name} part has no samples")
    return parts


def _groups(parts: Mapping[str, Dataset[Any]], name: str) -> dict[str, Tensor]:
    """Return the groups of the parts by their attribute, which train has. Raise ConfigError."""
    numbers, found = dict[Any, int](), dict[str, Tensor]()
    for part, each in parts.items():
        groups = getattr(each, name, None)
        if groups is None and part != "train":
            continue
        values, problem = _values_of(groups, samples.size_of(each))
        if problem:
            raise ConfigError(
                f"dataset.group={name}: {part} {problem}; let it be an attribute of the dataset, a"
                " list of the group of each sample"
            )
        found[part] = torch.tensor([numbers.setdefault(x, len(numbers)) for x in values])
    return found


def _values_of(groups: Any, size: int | None) -> tuple[list[Any], str]:
    """Return the items of a list or an array, and the fault if they are not one for each sample."""
    items = groups.tolist() if hasattr(groups, "tolist") else groups
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes):
        return [], "has none" if groups is None else f"has a {type(groups).__name__}"
    values = [one.item() if getattr(one, "ndim", None) == 0 else one for one in items]
    for place, one in enumerate(values):
        if not isinstance(one, Hashable):
            return [], f"has a {type(one).__name__} for sample {place}"
        if one in (None, "") or one != one:
            return [], f"has none for sample {place}"
    return values, "" if len(values) == size else f"has {len(values)} for {size} samples"


def _notes(train: Dataset[Any], first: Any, is_picture: bool) -> Iterator[str]:
    """Yield warnings for the author of a dataset, whose first sample has been read."""
    with preserved_generators(), contextlib.suppress(Exception):  # training reports the error
        is_stream = isinstance(train, IterableDataset)
        if is_stream:  # each pass may draw again
            samples.first(train)
        has_state = samples.state_of(train) is not None  # which holds its generators
        own = {} if has_state else {"dataset": train}
        again = not (has_state or is_stream)
        yield from checked_samples.unseeded(_reads_of(train), own, again=again)
        inputs = first[0]
        if is_picture and getattr(inputs, "ndim", 0) == 2 and "float" in str(inputs.dtype):
            yield (
                f"samples {[*inputs.shape]} are taken for grey pictures {[1, *inputs.shape]}; of"
                " series [time, features] give the dataset a method collate(samples), such as one"
                " that returns torch.utils.data.default_collate(samples), or give pictures"
                " [1, height, width]"
            )


def _reads_of(train: Dataset[Any]) -> Iterable[Callable[[], Any]]:
    """Return functions that read samples, of a stream all of them the first few."""
    if isinstance(train, IterableDataset):
        return [functools.partial(_read_few, train)]
    places = checked_samples.telling(cast(int, samples.size_of(train)), _classes_of(train))
    return (functools.partial(_read, train, place) for place in places)


def _read_few(train: Dataset[Any]) -> list[Any]:
    """Return the first samples of a stream, as many as there is time for."""
    stream, ends = samples.Stream(Reading(train)), time.monotonic() + checked_samples.LIMIT_S
    found = stream.take(1)
    while len(found) < _SOME and time.monotonic() < ends and (more := stream.take(1)):
        found += more
    return found


def _read(train: Dataset[Any], place: int) -> Any:
    """Return a sample, as a batch if the dataset makes its own."""
    sample, collate = checked_samples.read(train, place), samples.collate_of(train)
    return samples.collated([sample], collate) if collate else sample


@dataclass(frozen=True)
class _Parts:
    """The parts of a custom dataset, for a task."""

    config: Custom
    parts: Mapping[str, Dataset[Any]]
    first: Any
    """the first sample of train"""
    num_workers: int
    task: Any

    @property
    def train(self) -> Dataset[Any]:
        """The part that is trained on."""
        return self.parts["train"]

    def source(self) -> Source:
        """Return them as a source: samples like the first, of a class each or of any kind."""
        has_classes = self.config.num_classes is not None
        targets = self._classes() if has_classes else self._targets()
        check, collate = self._reading(targets)
        inputs, target = samples.example(self.train, self.first, check)
        has_pixels = has_classes and isinstance(inputs, Tensor) and inputs.dim() == 3
        has_pixels = has_pixels and (inputs.dtype == torch.uint8 or inputs.is_floating_point())
        if has_pixels:
            inputs = inputs.float()  # as once it is normalised
        features = Features(_inputs(self.train, inputs, has_pixels=has_pixels), targets)
        if features.inputs.is_image:
            self._refuse_turned(*inputs.shape)
        channels, sample_s = inputs.shape[0] if has_pixels else None, self._sample_s()
        how: Any = {"check": check, "channels": channels, "sample_s": sample_s}
        parts = dict[str, Part]()
        for name, each in self.parts.items():
            makes = self._own_collate(each, are_images=has_pixels) or collate
            load = loading(each, self.num_workers, collate=makes, **how)
            parts[name] = Part(samples.size_of(each), load)
        asks_targets = isinstance(target, Tensor) and not has_classes
        return Source(
            features=features,
            example=(inputs, target),
            train=parts["train"],
            val=parts.get("val"),
            test=parts.get("test"),
            classes=_classes_of(self.train) if has_classes else None,
            targets_of=functools.partial(some_targets, self.train) if asks_targets else None,
            sees_few=True,
        )

    def _targets(self) -> Feature:
        """Return the feature that the task takes, as the first sample has it."""
        takes: type[Feature] = getattr(self.task, "takes", Anything)
        _, targets = samples.example(self.train, self.first, checked_samples.as_it_is)
        return takes.of_custom(targets, self.train, self.task)

    def _reading(self, targets: Feature) -> tuple[checked_samples.Check, Collate | None]:
        """Return the check of a sample, and how pictures become a batch.

        Pictures are scaled to [0, 1]; others must look like the first, unless the dataset has a
        `collate`.
        """
        if self.config.num_classes is not None:
            labels = functools.partial(labelled, inputs="inputs")
            inputs, _ = checked_samples.checked(labels, 0, self.first)
            if not samples.collate_of(self.train):
                with contextlib.suppress(DataError):
                    shape = tuple(checked_samples.to_tensor(inputs).shape)
                    read = checked_samples.checked_image
                    return functools.partial(read, shape=shape, classes=targets), stacked
        if samples.collate_of(self.train):
            return targets.check, None
        return checked_samples.like(checked_samples.structure_of(self.first), targets.check), None

    def _refuse_turned(self, channels: int, height: int, width: int) -> None:
        """Raise DataError for images that look like (height, width, channels)."""
        if height == channels and width in (1, 3, 4) and channels not in (1, 3, 4):
            raise DataError(
                f"dataset._target_={self.config.target}: its images are"
                f" {(channels, height, width)}, read as (channels, height, width), and look"
                " like (height, width, channels); give tensors as image.permute(2, 0, 1)"
            )

    def _classes(self) -> Classes:
        number = cast(int, self.config.num_classes)
        names = tuple(map(str, getattr(self.train, "classes", None) or range(number)))
        if len(names) != number:
            raise ConfigError(
                f"dataset.num_classes={number}: {self.config.target}.classes has {len(names)}; use"
                f" dataset.num_classes={len(names)}"
            )
        return Classes(names=names)

    def _sample_s(self) -> float:
        """Return the time for a sample, where that decides who reads it."""
        if self.config.num_workers != "auto":
            return math.inf
        reads: Read = functools.partial(
            checked_samples.read_all, self.train, checked_samples.as_it_is
        )
        if isinstance(self.train, IterableDataset):
            reads = samples.Stream(Reading(self.train)).read
        return median_read_s(reads, samples.size_of(self.train) or MEDIAN_OF)

    def _own_collate(self, dataset: Dataset[Any], *, are_images: bool) -> Collate | None:
        """Return how a dataset makes its own batches of samples of a class each, if it does."""
        own, number = samples.collate_of(dataset), self.config.num_classes
        if not own or not number:
            return None
        classes = number if getattr(self.task, "takes", Classes).has_one_class else None
        return functools.partial(_collated, own=own, classes=classes, are_images=are_images)


def _inputs(dataset: Dataset[Any], inputs: Any, *, has_pixels: bool) -> Feature:
    """Return the feature of a sample's inputs: tokens, an image, or any that are like the first."""
    if hasattr(dataset, "vocab_size"):
        return Tokens(
            vocab_size=dataset.vocab_size, context=getattr(dataset, "context", len(inputs))
        )
    if has_pixels:
        channels, height, width = inputs.shape
        return Image(channels=channels, image_size=(height, width))
    return Anything.like(inputs, are_inputs=True)


def _collated(
    given: list[Any], own: Callable[[list[Any]], Any], classes: int | None, are_images: bool
) -> tuple[Any, Any]:
    """Return a batch that the dataset's `collate` makes of samples of one of `classes` each.

    With None targets are of any kind. Images have class numbers only.
    """
    inputs, targets = samples.collated(given, own)
    if are_images:
        inputs = inputs.clone()  # it may be the dataset's own, and is normalised in place
    if classes is None:
        return inputs, targets
    is_tensor, also = isinstance(targets, Tensor), ""
    if is_tensor and targets.dim() == 1 and not targets.is_floating_point():
        return inputs, targets.long()
    if not are_images:
        if is_tensor and targets.shape[1:] == (classes,):
            if not ((targets >= 0).all() and ((targets.sum(1) - 1).abs() <= _ROUNDING).all()):
                why = "are negative, or do not add up to 1 in each sample"
                raise DataError(f"collate makes shares of classes that {why}; correct them")
            return inputs, targets.float()
        also = f", or shares of the classes, [samples, {classes}]"
    raise DataError(
        f"collate makes targets of {described(targets)}; let them be class numbers, int64"
        f" [samples]{also}"
    )


def some_targets(train: Dataset[Any], indices: Tensor) -> Tensor:
    """Return targets of a few samples, spread evenly over those at `indices`."""
    places = torch.linspace(0, len(indices) - 1, _SOME).long()
    with seeded(0), samples.left_as_it_was(train):
        if isinstance(train, IterableDataset):
            found = [*itertools.islice(train, _SOME)]
        else:
            found = [
                checked_samples.read(train, index) for index in indices[places].unique().tolist()
            ]
    # One by one: they may differ in length.
    targets = [samples.collated([sample], samples.collate_of(train))[1] for sample in found]
    return torch.cat([target.flatten() for target in targets if isinstance(target, Tensor)])


def _classes_of(dataset: Dataset[Any]) -> Tensor | None:
    """Return each sample's class, by the attribute `targets`, if there is one."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # boxes, texts, ...
        targets = torch.as_tensor(getattr(dataset, "targets", ()))
        if targets.shape == (samples.size_of(dataset),):
            return targets
    return None
