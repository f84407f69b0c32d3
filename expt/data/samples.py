"""Samples of custom datasets, nested tensors of any kind; loaders of an IterableDataset."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from expt.config import secrets
from expt.config.user_code import own_frame
from expt.data.changes import digest
from expt.data.checked_samples import Check, as_it_is, checked, in_words, read
from expt.data.indexing import Piece, mix
from expt.data.kinds import DatasetConfig
from expt.data.loading import (
    Finish,
    Load,
    Loader,
    LoaderOptions,
    Order,
    leaves,
    mapped,
)
from expt.data.stream import (
    Collate,
    Keys,
    Reading,
    ReadingLoader,
    SampleLoader,
    Seeding,
    identity_collate,
    is_cheap,
    loading_settings,
    read_ahead,
    seeded,
    single,
)
from expt.errors import ConfigError, DataError, ExptError, warn


def loading(
    dataset: Dataset[Any],
    num_workers: int,
    check: Check = as_it_is,
    *,
    collate: Collate | None = None,
    channels: int | None = None,
    sample_s: float = math.inf,
) -> Load:
    """Return what makes a loader of the samples at given indices, each once it is checked.

    A sample is (inputs, targets), anything else is inputs only. Samples are stacked as torch's
    default_collate does, unless there is a `collate`, or the dataset has a method of that name,
    which makes a batch of a list. Images of so many `channels` are normalised and augmented.
    """

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        is_stream, own = isinstance(dataset, IterableDataset), getattr(dataset, "collate", None)
        if is_stream and options.balanced is not None:
            raise ConfigError(
                "dataset.sampling=balanced: an IterableDataset comes in its own order, and can't be"
                " drawn from; use dataset.sampling=null with task.class_weights=balanced, or a"
                " map-style Dataset"
            )
        reading = Reading(
            dataset,
            check,
            collate or functools.partial(collated, own=own),
            0 if is_cheap(sample_s, options) else num_workers,
            None if channels is None else Finish(options, channels),
        )
        if is_stream:
            return IterableLoader(indices.sort().values, options, reading)
        return SampleLoader(indices, options, reading)

    return load


def collated(samples: list[Any], own: Callable[[list[Any]], Any] | None = None) -> tuple[Any, Any]:
    """Return inputs and targets of a batch. Raise DataError."""
    try:
        batch = (own or default_collate)(samples)
    except DataError:
        raise
    except Exception as error:
        frame = own_frame(error)
        where = f" ({frame.filename}, line {frame.lineno})" if frame else ""
        fix = f"fix the dataset's method collate{where}" if own else "give the dataset a collate"
        raise DataError(f"samples cannot be made a batch: {secrets.said(error)}; {fix}") from error
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    inputs, targets = batch if is_pair else (batch, None)
    tensors = [*leaves((targets, inputs))]
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise DataError(
            f"a batch ({type(batch).__name__}) must contain only tensors [samples, ...]"
        )
    if own and (size := len(tensors[0])) != len(samples):
        raise DataError(
            f"collate makes tensors of {size} for {len(samples)} samples; put the samples first,"
            " each once, or, where inputs are of another order such as a graph's nodes, let targets"
            " be [samples, ...]"
        )
    # One that requires grad can't be sent to another process.
    found: tuple[Any, Any] = mapped(Tensor.detach, (inputs, targets))
    return found


def first(dataset: Dataset[Any]) -> Any:
    """Return the first sample. Raise DataError where there is none."""
    if not isinstance(dataset, IterableDataset):
        return read(dataset, 0)
    with seeded(0):
        return Stream(dataset, 0, 0).read([0])[0]


def example(dataset: Dataset[Any], sample: Any, check: Check) -> tuple[Any, Any]:
    """Return zeros like the inputs and targets of the first `sample`. Raise DataError."""
    batch = collated([checked(check, 0, sample)], getattr(dataset, "collate", None))
    found: tuple[Any, Any] = mapped(lambda tensor: torch.zeros_like(single(tensor[0])), batch)
    return found


def shapes(dataset: Dataset[Any], inputs: Any, targets: Any) -> Mapping[str, Any]:
    """Return what a model may ask for.

    It is `channels` and `image_size` of inputs that are one tensor (a row [features] is an image of
    one row), and `num_classes` outputs; of a dataset of tokens its `vocab_size` and `context`.
    """
    found: dict[str, Any] = {}
    if hasattr(dataset, "vocab_size"):
        return {"vocab_size": dataset.vocab_size, "context": dataset.context}  # type: ignore[attr-defined]
    if isinstance(inputs, Tensor) and 1 <= inputs.dim() <= 3:
        channels, height, width = (1,) * (3 - inputs.dim()) + tuple(inputs.shape)
        found = {"channels": channels, "image_size": (height, width)}
    if isinstance(targets, Tensor):
        found["num_classes"] = math.prod(targets.shape)
    return found


class IterableLoader(ReadingLoader):
    """Batches of the samples at given positions, in the order in which they come; see Loader.

    Every worker reads all of them, in one process of its own if `num_workers` is not 0, and keeps
    those of its part of each batch, so that a batch is the same on any number of workers. They must
    come alike on all: what is drawn at random from torch's, NumPy's or Python's own generator hangs
    on the seed, the epoch and the position only, and a method `set_epoch(epoch)` is called for each
    epoch (0 in an evaluation).
    """

    def first_samples(self, count: int, seed: int, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Yield each of the first samples as a batch of its own, on the CPU, as in this epoch."""
        dataset, check = self._reading.dataset, self._reading.check
        keys = Keys(seed, epoch, range(min(count, len(cast(Sized, dataset)))))
        found = Seeding().read(Stream(dataset, seed, epoch), keys)
        for position, sample in enumerate(found):
            yield self._collate([checked(check, position, sample)])

    def _order(self, epoch: int) -> Tensor:
        return self._indices

    @functools.cached_property
    def _seeding(self) -> Seeding:
        return Seeding()

    def _loaded(self, order: Order, pieces: list[Piece]) -> Iterator[Any]:
        wanted = [order.samples[piece.start : piece.stop].tolist() for piece in pieces]
        chosen = _Chosen(functools.partial(self._groups, wanted, order.epoch), self._collate)
        if self._reading.num_workers == 0:
            return iter(chosen)
        how = loading_settings(self._options.device, 1)
        return read_ahead(DataLoader(chosen, batch_size=None, collate_fn=identity_collate, **how))

    def _groups(self, wanted: list[list[int]], epoch: int) -> Iterator[list[Any]]:
        """Yield the samples at each of the lists of positions, of which one follows the other."""
        stream = Stream(self._reading.dataset, self._options.seed, epoch)
        read = 0
        for group in wanted:
            here = range(read, max(group) + 1)
            found = self._seeding.read(stream, Keys(self._options.seed, epoch, here))
            yield [checked(self._reading.check, at, found[at - read]) for at in group]
            read = here.stop


class _Chosen(IterableDataset[Any]):
    """Batches of groups of samples; see _Batches."""

    def __init__(self, groups: Callable[[], Iterator[list[Any]]], collate: Collate) -> None:
        self._groups, self._collate = groups, collate

    def __iter__(self) -> Iterator[tuple[Any, Any] | ExptError]:
        try:
            yield from map(self._collate, self._groups())
        except ExptError as error:
            yield error


class Stream:
    """The samples of a pass over an IterableDataset, which begins anew for an earlier one."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch
        self._samples, self._next = iter(()), -1

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at positions that follow one another. Raise what is wrong."""
        if not 0 <= self._next <= indices[0]:
            self._begin()
        while self._next < indices[0]:
            self._taken(1)
        return self._taken(len(indices))

    def _begin(self) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        with seeded(mix(self._seed, self._epoch)):
            try:
                self._samples = iter(cast(IterableDataset[Any], self._dataset))
            except Exception as error:
                raise in_words(error, f"{type(self._dataset).__name__}.__iter__") from error
        self._next = 0

    def _taken(self, count: int) -> list[Any]:
        found = list[Any]()
        try:
            found.extend(itertools.islice(self._samples, count))  # keeps those before an error
        except Exception as error:
            where = f"sample {self._next + len(found)}: {type(self._dataset).__name__}.__iter__"
            raise in_words(error, where) from error
        self._next += len(found)
        if len(found) < count:
            raise DataError(
                f"the dataset ended after {self._next} samples, but its __len__ says that it has"
                " more; fix it"
            )
        return found


COMPARED = 64
"""Of its first samples, as an evaluation and the first epochs get them."""


def refuse_shuffled(dataset: DatasetConfig, held_out: Loader | None, seed: int) -> None:
    """Raise ConfigError where the samples of a stream change places between epochs.

    The samples `held_out`, which are known by their places, would be trained on. Warn where it
    can't be said whether they do, or are only augmented. `seed` is the run's.
    """
    if not isinstance(held_out, IterableLoader) or not dataset.custom_class:
        return
    evaluated, *trained = (_first(held_out, *seeds) for seeds in ((0, 0), (seed, 1), (seed, 2)))
    found = {_order(evaluated, epoch) for epoch in trained}
    key = f"dataset._target_={dataset.custom_class}"
    without = "dataset.val_fraction=0 eval_split=test"
    if dataset.folds is not None:
        without = f"dataset.folds=null dataset.fold=null {without}"
    if "another" in found:
        raise ConfigError(
            f"{key}: its order changes in each epoch; val is held out by position, so val samples"
            f" would be trained on; use a map-style Dataset, or {without}, or"
            " don't shuffle in __iter__"
        )
    if "unknown" in found:
        warn(
            f"{key}: its first samples differ in each epoch; if __iter__ shuffles, val samples,"
            f" held out by position, are trained on: use a map-style Dataset then, or {without}"
        )


class _Sample(NamedTuple):
    whole: str
    """A digest of it, and one of its targets."""
    targets: str
    has_class: bool
    """Whether its target is one integer, which no augmentation changes."""


def _first(loader: IterableLoader, seed: int, epoch: int) -> list[_Sample]:
    found = []
    with seeded(0):  # for a `collate` that draws
        for inputs, targets in loader.first_samples(COMPARED, seed, epoch):
            single = isinstance(targets, Tensor) and targets.numel() == 1
            has_class = single and not targets.is_floating_point()
            found.append(_Sample(_digest((inputs, targets)), _digest(targets), has_class))
    return found


def _digest(tree: Any) -> str:
    return repr([digest(tensor) for tensor in leaves(tree)])


def _order(before: Sequence[_Sample], after: Sequence[_Sample]) -> str:
    """Return how the order of as many samples compares: "same", "another" or "unknown"."""
    others = [(old, new) for old, new in zip(before, after, strict=True) if old.whole != new.whole]
    if not others:
        return "same"
    times = Counter(old.whole for old in before)  # what occurs twice may be another's augmented
    moved = {old.whole for old, _ in others if times[old.whole] == 1}
    has_moved = not moved.isdisjoint(new.whole for _, new in others)
    have_changed = any(old.targets != new.targets for old, new in others)
    if has_moved or (have_changed and all(sample.has_class for sample in before)):
        return "another"
    # Augmented inputs, by what they are to be known by; nothing is known where all have one target.
    is_known = not have_changed and len({sample.targets for sample in before}) > 1
    return "same" if is_known else "unknown"
