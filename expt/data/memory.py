"""The loaders of samples that fit in memory: several batches are one gather."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.data.indexing import Piece
from expt.data.loading import (
    MIN_EVAL_BATCH,
    Batch,
    Finish,
    LoaderOptions,
    Order,
    ShardedLoader,
    to_device,
)
from expt.data.prefetch import prefetched
from expt.data.tree import leaves, mapped

# Bytes of float32 images made at once: on a CPU what its cache holds, on a GPU enough that launches
# cost nothing.
_BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}
_GPU_EVAL_BATCH = 2048
"""Images that fill a GPU; fewer take as many kernels each time."""
_EVAL_TIMES = 8
"""How many images an evaluation has where a step has one: that keeps what every layer gave, this
two or three.
"""


class _Block(NamedTuple):
    images: Tensor
    labels: Tensor
    pieces: list[Piece]
    """of one size: a batch each"""


def place(images: Tensor, device: torch.device) -> Tensor:
    """`images` on `device` if that is a GPU with twice the room, else where they are."""
    if device.type != "cuda" or images.device.type == "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images


class InMemoryLoader(ShardedLoader):
    """Batches of uint8 images [N, C, H, W] that are held in memory, on the GPU when they fit.

    `indices` choose the split's samples; only images from `place` are shared between loaders.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, indices: Tensor, options: LoaderOptions
    ) -> None:
        super().__init__(
            indices, dataclasses.replace(options, eval_batch_size=_eval_batch_size(options))
        )
        self._finish = Finish(options, channels=images.shape[1])
        device = options.device
        self._images = place(images, device)
        self._labels = labels.to(self._images.device)
        self._device = device
        self._block_size = _BLOCK_BYTES.get(device.type, 0) // (4 * images[0].numel())

    def _batches(self, order: Order, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for images, labels, block in prefetched(self._blocks(order, pieces), self._device):
            size = len(images) // len(block)
            sizes, weightless = (
                itertools.repeat(block[0].global_size),
                itertools.repeat(block[0].weightless),
            )
            yield from map(Batch, images.split(size), labels.split(size), sizes, weightless)

    def _blocks(self, order: Order, pieces: Iterable[Piece]) -> Iterator[_Block]:
        """Yield several batches at a time: the calls of a gather cost more than what it moves."""
        samples = to_device(
            order.samples, self._labels.device
        )  # once per epoch, so that no batch waits for a copy
        drawn = None if order.drawn is None else to_device(order.drawn, self._device)
        for block in _alike(pieces, self._block_size):
            chosen = _spread(samples, block)
            numbers = None if drawn is None else _spread(drawn, block)
            labels = to_device(self._labels.index_select(0, chosen), self._device)
            yield _Block(self._made(chosen, numbers), labels, block)

    def _made(self, chosen: Tensor, drawn: Tensor | None) -> Tensor:
        return self._finish(to_device(self._images.index_select(0, chosen), self._device), drawn)


def _eval_batch_size(options: LoaderOptions) -> int | None:
    """On a GPU larger than a step's; the numbers are the same but for rounding."""
    if options.eval_batch_size or options.device.type != "cuda":
        return options.eval_batch_size
    share = options.batch_size // options.shard.world_size
    at_a_time = options.batch_size // max(options.batch_parts, options.shard.world_size)
    return max(share, MIN_EVAL_BATCH, min(_EVAL_TIMES * at_a_time, _GPU_EVAL_BATCH))


class InMemorySampleLoader(ShardedLoader):
    """Batches of `samples` (inputs, targets), trees of tensors [N, ...] that are held in memory.

    `indices` choose the split's samples; only tensors from `place` are shared between loaders.
    """

    def __init__(self, samples: tuple[Any, Any], indices: Tensor, options: LoaderOptions) -> None:
        super().__init__(indices, options)
        self._device = options.device
        self._samples = mapped(lambda tensor: place(tensor, options.device), samples)
        num_bytes = sum(tensor[:1].nbytes for tensor in leaves(self._samples))
        self._block_size = _BLOCK_BYTES.get(options.device.type, 0) // max(1, num_bytes)

    def _batches(self, order: Order, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for samples, block in prefetched(self._blocks(order.samples, pieces), self._device):
            size = block[0].stop - block[0].start
            for start in range(0, size * len(block), size):
                inputs, targets = mapped(
                    functools.partial(torch.Tensor.narrow, dim=0, start=start, length=size), samples
                )
                yield Batch(inputs, targets, block[0].global_size, block[0].weightless)

    def _blocks(self, order: Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[Any, list[Piece]]]:
        """Yield several batches at a time, as InMemoryLoader's."""
        orders = {
            tensor.device: to_device(order, tensor.device) for tensor in leaves(self._samples)
        }
        for block in _alike(pieces, self._block_size):
            chosen = {device: _spread(order, block) for device, order in orders.items()}
            yield mapped(functools.partial(self._gathered, chosen=chosen), self._samples), block

    def _gathered(self, tensor: Tensor, chosen: Mapping[torch.device, Tensor]) -> Tensor:
        return to_device(tensor.index_select(0, chosen[tensor.device]), self._device)


def _alike(pieces: Iterable[Piece], samples: int) -> Iterator[list[Piece]]:
    """Yield runs of pieces of one size, evenly spaced, of up to `samples`, or one piece."""
    for size, run in itertools.groupby(pieces, key=_size):
        most = max(1, samples // size[0])
        while block := list(itertools.islice(run, most)):
            yield block


def _size(piece: Piece) -> tuple[int, int, bool]:
    return piece.stop - piece.start, piece.global_size, piece.weightless


def _spread(values: Tensor, block: list[Piece]) -> Tensor:
    """Return what `values` [..., N] hold at the positions of a block's pieces [..., samples]."""
    first, last = block[0], block[-1]
    taken = values[..., first.start : last.stop]
    if len(block) == 1:
        return taken
    return taken.unfold(-1, first.stop - first.start, block[1].start - first.start).flatten(-2)
