"""A state of one worker on all of them."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.runs.checkpoint import map_leaves
from expt.training.collectives import Worker
from expt.training.sharding import is_sharded, scattered, whole
from tests.ranks import together

SHAPE = (6, 3, 2, 2)


def states() -> dict[str, Any]:
    """Of the same numbers, which lie in memory in several ways, and some that overlap."""
    numbers = torch.arange(72.0).view(SHAPE)
    laid_out = {
        "plain": numbers,
        "channels_last": numbers.contiguous(memory_format=torch.channels_last),
        "transposed": numbers.transpose(0, 3).contiguous().transpose(0, 3),
        "gaps": numbers.repeat_interleave(2, dim=1)[:, ::2],
    }
    return {
        **laid_out,
        "optimizer": [{"exp_avg": laid_out["channels_last"]}],
        "expanded": torch.ones(3, 1).expand(3, 2),
        "counted": collections.Counter("a"),
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_arrive_whatever_their_strides(sharded: bool, tmp_path: Path) -> None:
    def each(worker: Worker) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        pattern = (
            distribute_tensor(
                torch.zeros(SHAPE), init_device_mesh(worker.device.type, (2,)), [Shard(0)]
            )
            if sharded
            else None
        )
        state = states() if worker.rank == 0 else None
        found = scattered(state, lambda place: pattern, worker.device)
        parts = list[bool]()
        map_leaves(lambda _, value: parts.append(is_sharded(value)), found)
        return map_leaves(lambda _, value: listed(value), found), parts

    def listed(value: Any) -> Any:
        return whole(value).tolist() if isinstance(value, torch.Tensor) else value

    expected = map_leaves(lambda _, value: listed(value), states())
    for found, parts in together(tmp_path, 2, each):
        assert found == expected
        assert type(found["counted"]) is collections.Counter
        assert parts == [sharded] * 5 + [False] * 2
