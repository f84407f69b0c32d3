"""Windows of a text whose tokens lie in mapped files."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from expt.data.loader import Held, loading
from expt.data.source import Part, Source
from expt.errors import DataError
from expt.features import NO_TARGET, Features

if TYPE_CHECKING:
    from expt.data.kinds.text import Extent


class Windows(Held):
    """Consecutive windows of a part of a text: `context` tokens, and of each the next.

    Each token of the part but its first is a target, once; the last window may be shorter.
    """

    def __init__(self, extent: Extent, context: int, tokens: np.ndarray | None = None) -> None:
        """Take the `tokens` [N] that a tokenizer has read, else the bytes of its files."""
        self._start, self._stop = extent.start, extent.stop
        self.context = self.tokens = context
        self._ends = list(itertools.accumulate(extent.sizes))
        # A file without a byte cannot be mapped.
        self._files: list[np.ndarray] = (
            [
                np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
                for path, size in zip(extent.files, extent.sizes, strict=True)
            ]
            if tokens is None
            else [tokens]
        )
        if [len(file) for file in self._files] != [*extent.sizes]:
            raise DataError(
                f"{extent.files[0]}: the text has changed while the run was starting; start it"
                " again"
            )

    def __len__(self) -> int:
        return -(-(self._stop - self._start - 1) // self.context)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [b, context].

        A shorter window is filled with 0, and the target NO_TARGET.
        """
        chosen = indices.tolist()
        tokens = np.full((len(chosen), self.context + 1), NO_TARGET, np.int64)
        for row, index in zip(tokens, chosen, strict=True):
            first = self._start + index * self.context
            found = self._tokens(first, min(first + self.context + 1, self._stop))
            row[: len(found)] = found
        inputs = torch.from_numpy(tokens[:, :-1].copy()).clamp_(min=0)
        return inputs, torch.from_numpy(tokens[:, 1:].copy())

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens of the whole text, over the ends of files."""
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, stop)
        pieces = []
        for place in range(first, last + 1):
            begin = self._ends[place] - len(self._files[place])
            pieces.append(self._files[place][max(start - begin, 0) : stop - begin])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def of_extents(
    extents: Sequence[Extent | None], features: Features, tokens: np.ndarray | None
) -> Source:
    """Return a text's parts, by windows."""
    context = features.shapes["context"]
    windows = [None if extent is None else Windows(extent, context, tokens) for extent in extents]
    train, val, test = (x if x is None else Part(len(x), loading(x)) for x in windows)
    assert train
    window = torch.zeros(context, dtype=torch.int64)
    return Source(features=features, example=(window, window), train=train, val=val, test=test)
