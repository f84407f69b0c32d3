"""Samples in memory or in mapped files: images, rows of a table, windows of a text."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from expt.data.loader import loading
from expt.data.loading import MIN_EVAL_BATCH, Held, LoaderOptions
from expt.data.source import Part, Source
from expt.errors import DataError
from expt.features import NO_TARGET, Features

if TYPE_CHECKING:
    from expt.data.kinds.text import Extent

# Bytes of float32 images made at once: on a CPU those that fit its cache, on a GPU enough that
# launches cost nothing.
_BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}
_GPU_EVAL_BATCH = 2048
"""Images that fill a GPU; fewer take as many kernels each time."""
_EVAL_TIMES = 8
"""How many images an evaluation has where a step has one, which keeps the outputs of every layer.
"""


def place(images: Tensor, device: torch.device) -> Tensor:
    """`images` on `device` if that is a GPU with twice the room, else where they are."""
    if device.type != "cuda" or images.device.type == "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images


class InMemory(Held):
    """Inputs and targets [N, ...], on the GPU when they fit.

    Images uint8 [N, C, H, W] are augmented and normalised; rows [N, F] are given as they are. All
    loaders share one copy on a GPU.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device) -> None:
        self._here = inputs, targets
        self._inputs = place(inputs, device)
        self.device = self._inputs.device
        self._targets = targets.to(self.device)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = self._here
        return inputs[index].clone(), int(targets[index])

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a sample, all zeros."""
        inputs, targets = self._here
        return torch.zeros_like(inputs[0]), torch.zeros_like(targets[0])

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See Held."""
        return self._inputs.index_select(0, indices), self._targets.index_select(0, indices)

    def at_once(self, device: torch.device) -> int:
        """See Held: the calls of a gather cost more than the bytes that it moves."""
        return _BLOCK_BYTES.get(device.type, 0) // max(1, 4 * self._inputs[:1].numel())

    def evaluated_at_once(self, options: LoaderOptions) -> int | None:
        """See Held."""
        are_images = self._inputs.dim() == 4
        return eval_batch_size(options) if are_images else options.eval_batch_size


def eval_batch_size(options: LoaderOptions) -> int | None:
    """On a GPU larger than a step's; the numbers are the same but for rounding."""
    if options.eval_batch_size or options.device.type != "cuda":
        return options.eval_batch_size
    share = options.batch_size // options.shard.world_size
    at_a_time = options.batch_size // max(options.batch_parts, options.shard.world_size)
    return max(share, MIN_EVAL_BATCH, min(_EVAL_TIMES * at_a_time, _GPU_EVAL_BATCH))


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
        mapped = (
            np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
            for path, size in zip(extent.files, extent.sizes, strict=True)
        )
        self._files: list[np.ndarray] = [*mapped] if tokens is None else [tokens]
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
