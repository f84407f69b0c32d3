"""Batches of a worker, on the device and normalised, and the trees of tensors that they are."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from expt.data import indexing
from expt.data.augment import Augmentation, Mixing

MIN_EVAL_BATCH = 256
NO_AUGMENTATION = Augmentation()


class Batch(NamedTuple):
    """A worker's part of a global batch.

    When the last global batch has fewer samples than workers, a worker with none gets the batch's
    first sample, which is weightless: it counts for nothing, but the worker still takes part in the
    step.
    """

    inputs: Any
    """on the device: images float32 [b, C, H, W], normalised; else tensors [b, ...], nested"""
    targets: Any
    """on the device: classes int64 [b], or shares of mixed ones float32 [b, num_classes]; else
    tensors [b, ...], nested, or None"""
    global_size: int
    """samples of the whole global batch; of this worker's batch in an evaluation"""
    weightless: bool = False

    @property
    def size(self) -> int:
        """This worker's samples."""
        is_tensor = isinstance(self.targets, Tensor)
        first = self.targets if is_tensor else next(leaves((self.targets, self.inputs)))
        return int(first.shape[0])


class Order(NamedTuple):
    """Samples of a split, as an epoch or an evaluation takes them one after the other."""

    samples: Tensor
    """which ones of the dataset, int64 [N]"""
    epoch: int = 0
    drawn: Tensor | None = None
    """the random numbers that augment each [5, N]"""
    times: Tensor | None = None
    """how often each came before in the epoch, int64 [N]; None: none comes twice"""

    def at(self, positions: Tensor) -> Order:
        """Return what is at these positions."""
        both = self.drawn, self.times
        drawn, times = (None if part is None else part[..., positions] for part in both)
        return self._replace(samples=self.samples[positions], drawn=drawn, times=times)


@dataclass(frozen=True)
class Shard:
    """Which part of every batch is this worker's."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How samples become a worker's batches, wherever they are read from."""

    batch_size: int
    """samples of a global batch"""
    shard: Shard = Shard()
    device: torch.device
    mean: Sequence[float] | None = None
    """of each channel, pixels counted in [0, 1]; None subtracts nothing"""
    std: Sequence[float] | None = None
    """of each channel; None divides by nothing"""
    channels_last: bool = False
    seed: int = 0
    """of the order and of the augmentation"""
    shuffle: bool = False
    drop_last: bool = False
    """leave out an epoch's last batch if it is smaller"""
    augment: Augmentation = NO_AUGMENTATION
    """of training images; an evaluation sees them as they are"""
    balanced: Tensor | None = None
    """the class of each of the split's samples [N], to take each equally often"""
    transforms: Sequence[Callable[[Any], Any]] = ()
    """of each image, one after the other, before `augment`"""
    transforms_key: str = "dataset.transforms"
    mixing: Mixing | None = None
    """of training batches"""
    eval_batch_size: int | None = None
    """samples that a worker evaluates at a time; None is its share, at least MIN_EVAL_BATCH"""
    batch_parts: int = 1
    """of a global batch, over all workers: none trains on more than one at a time"""
    epoch_steps: int | None = None
    """batches of an epoch, where the samples are not counted"""

    @property
    def evaluated_at_once(self) -> int:
        """The samples that a worker evaluates at a time."""
        # No gradients are kept in an evaluation, so small batches would only cost time.
        share = self.batch_size // self.shard.world_size
        return self.eval_batch_size or max(share, MIN_EVAL_BATCH)


class Loader(ABC):
    """The batches of one split, for one worker: which samples make which. A subclass reads them."""

    is_stream = False
    """True if samples come only one after the other."""

    def __init__(self, indices: Tensor, options: LoaderOptions) -> None:
        self._indices = indices
        self._options = options
        self.stay_double = False
        """True if float64 stays as it is, for a model in double; set before anything is read."""

    @property
    def size(self) -> int:
        """Samples in the split, over all workers; 0 where they are not counted."""
        return len(self._indices)

    def numbers(self) -> Iterator[int]:
        """Yield which samples of the dataset's part these are, in order."""
        return iter(self._indices.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the place in the data, if the step does not say it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        assert not state

    def __len__(self) -> int:
        """Batches per epoch; the same number on every worker."""
        return indexing.num_batches(self.size, self._options.batch_size, self._options.drop_last)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield this worker's share of each batch of an epoch, after the first `skip`, unread."""
        options, pieces, order = self._options, self._pieces(skip), self._whole_order(epoch)
        if options.mixing is None:
            return self._batches(order, pieces)
        positions, wider = indexing.with_partners([*pieces], options.batch_size, skip)
        batches = self._batches(order.at(positions), wider)
        return options.mixing.mixed(batches, options.seed, epoch, skip)

    def _whole_order(self, epoch: int) -> Order:
        options, samples, drawn = self._options, self.order(epoch), None
        if options.augment:
            drawn = options.augment.draw(self.size, options.seed, epoch)
            drawn = options.augment.in_turn(drawn, samples, self._indices, options.seed, epoch)
        times = None if options.balanced is None else indexing.times_before(samples)
        return Order(samples, epoch, drawn, times)

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
            return self._indices[indexing.balanced(options.balanced, options.seed, epoch)]
        order = indexing.permutation(self.size, options.seed, epoch)
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

    @abstractmethod
    def _batches(self, order: Order, pieces: Iterable[indexing.Piece]) -> Iterator[Batch]:
        """Yield a batch for each of `pieces`, which are ranges of `order`."""


Load: TypeAlias = Callable[[Tensor, LoaderOptions], Loader]
"""Makes a loader of the samples at some indices."""


class Finish:
    """Makes of images on the device what the model gets: (pixel - mean) / std, augmented."""

    def __init__(self, options: LoaderOptions, channels: int) -> None:
        each, device = (1, -1, 1, 1), options.device
        scale = 1 / torch.tensor(options.std or [1.0] * channels, dtype=torch.float64).view(each)
        mean = torch.tensor(options.mean or [0.0] * channels, dtype=torch.float64).view(each)
        self._byte_scale = (scale / 255).to(device, torch.float32)
        self._scale = scale.to(device, torch.float32)
        self._shift = (-scale * mean).to(device, torch.float32)
        self._identity = options.mean is None and options.std is None
        self._layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self._augment = options.augment

    def __call__(self, images: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Return images as float32; the random numbers `drawn` [5, b] augment them.

        They are [b, C, H, W], uint8 or float in [0, 1]; float32 is overwritten.
        """
        if drawn is None:
            return self._normalised(images)
        return self._augment.cut(self._normalised(self._augment.move(images, drawn)), drawn)

    def _normalised(self, images: Tensor) -> Tensor:
        pixels = images.to(torch.float32, memory_format=self._layout)
        if self._identity:
            return pixels.mul_(self._byte_scale) if images.dtype == torch.uint8 else pixels
        # In place: on a CPU this takes a third of the time of one addcmul.
        return pixels.mul_(self._byte_scale if images.dtype == torch.uint8 else self._scale).add_(
            self._shift
        )


class TimedBatches:
    """Batches, and the seconds that their user has waited for them so far."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.waited_s += time.perf_counter() - began


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; to a GPU through pinned memory, so that the host need not wait."""
    if tensor.device.type == device.type:
        return tensor
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_Made = TypeVar("_Made", bound=tuple[Any, ...])


def prefetched(batches: Iterator[_Made], device: torch.device) -> Iterator[_Made]:
    """Yield `batches`, made on a side stream where `device` is a GPU.

    They are tuples that start with two trees of tensors on the device. The host runs ahead of the
    GPU, so a batch is copied, gathered and augmented while the step before it computes; only the
    stream that uses it waits. On a CPU there is no other core to do so.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = _side_stream(device.index if device.index is not None else torch.cuda.current_device())
    # it may still be copying the dataset to the device
    side.wait_stream(torch.cuda.current_stream(device))
    while True:
        with torch.cuda.stream(side):
            made = next(batches, None)
        if made is None:
            return
        using = torch.cuda.current_stream(device)
        using.wait_stream(side)
        for tensor in leaves(made[:2]):
            # its memory is free for the side stream once this one is done with it
            tensor.record_stream(using)
        yield made


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One for all loaders: memory that one stream has freed is not another's."""
    return torch.cuda.Stream(index)


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same containers with `function` of each tensor; all else stays as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(function, below) for key, below in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(function, below) for below in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(function, below) for below in tree)
    return tree


def is_double(module: nn.Module) -> bool:
    """Return whether a model computes in float64."""
    return any(one.dtype == torch.float64 for one in module.parameters())


def of_type(module: nn.Module, tree: Any) -> Any:
    """Return tensors, with numbers in float64 where the model computes in it."""
    if not is_double(module):
        return tree
    return mapped(lambda one: one.double() if one.is_floating_point() else one, tree)


def leaves(tree: Any) -> Iterator[Tensor]:
    """Return its tensors, in order."""
    found: list[Tensor] = []
    mapped(found.append, tree)
    return iter(found)


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield its tensors, and parameters of modules, each with where it is.

    That is such as `inputs['row'][0]` of `inputs`.
    """
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, below in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named_leaves(below, f"{name}[{key!r}]")
    elif isinstance(tree, nn.Module):
        yield from ((f"{name}.{below}", parameter) for below, parameter in tree.named_parameters())
