"""The loader of an IterableDataset of known length, whose samples are known by their positions."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from expt.data.checked_samples import Check, checked, in_words
from expt.data.indexing import Piece, mix
from expt.data.kind import DatasetConfig
from expt.data.loading import Batch, Loader, LoaderOptions, Order, ShardedLoader
from expt.data.prefetch import prefetched
from expt.data.stream import Collated, Finishing, loaded_batches, loading_settings, seeded
from expt.data.tree import leaves
from expt.errors import ConfigError, DataError, ExptError, warn


class IterableLoader(ShardedLoader):
    """Batches of the samples at given positions, in the order in which they come; see Loader.

    Every worker reads all of them, in one process of its own if `num_workers` is not 0, and keeps
    those of its part of each batch, so that a batch is the same on any number of workers. They must
    come alike on all: what is drawn at random from torch's, NumPy's or Python's own generator hangs
    on the seed, the epoch and the position only, and a method `set_epoch(epoch)` is called for each
    epoch (0 in an evaluation)."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        indices: Tensor,
        options: LoaderOptions,
        *,
        check: Check,
        collate: Callable[[list[Any]], tuple[Any, Any]],
        num_workers: int = 0,
        finish: Finishing = lambda inputs, drawn: inputs,
    ) -> None:
        if options.balanced is not None:
            raise ConfigError(
                "dataset.sampling=balanced: an IterableDataset comes in its own order, and can't be"
                " drawn from; use dataset.sampling=null with task.class_weights=balanced, or a"
                " map-style Dataset"
            )
        super().__init__(indices.sort().values, options)
        self._dataset, self._check, self._collate = dataset, check, Collated(collate)
        self._num_workers, self._finish = min(num_workers, 1), finish

    def first_samples(self, count: int, seed: int, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Yield each of the first samples as a batch of its own, on the CPU, as in this epoch."""
        length = len(cast(Sized, self._dataset))
        samples = itertools.islice(_samples(self._dataset, seed, epoch), min(count, length))
        for position, sample in enumerate(samples):
            batch = self._collate([checked(self._check, position, sample)])
            if isinstance(batch, ExptError):
                raise batch
            yield batch

    def _order(self, epoch: int) -> Tensor:
        return self._indices

    def _batches(self, order: Order, pieces: Iterable[Piece]) -> Iterator[Batch]:
        return prefetched(self._read(order, list(pieces)), self._options.device)

    def _read(self, order: Order, pieces: list[Piece]) -> Iterator[Batch]:
        if not pieces:
            return
        device = self._options.device
        wanted = [order.samples[piece.start : piece.stop].tolist() for piece in pieces]
        chosen = _Chosen(self._dataset, self._check, wanted, (self._options.seed, order.epoch))
        how = loading_settings(device, self._num_workers)
        loader: DataLoader[Any] = DataLoader(
            chosen, batch_size=None, collate_fn=self._collated, **how
        )
        yield from loaded_batches(loader, order, pieces, device, self._finish)

    def _collated(self, samples: list[Any] | ExptError) -> Any:
        return samples if isinstance(samples, ExptError) else self._collate(samples)


class _Chosen(IterableDataset[Any]):
    """The samples at each of the lists of positions `wanted`; an error for a person as a value."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        check: Check,
        wanted: list[list[int]],
        seeds: tuple[int, int],
    ) -> None:
        self._dataset, self._check, self._wanted, self._seeds = dataset, check, wanted, seeds

    def __iter__(self) -> Iterator[list[Any] | ExptError]:
        try:
            yield from self._groups()
        except ExptError as error:
            yield error

    def _groups(self) -> Iterator[list[Any]]:
        samples = _samples(self._dataset, *self._seeds)
        read = 0
        for group in self._wanted:  # one comes after the other, though not each in order
            found = {}
            while read <= max(group):
                sample = next(samples)
                if read in group:
                    found[read] = checked(self._check, read, sample)
                read += 1
            yield [found[position] for position in group]


def _samples(dataset: IterableDataset[Any], seed: int, epoch: int) -> Iterator[Any]:
    """One after the other, without an end: the error of one that is not there says so."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    with seeded(mix(seed, epoch)):
        samples = _begun(dataset)
    for read in itertools.count():
        with seeded(mix(seed, epoch, read)):
            sample = _next(samples, read, dataset)
        yield sample


def first_of(dataset: IterableDataset[Any]) -> Any:
    """Return its first sample. Raise DataError for one that has none."""
    with seeded(0):
        return _next(_begun(dataset), 0, dataset)


def _begun(dataset: IterableDataset[Any]) -> Iterator[Any]:
    try:
        return iter(dataset)
    except Exception as error:
        raise in_words(error, f"{type(dataset).__name__}.__iter__") from error


def _next(samples: Iterator[Any], read: int, dataset: IterableDataset[Any]) -> Any:
    try:
        return next(samples)
    except StopIteration:
        raise DataError(
            f"the dataset ended after {read} samples, of which its __len__ says more; fix it"
        ) from None
    except Exception as error:
        raise in_words(error, f"sample {read}: {type(dataset).__name__}.__iter__") from error


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
    key, without = (
        f"dataset._target_={dataset.custom_class}",
        "dataset.val_fraction=0 eval_split=test",
    )
    if dataset.folds is not None:
        without = f"dataset.folds=null dataset.fold=null {without}"
    if "another" in found:
        raise ConfigError(
            f"{key}: gives its samples in another order in each epoch, and val is held out by their"
            f" places, so that they would be trained on; use a map-style Dataset, or {without}, or"
            " don't shuffle in __iter__"
        )
    if "unknown" in found:
        warn(
            f"{key}: its first samples differ in each epoch; if __iter__ shuffles, val, which is"
            f" held out by their places, is trained on: use a map-style Dataset then, or {without}"
        )


class _Sample(NamedTuple):
    whole: bytes
    """A digest of its bits, and one of its targets'."""
    targets: bytes
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


def _digest(tree: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for tensor in leaves(tree):
        found.update(f"{tensor.dtype} {[*tensor.shape]}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(raw.numpy().tobytes())
    return found.digest()


def _order(
    one: Sequence[_Sample], other: Sequence[_Sample]
) -> Literal["same", "another", "unknown"]:
    """Return how the `other` order compares with `one`, of as many samples."""
    pairs = list(zip(one, other, strict=True))
    if all(before.whole == after.whole for before, after in pairs):
        return "same"
    times, there = Counter(sample.whole for sample in one), {sample.whole for sample in other}
    moved = (times[old.whole] == 1 and old.whole != new.whole for old, new in pairs)
    if any(each and old.whole in there for each, (old, _) in zip(moved, pairs, strict=True)):
        return "another"
    if any(before.targets != after.targets for before, after in pairs):
        return "another" if all(sample.has_class for sample in one) else "unknown"
    # Augmented inputs, by what they are to be known by; nothing is known where all have one target.
    return "same" if len({sample.targets for sample in one}) > 1 else "unknown"
