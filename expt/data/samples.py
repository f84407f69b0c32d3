"""Samples of custom datasets, nested tensors of any kind; loaders of an IterableDataset."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from expt.config import secrets
from expt.config.own_code import own_frame
from expt.data.checked_samples import Check, as_it_is, checked, in_words, read
from expt.data.indexing import Piece, local_slice, mix
from expt.data.loading import (
    Batch,
    Finish,
    Load,
    Loader,
    LoaderOptions,
    Order,
    Shard,
    leaves,
    mapped,
    prefetched,
    to_device,
)
from expt.data.stream import (
    Collate,
    Keys,
    Reading,
    ReadingLoader,
    SampleLoader,
    is_cheap,
    seeded,
    single,
)
from expt.errors import ConfigError, DataError, described, warn


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
        if size_of(dataset) is None:
            return UncountedLoader(options, _of_worker(reading, options.shard))
        if is_stream:
            return IterableLoader(indices.sort().values, options, reading)
        return SampleLoader(indices, options, reading)

    return load


def size_of(dataset: Dataset[Any]) -> int | None:
    """Return the number of samples; None of an IterableDataset without a length."""
    is_counted = hasattr(dataset, "__len__") or not isinstance(dataset, IterableDataset)
    return len(cast(Sized, dataset)) if is_counted else None


def state_of(dataset: Any) -> Any:
    """Return a copy of the state that a dataset can load again; None if it keeps none."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return None
    try:
        return copy.deepcopy(dataset.state_dict())
    except Exception as error:
        raise in_words(error, f"{type(dataset).__name__}.state_dict") from error


@contextlib.contextmanager
def left_as_it_was(dataset: Any) -> Iterator[None]:
    """Load the state again that a dataset has now, if it keeps one."""
    start = state_of(dataset)
    yield
    if start is not None:
        dataset.load_state_dict(start)


def _of_worker(reading: Reading, shard: Shard) -> Reading:
    """Return what this worker reads of a stream, and the state in which it begins."""
    dataset: Any = reading.dataset
    if is_sharded := hasattr(dataset, "shard"):
        name = f"{type(dataset).__name__}.shard"
        try:
            dataset = dataset.shard(num_shards=shard.world_size, index=shard.rank)
        except Exception as error:
            raise in_words(error, name) from error
        if not isinstance(dataset, IterableDataset):
            raise ConfigError(f"{name}: returned {described(dataset)}; return the dataset")
    start = state_of(dataset)
    return dataclasses.replace(reading, dataset=dataset, start=start, is_sharded=is_sharded)


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
    if not (found := Stream(Reading(dataset)).take(1)):
        raise DataError(f"{type(dataset).__name__}: gives no sample")
    return found[0]


def example(dataset: Dataset[Any], sample: Any, check: Check) -> tuple[Any, Any]:
    """Return zeros like the inputs and targets of the first `sample`. Raise DataError."""
    batch = collated([checked(check, 0, sample)], getattr(dataset, "collate", None))
    found: tuple[Any, Any] = mapped(lambda tensor: torch.zeros_like(single(tensor[0])), batch)
    return found


class IterableLoader(ReadingLoader):
    """Batches of the samples at given positions, in the order in which they come; see Loader.

    Every worker reads all of them, in one process of its own if `num_workers` is not 0, and keeps
    those of its part of each batch, so that a batch is the same on any number of workers. They must
    come alike on all: what is drawn at random from torch's, NumPy's or Python's own generator hangs
    on the seed, the epoch and the position only, and a method `set_epoch(epoch)` is called for each
    epoch (0 in an evaluation).
    """

    is_stream = True

    def order(self, epoch: int) -> Tensor:
        """See Loader."""
        return self._indices

    def _loaded(self, order: Order, pieces: list[Piece]) -> Iterator[Any]:
        wanted = [order.samples[piece.start : piece.stop].tolist() for piece in pieces]
        return self._in_process(lambda: self._groups(wanted, order.epoch))

    def _groups(self, wanted: list[list[int]], epoch: int) -> Iterator[Any]:
        """Yield a batch of each of the lists of positions, of which one follows the other."""
        stream = Stream(self._reading, self._options.seed, epoch)
        for group in wanted:
            first = stream.position
            found = stream.take(max(group) + 1 - first)
            if first + len(found) <= max(group):
                raise DataError(
                    f"the dataset ended after {stream.position} samples, but its __len__ says that"
                    " it has more; fix it"
                )
            yield self._collated([found[at - first] for at in group], epoch, group[0])


class Place(NamedTuple):
    """A place in a stream: the number of whole passes, and of samples in the next one."""

    passes: int = 0
    position: int = 0
    state: Any = None
    """the dataset's own, if it keeps one"""
    batches: int = 0
    """the batches until here"""


class UncountedLoader(IterableLoader):
    """Batches of an IterableDataset without a length, one pass after the other; see Loader.

    An epoch is `epoch_steps` of them, the next one continues where it ended, and a batch may hold
    the end of a pass and the begin of the next: each sample comes once in a pass. A dataset with a
    method `shard` gives each worker samples of its own; all of another are read by every worker,
    which keeps its part of each batch, so that a batch is the same on any number of workers.
    """

    def __init__(self, options: LoaderOptions, reading: Reading) -> None:
        super().__init__(torch.empty(0, dtype=torch.int64), options, reading)
        if options.augment.flip == "alternate":
            raise ConfigError(
                "dataset.augment.flip=alternate: mirrors a sample by its place among all, and a"
                " dataset without __len__ does not count them; use dataset.augment.flip=true"
            )
        self._place = Place()
        self._live: Iterator[Any] | None = None
        self._mine = local_slice(options.batch_size, options.shard.rank, options.shard.world_size)

    def __len__(self) -> int:
        return self._options.epoch_steps or 0

    @property
    def size(self) -> int:
        """Samples of an epoch, over all workers; 0 in an evaluation."""
        return len(self) * self._options.batch_size

    def numbers(self) -> Iterator[int]:
        """See Loader."""
        return itertools.count()

    def indices(self, epoch: int, number: int) -> Tensor:
        """See Loader; counted over all passes."""
        first = ((epoch - 1) * len(self) + number) * self._options.batch_size
        return torch.arange(first + self._mine.start, first + self._mine.stop)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch, and over how many workers shards are divided."""
        shards = self._options.shard.world_size if self._reading.is_sharded else 0
        return {**dict(zip(Place._fields, self._place, strict=True)), "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next epoch begin there. Raise ConfigError where it is in another shard."""
        there, here = state["shards"], self.state_dict()["shards"]
        if there != here:
            raise ConfigError(
                f"world_size={self._options.shard.world_size}: the checkpoint has places in"
                f" {there or 'no'} shards of the dataset, and here are {here or 'none'}; use"
                f" world_size={there or 1} and the dataset's code as it was"
            )
        self._place, self._live = Place(**{name: state[name] for name in Place._fields}), None

    def catch_up(self) -> None:
        """Go to the place, as long as it takes; else the next epoch does."""
        self._live = self._in_process(functools.partial(self._parts, self._place))
        self._place = next(self._live)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the next batches, as many as the epoch has left; the run's first from the start."""
        options, begins = self._options, epoch <= 1 and not skip
        if begins:  # what was read before does not count
            self._place, self._live = Place(), None
        if self._live is None:
            self.catch_up()
        assert self._live
        left = itertools.islice(self._live, len(self) - skip)
        batches = prefetched(self._whole(left), options.device)
        if options.mixing is None:
            return batches
        return options.mixing.mixed(batches, options.seed, epoch, skip)

    def _parts(self, begin: Place) -> Iterator[Any]:
        """Yield the place once it is reached, then this worker's part of each batch, and where."""
        size, first, last = self._options.batch_size, self._mine.start, self._mine.stop
        if self._reading.is_sharded:
            size, first, last = last - first, 0, last - first
        with_partner = range(first - (1 if self._options.mixing else 0), last)
        stream = self._pass(begin)
        if begin.state is None:
            self._read_past(stream, begin.position)
        yield begin
        for batches in itertools.count(begin.batches + 1):
            stream, found = self._taken(stream, size)
            place = Place(stream.epoch - 1, stream.position, stream.state, batches)
            mine = [found[at] for at in with_partner]
            yield self._collated(mine, batches, self._mine.start), place

    def _whole(self, loaded: Iterator[Any]) -> Iterator[Batch]:
        options, drawn = self._options, None
        first = self._mine.start - (1 if options.mixing else 0)
        places = torch.arange(first, self._mine.stop) % options.batch_size
        for part, place in loaded:
            if options.augment:
                drawn = options.augment.draw(options.batch_size, options.seed, place.batches)
                drawn = to_device(drawn[:, places], options.device)
            inputs, targets = self._finished(part, drawn)
            self._place = place
            yield Batch(inputs, targets, options.batch_size)

    def _taken(self, stream: Stream, size: int) -> tuple[Stream, list[Any]]:
        """Return the next samples, and the pass in which they end."""
        found = stream.take(size)
        while len(found) < size:
            if not stream.position:
                name = type(self._reading.dataset).__name__
                raise DataError(f"{name}: gives no sample in a pass")
            stream = self._pass(Place(stream.epoch))
            found += stream.take(size - len(found))
        return stream, found

    def _pass(self, place: Place) -> Stream:
        begin = None if place.state is None else (place.position, place.state)
        return Stream(self._reading, self._options.seed, place.passes + 1, begin)

    def _read_past(self, stream: Stream, position: int) -> None:
        """Read the samples before a position; warn of how long it takes."""
        began, is_told = time.monotonic(), self._options.shard.rank > 0
        while stream.position < position:
            stream.take(min(_AT_A_TIME, position - stream.position))
            took_s = time.monotonic() - began
            if not is_told and (took_s > _SOON_S or stream.position == position):
                is_told = True
                warn(
                    f"{type(self._reading.dataset).__name__}: has no state_dict and"
                    f" load_state_dict, so the {position:,} samples of this pass that were seen are"
                    f" read once more, which takes {took_s * position / stream.position:.1f} s"
                )

    def evaluation(self) -> Iterator[Batch]:
        """Yield this worker's samples of a pass, each once over all workers."""
        shard = Shard() if self._reading.is_sharded else self._options.shard

        def parts() -> Iterator[Any]:
            stream = Stream(self._reading)
            groups = enumerate(iter(lambda: stream.take(self._options.evaluated_at_once), []))
            mine = itertools.islice(groups, shard.rank, None, shard.world_size)
            return (self._collated(group, 0, number) for number, group in mine)

        for part in self._in_process(parts):
            batch = Batch(*self._finished(part, None), 0)
            yield batch._replace(global_size=batch.size)


_AT_A_TIME = 256
"""Samples that are read past at a time."""
_SOON_S = 0.5
"""The seconds after which it is said how long that takes."""


class Stream:
    """The samples of a pass over an IterableDataset, checked, which are seeded by their positions.

    It begins at a position and with the dataset's state there, if it has one.
    """

    def __init__(
        self, reading: Reading, seed: int = 0, epoch: int = 0, begin: tuple[int, Any] | None = None
    ) -> None:
        self._reading, self._seed, self.epoch = reading, seed, epoch
        self._kept = begin or (0, reading.start)
        self._samples, self._next = iter(()), -1
        self.position = self._kept[0]

    @property
    def state(self) -> Any:
        """The dataset's own at the position; None if it keeps none."""
        return self._kept[1]

    def take(self, count: int) -> list[Any]:
        """Return the next samples, fewer at the end. Raise what is wrong."""
        wanted = range(self.position, self.position + count)
        keys = Keys(self._seed, self.epoch, wanted)
        found = self._reading.seeding.read(self.read, keys, list)
        self.position += len(found)
        if self.state is not None:
            self._kept = self.position, state_of(self._reading.dataset)
        check = self._reading.check
        return [checked(check, at, one) for at, one in zip(wanted, found, strict=False)]

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at positions that follow one another, as they are."""
        if not 0 <= self._next <= indices[0]:  # they are read again: see Seeding
            self._restart()
        while self._next < indices[0] and self._taken(1):
            pass
        return self._taken(len(indices))

    def _restart(self) -> None:
        self._next, state = self._kept
        dataset: Any = self._reading.dataset
        with seeded(mix(self._seed, self.epoch)):
            try:
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(self.epoch)
                if state is not None:
                    dataset.load_state_dict(copy.deepcopy(state))
                self._samples = iter(dataset)
            except Exception as error:
                raise in_words(error, f"{type(dataset).__name__}.__iter__") from error

    def _taken(self, count: int) -> list[Any]:
        found = list[Any]()
        try:
            found.extend(itertools.islice(self._samples, count))  # keeps those before an error
        except Exception as error:
            name = type(self._reading.dataset).__name__
            raise in_words(error, f"sample {self._next + len(found)}: {name}.__iter__") from error
        self._next += len(found)
        return found
