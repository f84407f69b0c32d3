"""Samples of custom datasets, nested tensors of any kind; loaders of an IterableDataset."""

from __future__ import annotations

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
from expt.config.user_code import own_frame
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
    Seeding,
    in_process,
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
    start: Any = None,
) -> Load:
    """Return what makes a loader of the samples at given indices, each once it is checked.

    A sample is (inputs, targets), anything else is inputs only. Samples are stacked as torch's
    default_collate does, unless there is a `collate`, or the dataset has a method of that name,
    which makes a batch of a list. Images of so many `channels` are normalised and augmented.
    `start` is the state of a stream that keeps one, before anything is read.
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
            return UncountedLoader(options, _of_worker(reading, start, options.shard))
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


def _of_worker(reading: Reading, start: Any, shard: Shard) -> Reading:
    """Return what this worker reads of a stream, and the state in which it begins."""
    dataset: Any = reading.dataset
    if not hasattr(dataset, "shard"):
        return dataclasses.replace(reading, start=start)
    name = type(dataset).__name__
    try:
        if start is not None:  # before what was read to see what samples are
            dataset.load_state_dict(copy.deepcopy(start))
        dataset = dataset.shard(num_shards=shard.world_size, index=shard.rank)
    except Exception as error:
        raise in_words(error, f"{name}.shard") from error
    if not isinstance(dataset, IterableDataset):
        raise ConfigError(f"{name}.shard: returned {described(dataset)}; return the dataset")
    return dataclasses.replace(reading, dataset=dataset, start=state_of(dataset), is_sharded=True)


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
    is_counted = size_of(dataset) is not None
    with seeded(0):
        found = Stream(dataset, 0, 0, is_counted=is_counted).read([0])
    if not found:
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
        return in_process(
            lambda: map(self._collate, self._groups(wanted, order.epoch)),
            self._reading.num_workers,
        )

    def _groups(self, wanted: list[list[int]], epoch: int) -> Iterator[list[Any]]:
        """Yield the samples at each of the lists of positions, of which one follows the other."""
        stream = Stream(self._reading.dataset, self._options.seed, epoch)
        read = 0
        for group in wanted:
            here = range(read, max(group) + 1)
            found = self._seeding.read(stream, Keys(self._options.seed, epoch, here))
            yield [checked(self._reading.check, at, found[at - read]) for at in group]
            read = here.stop


class Place(NamedTuple):
    """A place in a stream: after so many passes, and samples of one more."""

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
        self._live: Iterator[Batch] | None = None
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
        """Go to the place, as long as it takes. Raise ConfigError where it is in another shard."""
        there, here = state["shards"], self.state_dict()["shards"]
        if there != here:
            raise ConfigError(
                f"world_size={self._options.shard.world_size}: the checkpoint has places in"
                f" {there or 'no'} shards of the dataset, and here are {here or 'none'}; use"
                f" world_size={there or 1} and the dataset's code as it was"
            )
        known = {name: value for name, value in state.items() if name in Place._fields}
        self._live = self._onwards(Place(**known))

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the next batches, as many as the epoch has left; the run's first from the start."""
        options, done = self._options, max(0, epoch - 1) * len(self) + skip
        if self._live is None or not done:  # what was read before the run began does not count
            self._live = self._onwards(Place())
        batches = itertools.islice(self._live, len(self) - skip)
        if options.mixing is None:
            return batches
        return options.mixing.mixed(batches, options.seed, epoch, skip)

    def _onwards(self, place: Place) -> Iterator[Batch]:
        """Return the batches from a place on, which is reached by then."""
        options, reading = self._options, self._reading
        size = self._mine.stop - self._mine.start if reading.is_sharded else options.batch_size
        loaded = in_process(functools.partial(self._parts, place, size), reading.num_workers)
        self._place = next(loaded)
        return prefetched(self._whole(loaded), options.device)

    def _parts(self, begin: Place, size: int) -> Iterator[Any]:
        """Yield a place once it is reached, then this worker's part of each batch, and the next."""
        before = 1 if self._options.mixing else 0  # a partner of the first
        for found, place in self._passes(begin, size, self._options.seed, endless=True):
            if not found:
                yield place
                continue
            first = 0 if self._reading.is_sharded else self._mine.start
            last = first + self._mine.stop - self._mine.start
            yield self._collate([found[at] for at in range(first - before, last)]), place

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

    def _passes(
        self, place: Place, size: int, seed: int, *, endless: bool
    ) -> Iterator[tuple[list[Any], Place]]:
        """Yield no sample, once the place is reached; then `size` of them, and the place after.

        Pass after pass, or only one, which is an evaluation's.
        """
        dataset, check = self._reading.dataset, self._reading.check
        passes, position, state, batches = place
        stream = self._pass(place, seed, endless=endless)
        if state is None:
            self._read_past(stream, place)
        yield [], place
        while True:
            found = list[Any]()
            while len(found) < size:
                wanted = range(position, position + size - len(found))
                epoch = passes + 1 if endless else 0
                read = self._seeding.read(stream, Keys(seed, epoch, wanted))
                found += [checked(check, at, one) for at, one in zip(wanted, read, strict=False)]
                position += len(read)
                if len(read) == len(wanted):
                    continue
                if not endless:
                    break
                if not position:
                    raise DataError(f"{type(dataset).__name__}: gives no sample in a pass")
                passes, position = passes + 1, 0
                stream = self._pass(Place(passes), seed, endless=True)
            if not found:
                return
            batches += 1
            yield found, Place(passes, position, stream.keep(position), batches)

    def _pass(self, place: Place, seed: int, *, endless: bool) -> Stream:
        state = self._reading.start if place.state is None else place.state
        begin = 0 if place.state is None else place.position
        epoch = place.passes + 1 if endless else 0
        return Stream(
            self._reading.dataset, seed, epoch, begin=begin, state=state, is_counted=False
        )

    def _read_past(self, stream: Stream, place: Place) -> None:
        """Read the samples before a place; warn of how long it takes."""
        began, is_told = time.monotonic(), self._options.shard.rank > 0
        name, (passes, position, *_) = type(self._reading.dataset).__name__, place
        for start in range(0, position, _AT_A_TIME):
            here = range(start, min(start + _AT_A_TIME, position))
            self._seeding.read(stream, Keys(self._options.seed, passes + 1, here))
            seconds = (time.monotonic() - began) * position / here.stop
            if not is_told and (time.monotonic() - began > _SOON_S or here.stop == position):
                is_told = True
                warn(
                    f"{name}: has no state_dict and load_state_dict, so the {position:,} samples of"
                    f" this pass that were seen are read once more, which takes {seconds:.1f} s"
                )

    def evaluation(self) -> Iterator[Batch]:
        """Yield this worker's samples of a pass, each once over all workers."""
        options = self._options
        every, mine = options.shard.world_size, options.shard.rank
        if self._reading.is_sharded:
            every, mine = 1, 0

        def parts() -> Iterator[Any]:
            groups = self._passes(Place(), options.evaluated_at_once, 0, endless=False)
            for found, _ in itertools.islice(groups, 1 + mine, None, every):
                yield self._collate(found)

        for part in in_process(parts, self._reading.num_workers):
            batch = Batch(*self._finished(part, None), 0)
            yield batch._replace(global_size=batch.size)


_AT_A_TIME = 256
"""Samples that are read past at a time."""
_SOON_S = 0.5
"""The seconds after which it is said how long that takes."""


class Stream:
    """The samples of a pass over an IterableDataset, which begins anew for an earlier one.

    With a `state` it begins by loading that, which was kept before the sample `begin`. The end of
    one that is not counted is no error: the samples that are there are returned.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        epoch: int,
        *,
        begin: int = 0,
        state: Any = None,
        is_counted: bool = True,
    ) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch
        self._kept, self._is_counted = (begin, state), is_counted
        self._samples, self._next = iter(()), -1

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at positions that follow one another. Raise what is wrong."""
        if not 0 <= self._next <= indices[0]:
            self._restart()
        while self._next < indices[0] and self._taken(1):
            pass
        return self._taken(len(indices))

    def keep(self, position: int) -> Any:
        """Return the dataset's state, after the samples that were read; None if it has none."""
        if self._kept[1] is not None:
            self._kept = position, state_of(self._dataset)
        return self._kept[1]

    def _restart(self) -> None:
        self._next, state = self._kept
        with seeded(mix(self._seed, self._epoch)):
            try:
                if hasattr(self._dataset, "set_epoch"):
                    self._dataset.set_epoch(self._epoch)
                if state is not None:
                    self._dataset.load_state_dict(copy.deepcopy(state))
                self._samples = iter(self._dataset)
            except Exception as error:
                raise in_words(error, f"{type(self._dataset).__name__}.__iter__") from error

    def _taken(self, count: int) -> list[Any]:
        found = list[Any]()
        try:
            found.extend(itertools.islice(self._samples, count))  # keeps those before an error
        except Exception as error:
            where = f"sample {self._next + len(found)}: {type(self._dataset).__name__}.__iter__"
            raise in_words(error, where) from error
        self._next += len(found)
        if len(found) < count and self._is_counted:
            raise DataError(
                f"the dataset ended after {self._next} samples, but its __len__ says that it has"
                " more; fix it"
            )
        return found
