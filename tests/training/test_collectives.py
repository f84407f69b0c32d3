"""What ranks tell one another, by a real process group; and a single worker, which has none."""

import math
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from expt.training import collectives
from expt.training.collectives import Worker
from tests import on_cards
from tests.facade import Patch
from tests.ranks import ends_of, together

ENVIRONMENT = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_a_large_tensor_is_sent_where_it_lies(monkeypatch: Patch) -> None:
    """Copy tensors that are not contiguous or share a bucket, one copy at a time."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 64)
    large, turned, small = torch.ones(5, 5), torch.ones(6, 5).t(), [torch.ones(4), torch.ones(3)]
    seen, copies = list[int](), list[weakref.ref[torch.Tensor]]()

    def double(flat: torch.Tensor) -> None:
        assert not any(copy() is not None for copy in copies)
        seen.append(flat.data_ptr())
        if flat.data_ptr() != large.data_ptr():
            copies.append(weakref.ref(flat))
        flat.mul_(2)

    collectives.average([large, turned, *small], double)
    assert all((each == 2).all() for each in (large, turned, *small))
    assert (len(seen), len(copies)) == (3, 2)


class Net(nn.Module):
    """Parameters of two data types, and buffers of two, each full of one number."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.full((2, 2), float(number), dtype=torch.bfloat16))
        self.single = nn.Parameter(torch.full((3,), float(number)))
        self.register_buffer("mean", torch.full((2,), float(number)))
        self.register_buffer("count", torch.tensor(number))

    @property
    def numbers(self) -> list[Any]:
        return [
            tensor.flatten().tolist() for tensor in (self.low, self.single, self.mean, self.count)
        ]


def all_of_them(worker: Worker) -> dict[str, Any]:
    """Each collective once, and what became of what was given."""
    with worker.device:  # on which tensors are made
        return _all_of(worker.rank)


def _all_of(rank: int) -> dict[str, Any]:
    mine, buffers, everything = torch.tensor([rank + 1.0, 10.0]), Net(rank + 7), Net(rank + 7)
    collectives.broadcast(buffers.buffers())
    collectives.broadcast_parameters(everything)
    told: dict[str, Any] = collectives.from_rank_0(
        {"x": torch.tensor([2.5], device="cpu"), "y": "text"} if rank == 0 else None
    )
    grads = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    grads[0].grad = mine.clone()
    grads[1].grad = None if rank else torch.tensor([3.0, 6.0])
    collectives.average_gradients(grads)
    return {
        "grads": [None if one.grad is None else one.grad.tolist() for one in grads],
        "sum": collectives.sum_across_workers(mine).tolist(),
        "max": collectives.max_across_workers([float(rank), -float(rank)]),
        "told": (told["x"].tolist(), told["y"]),
        "gathered": collectives.gather_across_workers("a" * rank),
        "stacked": collectives.stack_across_workers(mine).tolist(),
        "buffers": buffers.numbers,
        "everything": everything.numbers,
        "mine": mine.tolist(),
    }


def gathered_in_groups(worker: Worker) -> list[int]:
    groups: list[Any] = [dist.new_group([0, 2]), dist.new_group([1])]
    return collectives.gather_across_workers(worker.rank, groups[worker.rank % 2])


def test_a_group_of_some_ranks_gathers_theirs(tmp_path: Path) -> None:
    assert together(tmp_path, 3, gathered_in_groups) == [[0, 2], [1], [0, 2]]


@pytest.mark.parametrize("bucket_bytes", [collectives.BUCKET_BYTES, 1])
def test_ranks_agree(bucket_bytes: int, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(collectives, "BUCKET_BYTES", bucket_bytes)
    for rank, found in enumerate(together(tmp_path, 3, all_of_them)):
        own = rank + 7
        assert found == {
            "grads": [pytest.approx([2.0, 10.0]), [1.0, 2.0], None],
            "sum": [6.0, 30.0],
            "max": [2.0, 0.0],
            "told": ([2.5], "text"),
            "gathered": ["", "a", "aa"],
            "stacked": [[1.0, 10.0], [2.0, 10.0], [3.0, 10.0]],
            "buffers": [[own] * 4, [own] * 3, [7] * 2, [7]],
            "everything": [[7] * 4, [7] * 3, [7] * 2, [7]],
            "mine": [rank + 1.0, 10.0],
        }


def largest_of_three(worker: Worker) -> list[float]:
    """Of numbers of which rank 0, rank 2 and nobody has nan, and of infinities of both signs."""
    mine = torch.tensor([1.0, worker.rank, worker.rank, worker.rank, 0], device=worker.device)
    mine[[1, 3, 2][worker.rank]] = [math.nan, 3.0, math.nan][worker.rank]
    mine[4] = [math.inf, -math.inf, 0.0][worker.rank]
    found: list[float] = collectives.sum_across_workers(mine, largest=4).tolist()
    return found


def test_a_nan_of_any_worker_is_the_largest(tmp_path: Path) -> None:
    for found in together(tmp_path, 3, largest_of_three):
        assert found == pytest.approx([3.0, math.nan, math.nan, 3.0, math.inf], nan_ok=True)


def test_a_single_worker_talks_to_itself() -> None:
    device = on_cards.device_of(0)
    alone = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=device)
    with collectives.process_group(alone, backend="gloo", timeout_s=1.0):
        assert not dist.is_initialized()
        assert all_of_them(alone) == {
            "grads": [[1.0, 10.0], [3.0, 6.0], None],
            "sum": [1.0, 10.0],
            "max": [0.0, 0.0],
            "told": ([2.5], "text"),
            "gathered": [""],
            "stacked": [[1.0, 10.0]],
            "buffers": [[7] * 4, [7] * 3, [7] * 2, [7]],
            "everything": [[7] * 4, [7] * 3, [7] * 2, [7]],
            "mine": [1.0, 10.0],
        }


@pytest.mark.parametrize(("gpus", "device"), [([], "cpu"), ([0, 1], "cuda:1"), ([3], "cuda:3")])
def test_a_worker_as_the_launcher_describes_it(gpus: list[int], device: str) -> None:
    found = collectives.worker_from(ENVIRONMENT, gpus=gpus)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert found.device == torch.device(device)


def raises_within(worker: Worker) -> None:
    raise ValueError(f"of rank {worker.rank}")


def test_a_worker_that_fails_leaves_the_group_as_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    """NCCL's end waits for the others, who wait for this one."""
    monkeypatch.setattr(dist, "destroy_process_group", lambda: os._exit(9))
    first, _ = ends_of(tmp_path, 2, raises_within)  # which ends the other, wherever that is
    assert first == 1
