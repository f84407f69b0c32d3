"""The two loaders of a worker's batches: of samples by their numbers, and of a stream."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.data import indexing
from expt.data.checked_samples import Check, as_it_is, in_words
from expt.data.indexing import Piece, local_slice
from expt.data.loading import (
    MIN_EVAL_BATCH,
    Batch,
    Finish,
    Held,
    LoaderOptions,
    Order,
    Shard,
    mapped,
    prefetched,
    to_device,
)
from expt.data.samples import (
    Collate,
    Reader,
    Reading,
    Stream,
    collate_of,
    collated,
    is_cheap,
    raised,
    single,
    size_of,
    state_of,
)
from expt.data.seeding import Keys
from expt.errors import ConfigError, DataError, described, warn

_Block: TypeAlias = tuple[Any, Any, list[Piece]]
"""Inputs and targets of pieces of one size: a batch each."""
_AT_A_TIME = 256
"""Samples that are read past at a time."""
_SOON_S = 0.5
"""The seconds after which it is said how long that takes."""


class _Loader:
    """The parts that both loaders share: their batches, once read, are prepared on the device."""

    def __init__(self, options: LoaderOptions, reading: Reading) -> None:
        self._options, self._reading = options, reading
        self._reader = Reader(reading, options.device)
        self.stay_double = False
        """True if float64 stays as it is, for a model in double; set before anything is read."""

    @property
    def is_stream(self) -> bool:
        """True if samples come only one after the other."""
        return isinstance(self._reading.dataset, IterableDataset)

    @property
    def keeps_order(self) -> bool:
        """True if a batch has a row for each sample in order: nothing collates or mixes them."""
        return self._options.mixing is None and not self._reading.has_collate

    def _prepared(self, loaded: Any, drawn: Tensor | None) -> tuple[Any, Any]:
        """Return inputs and targets on the device, images as a model gets them."""
        inputs, targets = mapped(self._on_device, raised(loaded))
        if self._reading.finish is not None:
            inputs = self._reading.finish(inputs, drawn)
        return inputs, targets

    def _on_device(self, tensor: Tensor) -> Tensor:
        tensor = to_device(tensor, self._options.device)
        return tensor if self.stay_double else single(tensor)

    def _collated(self, samples: list[Any], epoch: int, place: int) -> tuple[Any, Any]:
        """Return the batch of samples that a stream gave, which begins at this place."""
        if not self._reading.has_collate:
            return self._reading.collate(samples)
        keys, seeding = Keys(self._options.seed, epoch, [place]), self._reading.seeding
        return seeding.read(lambda _: [*samples], keys, self._reading.collate)


class IndexLoader(_Loader):
    """The batches of one split, for one worker.

    Samples of a Held dataset are gathered, those of an IterableDataset with a length come in its
    order, and any other Dataset is read by the samples' numbers. Random augmentation in a dataset
    depends on the seed, the epoch and the sample only (and how often it came before in the epoch),
    so neither a restart nor `gpus` changes it. Iterating raises the errors of the dataset and of
    `collate`.
    """

    def __init__(self, indices: Tensor, options: LoaderOptions, reading: Reading) -> None:
        super().__init__(options, reading)
        self._indices = indices
        self._held: Held | None = None

    @property
    def size(self) -> int:
        """Samples in the split, over all workers; 0 where they are not counted."""
        return len(self._indices)

    def numbers(self) -> Iterator[int]:
        """Yield which samples of the dataset's part these are, in order."""
        return iter(self._indices.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data for a checkpoint: none, as the step says it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        assert not state

    def __len__(self) -> int:
        """Batches per epoch; the same number on every worker."""
        return indexing.num_batches(self.size, self._options.batch_size, self._options.drop_last)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield this worker's share of each batch of an epoch, after the first `skip`, unread."""
        options, pieces, samples = self._options, self._pieces(skip), self.order(epoch)
        drawn = None
        if options.augment:
            drawn = options.augment.draw(self.size, options.seed, epoch)
            drawn = options.augment.in_turn(drawn, samples, self._indices, options.seed, epoch)
        times = None if options.balanced is None else indexing.times_before(samples)
        order = Order(samples, epoch, drawn, times)
        if options.mixing is None:
            return self._batches(order, pieces)
        positions, wider = indexing.with_partners([*pieces], options.batch_size, skip)
        batches = self._batches(order.at(positions), wider)
        return options.mixing.mixed(batches, options.seed, epoch, skip)

    def indices(self, epoch: int, number: int) -> Tensor:
        """Return the samples of this worker's share of an epoch's batch `number`, int64 [b]."""
        piece = next(self._pieces(number))
        return self.order(epoch)[piece.start : piece.stop]

    def order(self, epoch: int) -> Tensor:
        """Return all samples as an epoch takes them, int64 [N]."""
        options = self._options
        if not options.shuffle:
            return self._indices
        if options.balanced is not None:
            order = indexing.balanced(options.balanced, options.seed, epoch)
        else:
            order = indexing.permutation(self.size, options.seed, epoch)
        if options.lengths is not None:
            about = options.lengths, options.batch_size, options.seed, epoch
            order = indexing.by_length(order, *about)
        return torch.index_select(self._indices, 0, order, out=indexing.numbers(self.size))

    def _pieces(self, skip: int) -> Iterator[indexing.Piece]:
        options, shard = self._options, self._options.shard
        return indexing.train_pieces(
            self.size, options.batch_size, options.drop_last, shard.rank, shard.world_size, skip
        )

    def evaluation(self) -> Iterator[Batch]:
        """Yield this worker's samples, each once over all workers, in batches of unequal number."""
        shard, chunk = self._options.shard, self._options.evaluated_at_once
        pieces = indexing.eval_pieces(self.size, chunk, shard.rank, shard.world_size)
        return self._batches(Order(self._indices), pieces)

    def first(self, number: int) -> Iterator[Batch]:
        """Yield the split's first samples as an evaluation sees them, on this worker."""
        first = self._indices[:number]
        return self._batches(Order(first), indexing.eval_pieces(len(first), MIN_EVAL_BATCH, 0, 1))

    def _batches(self, order: Order, pieces: Iterable[Piece]) -> Iterator[Batch]:
        """Yield a batch for each of `pieces`, which are ranges of `order`."""
        finished = prefetched(self._finished(order, pieces), self._options.device)
        for inputs, targets, block in finished:
            size, number, weightless = _size(block[0])
            parts = [(inputs, targets)]
            if len(block) > 1:
                parts = [*zip(inputs.split(size), targets.split(size), strict=True)]
            for part in parts:
                yield Batch(*part, number, weightless).of_size(size)

    def _finished(self, order: Order, pieces: Iterable[Piece]) -> Iterator[_Block]:
        drawn = None if order.drawn is None else to_device(order.drawn, self._options.device)
        for loaded, block in self._loaded(order, pieces):
            yield *self._prepared(loaded, None if drawn is None else _spread(drawn, block)), block

    def _loaded(self, order: Order, pieces: Iterable[Piece]) -> Iterator[tuple[Any, list[Piece]]]:
        """Yield (inputs, targets), or an ExptError, of one piece or of several of one size."""
        dataset = self._reading.dataset
        if self._held is None and isinstance(dataset, Held):
            self._held = dataset.held(self._indices, self._options)
        if self._held is not None:
            # Once per epoch, so that no batch waits for a copy.
            samples = to_device(order.samples, self._held.device)
            for block in _blocks(pieces, self._held.at_once(self._options.device)):
                yield self._held.gather(_spread(samples, block)), block
        elif alone := [*pieces]:
            read = self._in_order if self.is_stream else self._by_number
            yield from zip(read(order, alone), ([piece] for piece in alone), strict=True)

    def _by_number(self, order: Order, pieces: list[Piece]) -> Iterator[Any]:
        return self._reader.read(_keys(order, pieces, self._options.seed))

    def _in_order(self, order: Order, pieces: list[Piece]) -> Iterator[Any]:
        def batches() -> Iterator[Any]:
            stream = Stream(self._reading, self._options.seed, order.epoch)
            for piece in pieces:
                wanted = order.samples[piece.start : piece.stop].tolist()
                first, last = stream.position, max(wanted)
                found = stream.take(last + 1 - first)
                if first + len(found) <= last:
                    raise DataError(
                        f"the dataset ended after {stream.position} samples, but its __len__ says"
                        " that it has more; fix it"
                    )
                yield self._collated([found[at - first] for at in wanted], order.epoch, wanted[0])

        return self._reader.ahead(batches)


def _keys(order: Order, pieces: list[Piece], seed: int) -> Iterator[Keys]:
    """Yield the keys of each piece; no method: a loader in a cycle ends its processes 5 s late."""
    for piece in pieces:
        here = order.at(slice(piece.start, piece.stop))
        times = None if here.times is None else here.times.tolist()
        yield Keys(seed, order.epoch, here.samples.tolist(), times)


def _blocks(pieces: Iterable[Piece], samples: int) -> Iterator[list[Piece]]:
    """Yield runs of pieces of one size, evenly spaced, of up to `samples`, or one piece."""
    for size, run in itertools.groupby(pieces, key=_size):
        most = max(1, samples // size[0])
        while block := list(itertools.islice(run, most)):
            yield block


def _size(piece: Piece) -> tuple[int, int, bool]:
    return piece.stop - piece.start, piece.global_size, piece.weightless


def _spread(values: Tensor, block: list[Piece]) -> Tensor:
    """Return `values` [..., N] at the positions of a block's pieces [..., samples]."""
    first, last = block[0], block[-1]
    taken = values[..., first.start : last.stop]
    if len(block) == 1:
        return taken
    return taken.unfold(-1, first.stop - first.start, block[1].start - first.start).flatten(-2)


class Position(NamedTuple):
    """A place in a stream: the number of whole passes, and of samples in the next one."""

    passes: int = 0
    position: int = 0
    state: Any = None
    """the dataset's own, if it keeps one"""
    batches: int = 0
    """the batches until here"""


class StreamLoader(_Loader):
    """Batches of an IterableDataset without a length, one pass after the other.

    An epoch is `epoch_steps` of them, the next one continues where it ended, and a batch may hold
    the end of a pass and the begin of the next: each sample comes once in a pass. A dataset with a
    method `shard` gives each worker samples of its own; all of another are read by every worker,
    which keeps its part of each batch, so that a batch is the same on any number of workers.
    """

    def __init__(self, options: LoaderOptions, reading: Reading) -> None:
        super().__init__(options, reading)
        if options.augment.flip == "alternate":
            raise ConfigError(
                "dataset.augment.flip=alternate: mirrors a sample by its place among all, and a"
                " dataset without __len__ does not count them; use dataset.augment.flip=true"
            )
        self._position = Position()
        self._live: Iterator[Any] | None = None
        """The shares that follow the position, once something has been read."""
        self._mine = local_slice(options.batch_size, options.shard.rank, options.shard.world_size)

    def __len__(self) -> int:
        return self._options.epoch_steps or 0

    @property
    def size(self) -> int:
        """Samples of an epoch, over all workers; 0 in an evaluation."""
        return len(self) * self._options.batch_size

    def numbers(self) -> Iterator[int]:
        """See IndexLoader."""
        return itertools.count()

    def indices(self, epoch: int, number: int) -> Tensor:
        """See IndexLoader; counted over all passes."""
        first = ((epoch - 1) * len(self) + number) * self._options.batch_size
        return torch.arange(first + self._mine.start, first + self._mine.stop)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch, and over how many workers shards are divided."""
        shards = self._options.shard.world_size if self._reading.is_sharded else 0
        return {**dict(zip(Position._fields, self._position, strict=True)), "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next epoch begin there. Raise ConfigError where it is in another shard."""
        there, here = state["shards"], self.state_dict()["shards"]
        if there != here:
            raise ConfigError(
                f"world_size={self._options.shard.world_size}: the checkpoint has places in"
                f" {there or 'no'} shards of the dataset, and here are {here or 'none'}; use"
                f" world_size={there or 1} and the dataset's code as it was"
            )
        self._position = Position(**{name: state[name] for name in Position._fields})
        self._live = None

    def catch_up(self) -> None:
        """Go to the place, as long as it takes; else the next epoch does."""
        self._live = self._reader.ahead(functools.partial(self._shares, self._position))
        self._position = next(self._live)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the next batches, as many as the epoch has left; the run's first from the start."""
        options, begins = self._options, epoch <= 1 and not skip
        if begins:  # samples that were read before do not count
            self._position, self._live = Position(), None
        if self._live is None:
            self.catch_up()
        assert self._live
        left = itertools.islice(self._live, len(self) - skip)
        batches = prefetched(self._batches(left), options.device)
        if options.mixing is None:
            return batches
        return options.mixing.mixed(batches, options.seed, epoch, skip)

    def _shares(self, begin: Position) -> Iterator[Any]:
        """Yield the place once it is reached, then this worker's part of each batch, and where."""
        size, first, last = self._options.batch_size, self._mine.start, self._mine.stop
        if self._reading.is_sharded:
            size, first, last = last - first, 0, last - first
        with_partner = range(first - (1 if self._options.mixing else 0), last)
        stream = self._stream_from(begin)
        if begin.state is None:
            self._read_past(stream, begin.position)
        yield begin
        for batches in itertools.count(begin.batches + 1):
            stream, found = self._next_samples(stream, size)
            place = Position(stream.epoch - 1, stream.position, stream.state, batches)
            mine = [found[at] for at in with_partner]
            yield self._collated(mine, batches, self._mine.start), place

    def _batches(self, loaded: Iterator[Any]) -> Iterator[Batch]:
        options, drawn = self._options, None
        first = self._mine.start - (1 if options.mixing else 0)
        places = torch.arange(first, self._mine.stop) % options.batch_size
        for part, place in loaded:
            if options.augment:
                drawn = options.augment.draw(options.batch_size, options.seed, place.batches)
                drawn = to_device(drawn[:, places], options.device)
            inputs, targets = self._prepared(part, drawn)
            self._position = place
            yield Batch(inputs, targets, options.batch_size).of_size(len(places))

    def _next_samples(self, stream: Stream, size: int) -> tuple[Stream, list[Any]]:
        """Return the next samples, and the pass in which they end."""
        found = stream.take(size)
        while len(found) < size:
            if not stream.position:
                name = type(self._reading.dataset).__name__
                raise DataError(f"{name}: gives no sample in a pass")
            stream = self._stream_from(Position(stream.epoch))
            found += stream.take(size - len(found))
        return stream, found

    def _stream_from(self, place: Position) -> Stream:
        begin = None if place.state is None else (place.position, place.state)
        return Stream(self._reading, self._options.seed, place.passes + 1, begin)

    def _read_past(self, stream: Stream, position: int) -> None:
        """Read the samples before a position; warn of how long it takes."""
        began, is_told = time.monotonic(), self._options.shard.rank > 0
        while stream.position < position:
            if not stream.take(min(_AT_A_TIME, position - stream.position)):
                raise DataError(
                    f"{type(self._reading.dataset).__name__}: gives {stream.position:,} samples in"
                    f" this pass, of which {position:,} were seen; give it those that it had"
                )
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
            for number, group in mine:
                yield self._collated(group, 0, number), len(group)

        for part, size in self._reader.ahead(parts):
            yield Batch(*self._prepared(part, None), size).of_size(size)


Loader: TypeAlias = IndexLoader | StreamLoader
"""The batches of one split, for one worker."""
Load: TypeAlias = Callable[[Tensor, LoaderOptions], Loader]
"""Makes a loader of the samples at some indices."""


def loading(
    dataset: Dataset[Any],
    num_workers: int = 0,
    check: Check = as_it_is,
    *,
    collate: Collate | None = None,
    channels: int | None = None,
    sample_s: float = math.inf,
) -> Load:
    """Return a function that makes a loader of the samples at given indices, each checked.

    A sample is (inputs, targets), anything else is inputs only. Samples are stacked as torch's
    default_collate does, unless there is a `collate`, or the dataset has a method of that name,
    which makes a batch of a list. Images with `channels` are normalised and augmented.
    """

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        is_stream = isinstance(dataset, IterableDataset)
        if isinstance(dataset, Held):
            at_once = dataset.evaluated_at_once(options)
            options = dataclasses.replace(options, eval_batch_size=at_once)
        if is_stream and options.balanced is not None:
            raise ConfigError(
                "dataset.sampling=balanced: an IterableDataset comes in its own order, and can't be"
                " drawn from; use dataset.sampling=null with task.class_weights=balanced, or a"
                " map-style Dataset"
            )
        reading = Reading(
            dataset,
            check,
            collate or functools.partial(collated, own=collate_of(dataset)),
            0 if is_cheap(sample_s, options) else num_workers,
            None if channels is None else Finish(options, channels),
        )
        if size_of(dataset) is None:
            return StreamLoader(options, _of_worker(reading, options.shard))
        if is_stream:
            in_order = dataclasses.replace(options, shuffle=False)
            return IndexLoader(indices.sort().values, in_order, reading)
        return IndexLoader(indices, options, reading)

    return load


def _of_worker(reading: Reading, shard: Shard) -> Reading:
    """Return the part of a stream that this worker reads, and the state in which it begins."""
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
