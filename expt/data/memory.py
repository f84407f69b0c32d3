"""The loader of images that fit in memory: a batch is one gather, normalised as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from expt.data.loading import IGNORE_INDEX, Batch, Normalise, Shard, ShardedLoader, to_device
from expt.data.shard import Piece


def place(images: Tensor, device: torch.device) -> Tensor:
    """`images` on `device` if that is a GPU with twice the room, else where they are."""
    if device.type != "cuda" or images.device.type == "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images


class InMemoryLoader(ShardedLoader):
    """Batches of uint8 images [N, C, H, W] that are held in memory, on the GPU when they fit; see Loader.

    `indices` choose the split's samples; `batch_size` is global; only images from `place` are shared between loaders.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        indices: Tensor,
        *,
        batch_size: int,
        shard: Shard,
        device: torch.device,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        channels_last: bool = False,
        eval_batch_size: int | None = None,
    ) -> None:
        super().__init__(
            indices,
            batch_size=batch_size,
            shard=shard,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            eval_batch_size=eval_batch_size,
        )
        self._images = place(images, device)
        self._labels = labels.to(self._images.device)
        self._device = device
        self._normalise = Normalise(mean, std, channels=images.shape[1], device=device, channels_last=channels_last)

    def _batches(self, order: Tensor, pieces: Iterable[Piece], epoch: int) -> Iterator[Batch]:
        order = order.to(self._images.device)  # once per epoch, so that no batch waits for a copy of its indices
        for piece in pieces:
            chosen = order[piece.start : piece.stop]
            images = to_device(self._images.index_select(0, chosen), self._device)
            labels = to_device(self._labels.index_select(0, chosen), self._device)
            if piece.weightless:
                labels = torch.full_like(labels, IGNORE_INDEX)
            yield Batch(self._normalise(images), labels, piece.global_size)
