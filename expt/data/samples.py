"""Samples of custom datasets, nested tensors of any kind; loaders of an IterableDataset."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from expt.config import secrets
from expt.config.user_code import own_frame
from expt.data.checked_samples import Check, CheckedSamples, checked, in_words, read
from expt.data.indexing import Piece, mix
from expt.data.kinds import DatasetConfig
from expt.data.loading import (
    Finish,
    Floats,
    Load,
    Loader,
    LoaderOptions,
    Order,
    described,
    leaves,
    mapped,
)
from expt.data.stream import (
    Finishing,
    ReadingLoader,
    SampleLoader,
    identity_collate,
    loading_settings,
    seeded,
)
from expt.errors import ConfigError, DataError, ExptError, warn


def loading(
    dataset: Dataset[Any],
    num_workers: int,
    check: Check | None = None,
    *,
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None,
    channels: int | None = None,
    sample_s: float = math.inf,
) -> Load:
    """Return what makes a loader of the samples at given indices, each once it is checked.

    A sample is (inputs, targets), anything else is inputs only. Samples are stacked as torch's
    default_collate does, unless there is a `collate`, or the dataset has a method of that name,
    which makes a batch of a list. Images of so many `channels` are normalised and augmented.
    """

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        own = getattr(dataset, "collate", None)
        how: Any = {"num_workers": num_workers, "floats": (floats := Floats())}
        made = collate or functools.partial(collated, own=own)
        how["collate"] = functools.partial(_with_floats, floats, made)
        if channels is not None:
            how["finish"] = Finish(options, channels=channels)
        if isinstance(dataset, IterableDataset):
            return IterableLoader(dataset, indices, options, check=check or _unchecked, **how)
        samples = CheckedSamples(dataset, check) if check else dataset
        return SampleLoader(samples, indices, options, sample_s=sample_s, **how)

    return load


def _with_floats(
    floats: Floats, collate: Callable[[list[Any]], tuple[Any, Any]], samples: list[Any]
) -> tuple[Any, Any]:
    found = collate(samples)
    return found if floats.stay_double else mapped(_single, found)


def _unchecked(sample: Any) -> Any:
    return sample


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
            f"a batch, a {type(batch).__name__}, must hold tensors [samples, ...], and no other"
        )
    if own and (size := len(tensors[0])) != len(samples):
        raise DataError(
            f"collate makes tensors of {size} for {len(samples)} samples: the first dimension is to"
            " be the samples, each once; put them first and let the model transpose, or, for inputs"
            " of another order such as a graph's nodes, let targets be [samples, ...]; what collate"
            " drops is to be left out of the dataset"
        )
    # One that requires grad can't be sent to another process.
    found: tuple[Any, Any] = mapped(Tensor.detach, (inputs, targets))
    return found


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def first(dataset: Dataset[Any]) -> Any:
    """Return the first sample. Raise DataError where there is none."""
    if not isinstance(dataset, IterableDataset):
        return read(dataset, 0)
    with seeded(0):
        return _next(_begun(dataset), 0, dataset)


def example(dataset: Dataset[Any], sample: Any, check: Check) -> tuple[Any, Any]:
    """Return zeros like the inputs and targets of the first `sample`. Raise DataError."""
    batch = collated([checked(check, 0, sample)], getattr(dataset, "collate", None))
    found: tuple[Any, Any] = mapped(lambda tensor: torch.zeros_like(_single(tensor[0])), batch)
    return found


def shapes(dataset: Dataset[Any], inputs: Any, targets: Any) -> Mapping[str, Any]:
    """Return what a model may ask for.

    It is `channels` and `image_size` of inputs that are one tensor (a row [features] is an image of
    one row), and `num_classes` outputs; of a dataset of tokens its `vocab_size` and `context`.
    """
    found: dict[str, Any] = {}
    if hasattr(dataset, "vocab_size"):
        if not hasattr(dataset, "context"):
            raise DataError(
                f"{type(dataset).__name__} has a vocab_size, but no context; let that be the most"
                " tokens that a sample has"
            )
        return {"vocab_size": dataset.vocab_size, "context": dataset.context}
    if isinstance(inputs, Tensor) and 1 <= inputs.dim() <= 3:
        channels, height, width = (1,) * (3 - inputs.dim()) + tuple(inputs.shape)
        found = {"channels": channels, "image_size": (height, width)}
    if isinstance(targets, Tensor):
        found["num_classes"] = math.prod(targets.shape)
    return found


@dataclass(frozen=True)
class Labelled:
    """Samples of one class each, which a `collate` makes, or whose inputs are no images."""

    num_classes: int
    classifies: bool
    """whether the targets are classes, and not what a custom task takes"""
    channels: int | None = None
    """of images [C, H, W], which are normalised and augmented; None: inputs of another kind"""

    def of(self, example: tuple[Any, Any]) -> Labelled:
        """Return the same, with the channels of the inputs where these are images."""
        inputs = example[0]
        is_image = isinstance(inputs, Tensor) and inputs.dim() == 3 and _has_pixels(inputs)
        return dataclasses.replace(self, channels=inputs.shape[0] if is_image else None)

    def collated(self, samples: list[Any], own: Callable[[list[Any]], Any]) -> tuple[Any, Any]:
        """Return a batch of the dataset's `collate`. Raise DataError for one that makes no sense.

        Only class numbers can be drawn beside images.
        """
        inputs, targets = collated(samples, own)
        if self.channels is not None:
            is_batch = isinstance(inputs, Tensor) and inputs.dim() == 4 and _has_pixels(inputs)
            if not is_batch or inputs.shape[1] != self.channels:
                raise DataError(
                    f"collate makes inputs of {described(inputs)}; let them be images [samples,"
                    f" {self.channels}, height, width] as the first, uint8, or float in [0, 1]"
                )
            inputs = inputs.clone()  # it may be the dataset's own, and is normalised in place
        return inputs, self._classes(targets) if self.classifies else targets

    def _classes(self, targets: Any) -> Tensor:
        if isinstance(targets, Tensor) and targets.dim() == 1 and not _is_real(targets):
            wrong = (targets < 0) | (targets >= self.num_classes)
            if wrong.any():
                raise DataError(
                    f"collate makes the label {int(targets[wrong][0])}, expected 0 to"
                    f" {self.num_classes - 1}; fix it, or dataset.num_classes"
                )
            return targets.long()
        takes_shares = self.channels is None
        is_share = isinstance(targets, Tensor) and targets.shape[1:] == (self.num_classes,)
        if takes_shares and is_share:
            return targets.float()  # type: ignore[no-any-return]
        also = f", or shares of the classes, [samples, {self.num_classes}]" if takes_shares else ""
        raise DataError(
            f"collate makes targets of {described(targets)}; let them be class numbers, int64"
            f" [samples]{also}"
        )


def _has_pixels(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 or tensor.is_floating_point()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool


class IterableLoader(ReadingLoader):
    """Batches of the samples at given positions, in the order in which they come; see Loader.

    Every worker reads all of them, in one process of its own if `num_workers` is not 0, and keeps
    those of its part of each batch, so that a batch is the same on any number of workers. They must
    come alike on all: what is drawn at random from torch's, NumPy's or Python's own generator hangs
    on the seed, the epoch and the position only, and a method `set_epoch(epoch)` is called for each
    epoch (0 in an evaluation).
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        indices: Tensor,
        options: LoaderOptions,
        *,
        check: Check,
        collate: Callable[[list[Any]], tuple[Any, Any]],
        num_workers: int = 0,
        finish: Finishing | None = None,
        floats: Floats | None = None,
    ) -> None:
        if options.balanced is not None:
            raise ConfigError(
                "dataset.sampling=balanced: an IterableDataset comes in its own order, and can't be"
                " drawn from; use dataset.sampling=null with task.class_weights=balanced, or a"
                " map-style Dataset"
            )
        super().__init__(indices.sort().values, options, finish, floats)
        self._dataset, self._check, self._collate = dataset, check, collate
        self._num_workers = min(num_workers, 1)

    def first_samples(self, count: int, seed: int, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Yield each of the first samples as a batch of its own, on the CPU, as in this epoch."""
        length = len(cast(Sized, self._dataset))
        samples = itertools.islice(_samples(self._dataset, seed, epoch), min(count, length))
        for position, sample in enumerate(samples):
            yield self._collate([checked(self._check, position, sample)])

    def _order(self, epoch: int) -> Tensor:
        return self._indices

    def _dataloader(self, order: Order, pieces: list[Piece]) -> DataLoader[Any]:
        wanted = [order.samples[piece.start : piece.stop].tolist() for piece in pieces]
        seeds = self._options.seed, order.epoch
        chosen = _Chosen(self._dataset, self._check, self._collate, wanted, seeds)
        how = loading_settings(self._options.device, self._num_workers)
        return DataLoader(chosen, batch_size=None, collate_fn=identity_collate, **how)


class _Chosen(IterableDataset[Any]):
    """Batches of the samples at each of the lists of positions `wanted`; see _Batches."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        check: Check,
        collate: Callable[[list[Any]], tuple[Any, Any]],
        wanted: list[list[int]],
        seeds: tuple[int, int],
    ) -> None:
        self._dataset, self._check, self._collate = dataset, check, collate
        self._wanted, self._seeds = wanted, seeds

    def __iter__(self) -> Iterator[tuple[Any, Any] | ExptError]:
        try:
            yield from map(self._collate, self._groups())
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
    for number in itertools.count():
        with seeded(mix(seed, epoch, number)):
            sample = _next(samples, number, dataset)
        yield sample


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
    key = f"dataset._target_={dataset.custom_class}"
    without = "dataset.val_fraction=0 eval_split=test"
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
