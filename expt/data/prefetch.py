"""Batches made on a stream of their own: a GPU prepares the next while it computes on this one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from expt.data.tree import leaves

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
    side.wait_stream(
        torch.cuda.current_stream(device)
    )  # it may still be copying the dataset to the device
    while True:
        with torch.cuda.stream(side):
            made = next(batches, None)
        if made is None:
            return
        using = torch.cuda.current_stream(device)
        using.wait_stream(side)
        for tensor in leaves(made[:2]):
            tensor.record_stream(
                using
            )  # its memory is free for the side stream once this one is done with it
        yield made


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One for all loaders: memory that one stream has freed is not another's."""
    return torch.cuda.Stream(index)
