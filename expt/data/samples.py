"""Samples of a dataset: read one by one, in this process or in others, and made a batch."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import itertools
import math
import multiprocessing
import os
import signal
import stat
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias, cast

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
from expt.config import secrets
from expt.config.own_code import place_of
from expt.data.checked_samples import (
    Check,
    as_it_is,
    checked,
    in_words,
    read,
    read_all,
    without_gpu,
)
from expt.data.indexing import mix
from expt.data.loading import ROWS, Finish, LoaderOptions, PerSample, leaves, mapped
from expt.data.seeding import Keys, Read, Seeding, preserved_generators, seeded
from expt.errors import ConfigError, DataError, ExptError

_BATCHES_AHEAD = 2  # for each reading process
# The cost of a batch on its way from another process. On a CPU that process takes a core from
# training, so a sample is worth it only if it waits for a disk, or decodes a picture.
_CHEAP_SAMPLE_S, _CHEAP_BATCH_S = 100e-6, 1e-3

Collate: TypeAlias = Callable[[list[Any]], tuple[Any, Any]]
"""Makes inputs and targets of a list of samples."""


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

    @property
    def has_collate(self) -> bool:
        """True if the dataset itself makes batches."""
        return getattr(self.dataset, "collate", None) is not None


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


class OwnCollate:
    """A dataset's own method that makes a batch of samples.

    A list whose length follows the number of samples becomes PerSample. A batch of one sample more
    shows which do: two views of 2 images are a list of 2, too.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._paths: frozenset[_Path] | None = None
        """of such lists, once a batch has been looked at"""

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch."""
        first = list[Any]()
        with contextlib.suppress(Exception):  # a sample may hold an open file
            first = copy.deepcopy(samples[:1]) if self._paths is None else first
        batch = self._collate(samples)
        if self._paths is None:
            self._paths = frozenset(self._found(first, len(samples), dict(_lengths(batch))))
        return _marked(batch, self._paths) if self._paths else batch

    def _found(self, first: list[Any], size: int, lengths: dict[_Path, int]) -> Iterator[_Path]:
        if not first or size not in lengths.values():
            return
        other = 2 if size == 1 else 1
        with preserved_generators(), contextlib.suppress(Exception):  # it may want several samples
            others = dict(_lengths(self._collate(first * other)))
            yield from (
                path for path, n in lengths.items() if n == size and others.get(path) == other
            )


_Path: TypeAlias = tuple[Any, ...]


def _lengths(tree: Any, path: _Path = ()) -> Iterator[tuple[_Path, int]]:
    """Yield the lengths of lists and tuples in a batch, by their paths."""
    if isinstance(tree, list | tuple):
        yield path, len(tree)
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, below in items:
            yield from _lengths(below, (*path, key))


def _marked(tree: Any, paths: Collection[_Path], path: _Path = ()) -> Any:
    """Return a batch with the lists at `paths` as PerSample."""
    if path in paths:
        return PerSample(tree)
    if isinstance(tree, Mapping):
        return {key: _marked(below, paths, (*path, key)) for key, below in tree.items()}
    if isinstance(tree, list | tuple):
        items = [_marked(below, paths, (*path, at)) for at, below in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def collate_of(dataset: Any) -> OwnCollate | None:
    """Return the dataset's own method that makes a batch of samples; None if it has none."""
    own = getattr(dataset, "collate", None)
    return own and OwnCollate(own)


def collated(samples: list[Any], own: Callable[[list[Any]], Any] | None = None) -> tuple[Any, Any]:
    """Return inputs and targets of a batch. Raise DataError."""
    try:
        batch = (own or default_collate)(samples)
    except DataError:
        raise
    except Exception as error:
        fix = "give the dataset a collate"
        if own:
            fix = f"fix the dataset's method collate{place_of(error)}"
        fix = without_gpu(str(error)) or fix
        raise DataError(f"samples cannot be made a batch: {secrets.said(error)}; {fix}") from error
    inputs, targets, size = batch, None, None
    if isinstance(batch, list | tuple) and not isinstance(batch, PerSample):
        if len(batch) == 2:
            inputs, targets = batch
        elif own and len(batch) == 3 and type(batch[2]) is int:
            inputs, targets, size = batch
    rows = [*leaves((targets, inputs), ROWS)]
    if not rows or any(isinstance(one, Tensor) and one.dim() == 0 for one in rows):
        raise DataError(
            f"a batch ({type(batch).__name__}) must contain only tensors [samples, ...]"
        )
    if size not in (None, len(samples)):
        raise DataError(
            f"collate returns the size {size} for {len(samples)} samples; return len(samples)"
        )
    if own and size is None and len(rows[0]) != len(samples):
        raise DataError(
            f"collate makes tensors of {len(rows[0])} for {len(samples)} samples; put the samples"
            " first, each once, or let targets be [samples, ...]; where both are of another order,"
            " such as a graph's nodes, return (inputs, targets, len(samples))"
        )
    # One that requires grad can't be sent to another process.
    both: tuple[Any, Any] = mapped(Tensor.detach, (inputs, targets))
    return both


def first(dataset: Dataset[Any]) -> Any:
    """Return the first sample. Raise DataError where there is none."""
    if not isinstance(dataset, IterableDataset):
        return read(dataset, 0)
    if not (found := Stream(Reading(dataset)).take(1)):
        raise DataError(f"{type(dataset).__name__}: gives no sample")
    return found[0]


def example(dataset: Dataset[Any], sample: Any, check: Check) -> tuple[Any, Any]:
    """Return the inputs and targets of the first `sample`. Raise DataError.

    Zeros may be no boxes, nor lengths of sequences.
    """

    def of_first(rows: Tensor | PerSample) -> Tensor | PerSample:
        if isinstance(rows, Tensor):
            return single(rows[0]).clone()
        return PerSample(mapped(single, rows[:1]))

    batch = collated([checked(check, 0, sample)], collate_of(dataset))
    found: tuple[Any, Any] = mapped(of_first, batch, ROWS)
    return found


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
        """Return the next samples, fewer at the end, once they are checked."""
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


class Reader:
    """Reads batches, in this process or in others; those that read by number outlive an epoch."""

    def __init__(self, reading: Reading, device: torch.device) -> None:
        self._batches, self._device = _Batches(reading), device
        self._num_workers, self._keys = reading.num_workers, _EpochKeys()

    def read(self, keys: Iterator[Keys]) -> Iterator[Any]:
        """Return a batch for each of the keys."""
        if self._num_workers == 0:
            return map(self._batches.read, keys)
        self._keys.keys = keys
        return _read_ahead(self._loader)

    @functools.cached_property
    def _loader(self) -> DataLoader[Any]:
        how = _processes(self._device, self._num_workers)
        stay = how["num_workers"] > 0
        return DataLoader(self._batches, sampler=self._keys, persistent_workers=stay, **how)

    def ahead(self, items: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the items, which one process reads ahead, unless `num_workers` is 0."""
        how = _processes(self._device, min(1, self._num_workers))
        if how["multiprocessing_context"] is None:
            return items()
        source = _Items(items)
        found = _read_ahead(DataLoader(source, **how))
        source.items = lambda: iter(())  # else a cycle holds the process, which ends 5 s late
        return map(raised, found)


def raised(loaded: Any) -> Any:
    """Return the batch of another process. Raise it if it is an ExptError."""
    if isinstance(loaded, ExptError):
        # Not `loaded` itself: its traceback would hold this frame, a cycle that ends the
        # processes 5 s late.
        raise type(loaded)(loaded.problems if isinstance(loaded, ConfigError) else str(loaded))
    return loaded


def _read_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over a DataLoader, whose other processes read."""
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork next to threads; torch's loader processes run none of the
        # parent's.
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        return iter(loader)


class _Items(IterableDataset[Any]):
    """The items that a function yields, in another process; see _Batches."""

    def __init__(self, items: Callable[[], Iterator[Any]]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        try:
            _refuse_unsendable()
            yield from self.items()
        except ExptError as error:
            yield error


def single(tensor: Tensor) -> Tensor:
    """Return float64 as float32, and anything else as it is."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


MEDIAN_OF = 4
"""Samples that are read to see how long one takes."""


def median_read_s(read: Read, size: int) -> float:
    """Return the median time to read samples 1 to 3; sample 0 is a warm-up."""
    times = []
    with preserved_generators(), contextlib.suppress(Exception):  # training reports the error
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

    def __init__(self, reading: Reading) -> None:
        self._collate, self._seeding = reading.collate, reading.seeding
        self._read = functools.partial(read_all, reading.dataset, reading.check)
        self._has_collate = reading.has_collate

    def __getitem__(self, keys: Keys) -> tuple[Any, Any] | ExptError:
        try:
            _refuse_unsendable()
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
            shapes = [[*map(np.shape, leaves(default_convert(one)))] for one in samples]
            odd = next((at for at, each in enumerate(shapes) if each != shapes[0]), None)
            if self._has_collate or odd is None:
                raise
            other = f"has another shape than sample {keys.samples[0]}"
            raise DataError(f"sample {keys.samples[odd]} {other}: {error}") from error


def _processes(device: torch.device, num_workers: int) -> dict[str, Any]:
    """Return the arguments of torch's DataLoader for its processes."""
    if multiprocessing.current_process().daemon:  # of a Pool, which may have no children
        num_workers = 0
    return {
        "batch_size": None,
        "collate_fn": as_it_is,
        "num_workers": num_workers,
        "pin_memory": device.type == "cuda",
        "prefetch_factor": _BATCHES_AHEAD if num_workers > 0 else None,
        # Its child, which dies with it, and starts in milliseconds.
        "multiprocessing_context": "fork" if num_workers > 0 else None,
        # else each pass would draw from the generator that training uses
        "generator": torch.Generator(),
        "worker_init_fn": functools.partial(_start_process, parent=os.getpid()),
    }


def _start_process(_worker: int, parent: int) -> None:
    # Ctrl-C reaches the whole group; the worker decides on it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.die_with_parent(parent)
    _open_again()


@functools.cache
def _refuse_unsendable() -> None:
    """Raise ConfigError where batches can't be sent; torch would note it in a thread, and wait."""
    if (info := get_worker_info()) is None:  # this process takes them itself
        return
    try:
        ForkingPickler.dumps(torch.empty(1).share_memory_())
    except OSError as error:
        folder = tempfile.gettempdir()
        raise ConfigError(
            f"dataset.num_workers={info.num_workers}: processes send batches by"
            f" sockets in TMPDIR={folder} ({len(folder)} characters), which fails: {error}; set"
            " TMPDIR to a short path that can be written, or use dataset.num_workers=0"
        ) from None


def _open_again() -> None:
    """Open the regular files of the parent again in this process, at the same places.

    A descriptor shares its place in the file with all processes that were forked with it: a custom
    dataset that reads by it would get the bytes of another process.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own; files that may not be opened again
            number = int(name)
            if number <= 2 or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            if flags & os.O_ACCMODE == os.O_WRONLY:  # such as a log: all write to its end
                continue
            again = os.open(f"/proc/self/fd/{number}", flags | os.O_CLOEXEC)
            os.lseek(again, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(again, number, inheritable=os.get_inheritable(number))
            os.close(again)
