"""Samples in memory: images and rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from expt.data.loader import Held
from expt.data.loading import MIN_EVAL_BATCH, LoaderOptions

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
