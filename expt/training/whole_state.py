"""The state of a sharded model with whole tensors on rank 0, and each worker's shards of such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expt.training.collectives import from_rank_0
from expt.training.sharding import is_sharded, whole

Place = tuple[Any, ...]
"""The keys that lead to a tensor in nested containers."""


def gathered(state: Any, *, keep: bool) -> Any:
    """Return `state` with whole tensors on the CPU, none of which is in use.

    A collective, in which each worker holds one whole tensor at a time; without `keep` it keeps
    none."""

    def kept(_: Place, tensor: Tensor) -> Tensor:
        full = whole(tensor.detach())
        return full.to("cpu", copy=not is_sharded(tensor)) if keep else torch.empty(0)

    return map_tensors(kept, state)


def scattered(state: Any, like: Callable[[Place], Tensor | None], device: torch.device) -> Any:
    """Return rank 0's `state` on every worker, with shards where `like` gives a sharded tensor.

    The others pass None. A collective, in which each worker holds one whole tensor at a time."""
    shape: Any = None if state is None else map_tensors(lambda _, tensor: tensor.to("meta"), state)
    wholes: list[Tensor] = []
    if state is not None:
        map_tensors(lambda _, tensor: wholes.append(tensor), state)
    next_of_rank_0 = iter(wholes)

    def received(place: Place, empty: Tensor) -> Tensor:
        mine = next(next_of_rank_0, None)
        # Contiguous on all workers: sent is the memory as it lies.
        full = (
            torch.empty(empty.shape, dtype=empty.dtype, device=device)
            if mine is None
            else mine.to(device).contiguous()
        )
        dist.broadcast(full, src=0)
        pattern = like(place)
        if pattern is not None and is_sharded(pattern) and pattern.shape == full.shape:
            return _shard_of(full, pattern)
        return full

    return map_tensors(received, from_rank_0(shape, device))


def _shard_of(full: Tensor, pattern: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    part = distribute_tensor(full, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return DTensor.from_local(  # a copy, for it may be a view of the whole
        part.to_local().clone(),
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def map_tensors(change: Callable[[Place, Tensor], Any], state: Any, place: Place = ()) -> Any:
    """Return nested containers with `change` applied to each tensor and its place."""
    if isinstance(state, Tensor):
        return change(place, state)
    if isinstance(state, Mapping):
        return {key: map_tensors(change, value, (*place, key)) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(
            map_tensors(change, value, (*place, index)) for index, value in enumerate(state)
        )
    return state
