"""Batches of a worker, on the device and normalised, and the trees of tensors that they are."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from expt.data.augment import Augmentation, Mixing

MIN_EVAL_BATCH = 256
_EVAL_TOKENS = 2**15
"""Tokens that a worker evaluates at a time, at least: their logits take the memory."""
NO_AUGMENTATION = Augmentation()


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come, and which metrics count."""

    epoch: int = 1
    """Epochs begun, from 1."""
    step: int = 0
    """Optimiser steps done; 0 in the run's first step."""
    planned: int = 1
    """See `total_steps`."""
    is_evaluation: bool = False
    left_out: Collection[str] = ()
    """Metrics that are not measured now, such as dear ones in training."""
    on_plan: Callable[[], object] = lambda: None
    """Called where `total_steps` is read."""

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run; one whose task reads them is resumed with as many."""
        self.on_plan()
        return self.planned

    def measures(self, metric: str) -> bool:
        """Return whether a metric is measured now."""
        return metric not in self.left_out


class PerSample(list[Any]):
    """A list in a batch with one item for each sample, such as tensors of unequal shapes."""


ROWS = Tensor, PerSample
"""The parts of a batch that have one row or item for each sample."""


class Batch(NamedTuple):
    """A worker's part of a global batch.

    When the last global batch has fewer samples than workers, a worker with none gets the batch's
    first sample, which is weightless: it counts for nothing, but the worker still takes part in the
    step.
    """

    inputs: Any
    """on the device: images float32 [b, C, H, W], normalised; else tensors [b, ...], and lists with
    an item for each sample, nested"""
    targets: Any
    """on the device: classes int64 [b], or shares of mixed ones float32 [b, num_classes]; else
    tensors [b, ...], nested, or None"""
    global_size: int
    """samples of the whole global batch; of this worker's batch in an evaluation"""
    weightless: bool = False
    samples: int | None = None
    """`size`, where no tensor or list is as long, as in a batch of graphs with targets of nodes"""
    progress: Progress = Progress()
    """where the run is, the same for all micro-batches and workers"""

    @property
    def size(self) -> int:
        """This worker's samples."""
        return self.samples or _num_rows(self.inputs, self.targets)

    def of_size(self, size: int) -> Batch:
        """Return the same batch, which says its `size` where its tensors and lists do not."""
        if _num_rows(self.inputs, self.targets) == size:
            return self
        return self._replace(samples=size)


def _num_rows(inputs: Any, targets: Any) -> int:
    return len(next(leaves((targets, inputs), ROWS)))


class Order(NamedTuple):
    """Samples of a split, as an epoch or an evaluation takes them one after the other."""

    samples: Tensor
    """which ones of the dataset, int64 [N]"""
    epoch: int = 0
    drawn: Tensor | None = None
    """the random numbers that augment each [5, N]"""
    times: Tensor | None = None
    """how often each came before in the epoch, int64 [N]; None: none comes twice"""

    def at(self, positions: Tensor | slice) -> Order:
        """Return the samples at these positions."""
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
    lengths: Tensor | None = None
    """the tokens of each of the split's samples [N], to have batches of similar ones"""
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


class Held(Dataset[Any]):
    """Samples in memory or in a mapped file, gathered several at once."""

    device = torch.device("cpu")
    """the device of the indices that `gather` takes"""
    tokens = 0
    """tokens of the longest sample, where samples are tokens"""

    def held(self, indices: Tensor, options: LoaderOptions) -> Held | None:
        """Return the samples to gather from; None while they must be read one by one."""
        return self

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of these samples, [b, ...]."""
        raise NotImplementedError

    def at_once(self, device: torch.device) -> int:
        """Return how many samples of several batches are gathered at once; 1: a batch."""
        return 1

    def evaluated_at_once(self, options: LoaderOptions) -> int | None:
        """Return the samples that a worker evaluates at a time; None: as of other datasets."""
        if options.eval_batch_size or not self.tokens:
            return options.eval_batch_size
        share = options.batch_size // options.shard.world_size
        return max(share, _EVAL_TOKENS // self.tokens, 1)


class Finish:
    """The last step of images, on the device: (pixel - mean) / std, augmented."""

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
        are_bytes = images.dtype == torch.uint8
        pixels = images.to(torch.float32, memory_format=self._layout)
        scale = self._byte_scale if are_bytes else self._scale
        if self._identity:
            return pixels.mul_(scale) if are_bytes else pixels
        # In place: on a CPU this takes a third of the time of one addcmul.
        return pixels.mul_(scale).add_(self._shift)


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


Parts: TypeAlias = type[Any] | tuple[type[Any], ...]
"""The classes of a tree's parts: tensors, or ROWS."""


def mapped(function: Callable[[Any], Any], tree: Any, parts: Parts = Tensor) -> Any:
    """Return the same containers with `function` of each of the `parts`; all else stays."""
    if isinstance(tree, parts):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(function, below, parts) for key, below in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(function, below, parts) for below in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(function, below, parts) for below in tree)
    return tree


def leaves(tree: Any, parts: Parts = Tensor) -> Iterator[Any]:
    """Yield its tensors, or other `parts`, in order."""
    if isinstance(tree, parts):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for below in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(below, parts)


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
