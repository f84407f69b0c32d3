"""The loader of what does not fit in memory: torch's DataLoader reads this worker's samples."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import math
import multiprocessing
import os
import random
import signal
import stat
import statistics
import sys
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from expt import signals
from expt.data.checked_samples import Check, as_it_is, read_all
from expt.data.indexing import Piece, mix
from expt.data.loading import (
    Batch,
    Finish,
    Loader,
    LoaderOptions,
    Order,
    leaves,
    mapped,
    prefetched,
    to_device,
)
from expt.errors import ConfigError, DataError, ExptError

_BATCHES_AHEAD = 2  # for each reading process
# What a batch costs on its way from another process. On a CPU that process takes a core from
# training, so a sample is worth it only if it waits for a disk, or decodes a picture.
_CHEAP_SAMPLE_S, _CHEAP_BATCH_S = 100e-6, 1e-3

Read: TypeAlias = Callable[[Sequence[int]], list[Any]]
"""Returns the samples of these numbers. What it raises is an error for a person."""
Collate: TypeAlias = Callable[[list[Any]], tuple[Any, Any]]
"""Makes inputs and targets of a list of samples."""
_Made = TypeVar("_Made")
_States: TypeAlias = tuple[Any, Any, Tensor]


def _generators() -> _States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _are_equal(states: _States, others: _States) -> bool:
    return (
        torch.equal(states[2], others[2])
        and states[0] == others[0]
        and states[1][2:] == others[1][2:]
        and np.array_equal(states[1][1], others[1][1])
    )


def _put_back(states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch on exit."""
    before = _generators()
    try:
        yield
    finally:
        _put_back(before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch, and put them back: this may be the training process itself."""
    with preserved_generators():
        _seed(seed)
        yield


class Keys(NamedTuple):
    """The samples of one batch, and what their random numbers depend on."""

    seed: int
    epoch: int
    samples: Sequence[int]
    times: list[int] | None = None
    """how often each came before in the epoch: a repeated sample is augmented differently"""

    def seeds(self) -> Iterator[int]:
        """Return a seed for each sample."""
        for index, often in zip(self.samples, self.times or itertools.repeat(0), strict=False):
            yield mix(self.seed, self.epoch, index, *([often] if often else []))


class Seeding:
    """Reads batches, whose random numbers depend on the seed, the epoch and the samples only.

    Seeding every sample takes longer than reading a cheap one. So the first batch is read with a
    seed for each sample, to see whether it draws. If none does, the next batches are read without
    seeds, as long as no generator moves: those that move one are read again, and from then on
    every sample gets its seed.
    """

    def __init__(self) -> None:
        self._draws: bool | None = None

    def read(self, read: Read, keys: Keys, collate: Callable[[list[Any]], _Made]) -> _Made:
        """Return what `collate` makes of the samples of a batch."""
        is_own = get_worker_info() is not None  # a process has generators that nobody else uses
        if self._draws is False and not (is_own and len(keys.samples) == 1):  # quicker seeded
            before = _generators()
            try:
                found = collate(read(keys.samples))
            except ExptError:
                _put_back(before)
                raise
            if _are_equal(_generators(), before):
                return found
            _put_back(before)
            self._draws = True
        with contextlib.nullcontext() if is_own else preserved_generators():
            samples = list[Any]()
            for index, seed in zip(keys.samples, keys.seeds(), strict=True):
                samples += self._seeded(seed, read, [index])
            of_batch = mix(next(keys.seeds(), 0), len(samples))
            found = self._seeded(of_batch, collate, samples)
        self._draws = bool(self._draws)
        return found

    def _seeded(self, seed: int, make: Callable[[list[Any]], _Made], given: list[Any]) -> _Made:
        _seed(seed)
        before = _generators() if self._draws is None else None
        found = make(given)
        if before is not None and not _are_equal(_generators(), before):
            self._draws = True
        return found


@dataclass(frozen=True)
class Reading:
    """The dataset that is read, and the way its samples become a batch."""

    dataset: Dataset[Any]
    check: Check = as_it_is
    collate: Collate = default_collate
    num_workers: int = 0
    """processes that read"""
    finish: Finish | None = None
    """of images"""
    start: Any = None
    """the state of a stream that keeps one, before its first sample"""
    is_sharded: bool = False
    """whether the stream's samples are only this worker's"""
    seeding: Seeding = field(default_factory=Seeding)


class ReadingLoader(Loader):
    """Batches that torch's DataLoader reads, in this process or in others; see Loader."""

    def __init__(self, indices: Tensor, options: LoaderOptions, reading: Reading) -> None:
        super().__init__(indices, options)
        self._reading = reading

    @property
    def _collate(self) -> Collate:
        collate = self._reading.collate
        return collate if self.stay_double else functools.partial(_in_single, collate)

    def _collated(self, samples: list[Any], epoch: int, place: int) -> tuple[Any, Any]:
        """Return the batch of samples that a stream gave, which begins at this place."""
        if not hasattr(self._reading.dataset, "collate"):
            return self._collate(samples)
        keys, seeding = Keys(self._options.seed, epoch, [place]), self._reading.seeding
        return seeding.read(lambda _: [*samples], keys, self._collate)

    @abstractmethod
    def _loaded(self, order: Order, pieces: list[Piece]) -> Iterator[Any]:
        """Yield (inputs, targets), or an ExptError, for each piece."""

    def _in_process(self, items: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the items, which one process reads ahead, unless `num_workers` is 0."""
        how = loading_settings(self._options.device, min(1, self._reading.num_workers))
        if how["multiprocessing_context"] is None:
            return items()
        source = _Items(items)
        loader = DataLoader(source, batch_size=None, collate_fn=identity_collate, **how)
        found = read_ahead(loader)
        source.items = lambda: iter(())  # else a cycle holds the process, which ends 5 s late
        return map(raised, found)

    def _batches(self, order: Order, pieces: Iterable[Piece]) -> Iterator[Batch]:
        return prefetched(self._read(order, list(pieces)), self._options.device)

    def _read(self, order: Order, pieces: list[Piece]) -> Iterator[Batch]:
        if not pieces:
            return
        device = self._options.device
        drawn = None if order.drawn is None else to_device(order.drawn, device)
        for loaded, piece in zip(self._loaded(order, pieces), pieces, strict=True):
            numbers = None if drawn is None else drawn[:, piece.start : piece.stop]
            inputs, targets = self._finished(loaded, numbers)
            yield Batch(inputs, targets, piece.global_size, piece.weightless)

    def _finished(self, loaded: Any, drawn: Tensor | None) -> tuple[Any, Any]:
        """Return inputs and targets on the device."""
        device = self._options.device
        inputs, targets = mapped(lambda one: to_device(one, device), raised(loaded))
        if self._reading.finish is not None:
            inputs = self._reading.finish(inputs, drawn)
        return inputs, targets


def raised(loaded: Any) -> Any:
    """Return what another process has loaded. Raise it if it is an ExptError."""
    if isinstance(loaded, ExptError):
        # Not `loaded` itself: its traceback would hold this frame, a cycle that ends the
        # processes 5 s late.
        raise type(loaded)(loaded.problems if isinstance(loaded, ConfigError) else str(loaded))
    return loaded


def read_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return what a DataLoader yields, which other processes read."""
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork beside threads; torch's loader processes run none of the
        # parent's.
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        return iter(loader)


class _Items(IterableDataset[Any]):
    """The items that a function yields, in another process; see _Batches."""

    def __init__(self, items: Callable[[], Iterator[Any]]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.items()
        except ExptError as error:
            yield error


class SampleLoader(ReadingLoader):
    """Batches of a map-style Dataset; see Loader.

    Random augmentation in the dataset depends on the seed, the epoch and the sample only (and how
    often it came before in the epoch), so neither a restart nor `gpus` changes it. Raises
    DataError, while iterating, for what the dataset or `collate` raise as such.
    """

    @functools.cached_property
    def _keys(self) -> _EpochKeys:
        return _EpochKeys()

    @functools.cached_property
    def _reader(self) -> _Batches:
        return _Batches(self._reading, self._collate)

    @functools.cached_property
    def _loader(self) -> DataLoader[Any]:
        how = loading_settings(self._options.device, self._reading.num_workers)
        return DataLoader(
            self._reader,
            sampler=self._keys,
            batch_size=None,
            collate_fn=identity_collate,
            persistent_workers=how["num_workers"] > 0,
            **how,
        )

    def _loaded(self, order: Order, pieces: list[Piece]) -> Iterator[Any]:
        keys = _keys(order, pieces, self._options.seed)
        if self._reading.num_workers == 0:
            return map(self._reader.read, keys)
        self._keys.keys = keys
        return read_ahead(self._loader)


def _in_single(collate: Collate, samples: list[Any]) -> tuple[Any, Any]:
    found: tuple[Any, Any] = mapped(single, collate(samples))
    return found


def single(tensor: Tensor) -> Tensor:
    """Return float64 as float32, and anything else as it is."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


MEDIAN_OF = 4
"""Samples that are read to see how long one takes."""


def median_read_s(read: Read, size: int) -> float:
    """Return the median time to read samples 1 to 3; sample 0 is a warm-up."""
    times = []
    with preserved_generators(), contextlib.suppress(Exception):  # training reports what is wrong
        for index in range(1, min(MEDIAN_OF, size)):
            began = time.perf_counter()
            read([index])
            times.append(time.perf_counter() - began)
    return statistics.median(times) if len(times) == 3 else math.inf


def is_cheap(sample_s: float, options: LoaderOptions) -> bool:
    """Return whether samples are read in so few seconds that no processes are to be started."""
    if options.device.type == "cpu":
        return sample_s < _CHEAP_SAMPLE_S
    return sample_s * options.batch_size / options.shard.world_size < _CHEAP_BATCH_S


def _keys(order: Order, pieces: list[Piece], seed: int) -> Iterator[Keys]:
    for piece in pieces:
        here, times = slice(piece.start, piece.stop), order.times
        often = None if times is None else times[here].tolist()
        yield Keys(seed, order.epoch, order.samples[here].tolist(), often)


class _EpochKeys:
    """This worker's keys of an epoch; one object, so that loader processes outlive the epoch."""

    keys: Iterable[Keys] = ()

    def __iter__(self) -> Iterator[Keys]:
        return iter(self.keys)


class _Batches(Dataset[Any]):
    """Batches of a dataset, read in this process or in others.

    There an error for a person is returned: a loader process would wrap one that is raised in its
    own traceback.
    """

    def __init__(self, reading: Reading, collate: Collate) -> None:
        self._collate, self._seeding = collate, reading.seeding
        self._read = functools.partial(read_all, reading.dataset, reading.check)
        self._has_collate = hasattr(reading.dataset, "collate")

    def __getitem__(self, keys: Keys) -> tuple[Any, Any] | ExptError:
        try:
            return self.read(keys)
        except ExptError as error:
            return error

    def read(self, keys: Keys) -> tuple[Any, Any]:
        """Return a batch."""
        return self._seeding.read(self._read, keys, functools.partial(self._collated, keys))

    def _collated(self, keys: Keys, samples: list[Any]) -> tuple[Any, Any]:
        try:
            return self._collate(samples)
        except DataError as error:
            if self._has_collate or not (odd := _odd(samples)):
                raise
            other = f"has another shape than sample {keys.samples[0]}"
            raise DataError(f"sample {keys.samples[odd]} {other}: {error}") from error


def _odd(samples: list[Any]) -> int:
    """Return the place of a sample of other shapes than the first; 0 for none."""
    shapes = [[*map(np.shape, leaves(default_convert(sample)))] for sample in samples]
    return next((place for place, each in enumerate(shapes) if each != shapes[0]), 0)


def identity_collate(batch: Any) -> Any:
    """Return the batch unchanged, as a collate_fn."""
    return batch


def loading_settings(device: torch.device, num_workers: int) -> dict[str, Any]:
    """Return the arguments of torch's DataLoader for its processes."""
    if multiprocessing.current_process().daemon:  # of a Pool, which may have no children
        num_workers = 0
    # Fork, where it exists: a loader process must be this process's child to die with it, and
    # starts in milliseconds.
    forks = (
        num_workers > 0
        and sys.platform != "darwin"
        and "fork" in multiprocessing.get_all_start_methods()
    )
    return {
        "num_workers": num_workers,
        "pin_memory": device.type == "cuda",
        "prefetch_factor": _BATCHES_AHEAD if num_workers > 0 else None,
        "multiprocessing_context": "fork" if forks else None,
        # else each pass would draw from the generator that training uses
        "generator": torch.Generator(),
        "worker_init_fn": functools.partial(_start_process, parent=os.getpid() if forks else None),
    }


def _start_process(_worker: int, parent: int | None) -> None:
    # Ctrl-C reaches the whole group; the worker decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux" and parent is not None:
        signals.die_with_parent(parent)
        _open_anew()


def _open_anew() -> None:
    """Open the regular files of the parent again in this process, at the same places.

    A descriptor shares its place in the file with all processes that were forked with it: those
    that read by it, as a custom dataset does, would get what is not theirs.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own; what may not be opened again
            number = int(name)
            if number <= 2 or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            if flags & os.O_ACCMODE == os.O_WRONLY:  # such as a log: all write to its end
                continue
            anew = os.open(f"/proc/self/fd/{number}", flags | os.O_CLOEXEC)
            os.lseek(anew, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(anew, number, inheritable=os.get_inheritable(number))
            os.close(anew)
