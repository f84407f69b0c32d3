"""The loader of a text: windows of its tokens, read from files mapped into memory."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from expt.data.indexing import Piece
from expt.data.loading import Batch, LoaderOptions, Order, ShardedLoader, to_device
from expt.data.prefetch import prefetched
from expt.data.source import Part, Source
from expt.errors import DataError

if TYPE_CHECKING:
    from expt.data.kinds.text import Extent

NO_TARGET = -100
"""The target of a token that counts for nothing: what torch's cross-entropy ignores."""
_EVAL_TOKENS = 2**15
"""Evaluated at a time by a worker, at least: their logits are what takes memory."""


class Windows:
    """Consecutive windows of a part of a text: `context` tokens, and of each the next.

    Each token of the part but its first is a target, once; the last window may be shorter.
    """

    def __init__(self, extent: Extent, context: int, tokens: np.ndarray | None = None) -> None:
        """Take the `tokens` [N] that a tokenizer has read, else the bytes of its files."""
        self._start, self._stop, self.context = extent.start, extent.stop, context
        self._ends = list(itertools.accumulate(extent.sizes))
        # A file without a byte cannot be mapped.
        self._files: list[np.ndarray] = (
            [tokens]
            if tokens is not None
            else [
                np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
                for path, size in zip(extent.files, extent.sizes, strict=True)
            ]
        )
        if [len(file) for file in self._files] != [*extent.sizes]:
            raise DataError(
                f"{extent.files[0]}: the text has changed while the run was starting; start it"
                " again"
            )

    def __len__(self) -> int:
        return -(-(self._stop - self._start - 1) // self.context)

    def read(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [b, context].

        What a shorter window lacks is 0, with the target NO_TARGET.
        """
        chosen = list(indices)
        tokens = np.full((len(chosen), self.context + 1), NO_TARGET, np.int64)
        for row, index in zip(tokens, chosen, strict=True):
            first = self._start + index * self.context
            found = self._tokens(first, min(first + self.context + 1, self._stop))
            row[: len(found)] = found
        inputs, targets = (
            torch.from_numpy(tokens[:, :-1].copy()),
            torch.from_numpy(tokens[:, 1:].copy()),
        )
        return inputs.clamp_(min=0), targets

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens of the whole text, over the ends of files."""
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, stop)
        pieces = []
        for file, end in zip(
            self._files[first : last + 1], self._ends[first : last + 1], strict=True
        ):
            begin = end - len(file)
            pieces.append(file[max(start - begin, 0) : stop - begin])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class TextLoader(ShardedLoader):
    """Batches of a text's windows, inputs and targets [b, context]; see Loader."""

    def __init__(self, windows: Windows, indices: Tensor, options: LoaderOptions) -> None:
        share = options.batch_size // options.shard.world_size
        most = max(share, _EVAL_TOKENS // windows.context, 1)
        super().__init__(
            indices, dataclasses.replace(options, eval_batch_size=options.eval_batch_size or most)
        )
        self._windows = windows

    def _batches(self, order: Order, pieces: Iterable[Piece]) -> Iterator[Batch]:
        return prefetched(self._read(order.samples, pieces), self._options.device)

    def _read(self, order: Tensor, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for piece in pieces:
            inputs, targets = self._windows.read(order[piece.start : piece.stop].tolist())
            device = self._options.device
            yield Batch(
                to_device(inputs, device),
                to_device(targets, device),
                piece.global_size,
                piece.weightless,
            )


def of_extents(
    extents: Sequence[Extent | None], context: int, vocab_size: int, tokens: np.ndarray | None
) -> Source:
    """Return a text's parts, by windows of `context` tokens."""
    train, val, test = (extent and _part(Windows(extent, context, tokens)) for extent in extents)
    assert train
    example = torch.zeros(context, dtype=torch.int64)
    shapes = {"vocab_size": vocab_size, "context": context}
    return Source(shapes, (), (example, example), train, test, torch.zeros(train.size), val=val)


def _part(windows: Windows) -> Part:
    return Part(len(windows), functools.partial(TextLoader, windows))
