"""Gradients of the CPU workers of one machine, averaged through shared memory.

A gloo all-reduce of a small model takes about 2 ms on two cores, four fifths of a step, nearly all
of it spent waking threads. Here each worker copies its gradients into a shared slot, says so by a
counter, and adds up everyone's slots in the order of ranks, so that all get the same bits.
"""

# Without `from __future__ import annotations`: DistributedDataParallel looks at the hook's
# annotations.
import mmap
import os
import time

import numpy as np
import torch
import torch.distributed as dist

from expt.errors import RunFailed, TimedOut
from expt.training import collectives

CHUNK = 256 * 1024
"""Elements that travel at once: small enough for a core's cache."""
LINE = 8
"""int64 counters in a cache line; each worker's has a line for itself."""
SPINS = 20_000


class SharedMemory:
    """Slots for every worker, twice: the next can be filled while some still read one."""

    def __init__(self, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        counters, slots = 8 * LINE * world_size, 2 * world_size * CHUNK * 4
        self._map = _map_by_all(rank, counters + slots)
        words = np.frombuffer(self._map, dtype=np.int64, count=LINE * world_size)
        self._arrived = words[::LINE]
        flat = torch.frombuffer(self._map, dtype=torch.float32, offset=counters)
        self._slots = flat.view(2, world_size, CHUNK)
        self._round = 0
        self.spent_s = 0.0
        """Seconds in all exchanges so far."""

    def average(self, values: torch.Tensor) -> None:
        """Replace float32 `values` [N] by their mean over all workers, who call in the same order.

        Raises TimedOut, naming the rank, if one does not arrive in `timeout_s`.
        """
        began = time.perf_counter()
        for chunk in values.split(CHUNK):
            torch.sum(self._exchange(chunk), dim=0, out=chunk)
        values.mul_(1 / self._world_size)
        self.spent_s += time.perf_counter() - began

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return every worker's float32 `values` [N], by rank [world_size, N]; see `average`."""
        began = time.perf_counter()
        everyones = torch.cat(
            [self._exchange(chunk).clone() for chunk in values.split(CHUNK)], dim=1
        )
        self.spent_s += time.perf_counter() - began
        return everyones

    def _exchange(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return every worker's `chunk`, by rank; to be read before the next but one."""
        slots = self._slots[self._round % 2, :, : len(chunk)]
        slots[self._rank].copy_(chunk)
        self._wait_for_all()
        return slots

    def _wait_for_all(self) -> None:
        # A worker arrives here for the next round after it has read this one: two sets of slots
        # suffice.
        self._round += 1
        self._arrived[self._rank] = self._round
        spins, deadline = 0, 0.0
        while self._arrived.min() < self._round:
            spins += 1
            os.sched_yield()
            if spins < SPINS:
                continue
            deadline = deadline or time.monotonic() + self._timeout_s
            if time.monotonic() > deadline:
                missing = [
                    rank for rank in range(self._world_size) if self._arrived[rank] < self._round
                ]
                names = ", ".join(map(str, missing))
                raise TimedOut(
                    f"rank {names} did not arrive within {self._timeout_s:g} s (timeout_s)"
                )
            time.sleep(1e-4)  # it is late: leave it the core


def average_bucket(
    memory: SharedMemory, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket: the communication hook for DistributedDataParallel."""
    memory.average(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _map_by_all(rank: int, size: int) -> mmap.mmap:
    """Return unnamed memory that every worker of this machine maps, and that ends with the last."""
    mine, mapped, problem = None, None, ""
    try:
        mine = _allocate(size) if rank == 0 else None
    except OSError as error:
        problem = str(error)
    known = None if mine is None else (_path_of(mine), _identity(mine))
    place = collectives.from_rank_0(known)
    try:
        mapped = _map_at(*place, size) if place else None
    except OSError as error:
        problem = str(error)
    # rank 0 has it open until all have mapped it
    problems = [each for each in collectives.gather_across_workers(problem) if each]
    if mine is not None:
        os.close(mine)
    if mapped is None or problems:
        raise RunFailed(
            f"the workers cannot share {size} bytes of memory ({problems[0]}); use"
            " ddp.shared_memory=false"
        )
    return mapped


def _allocate(size: int) -> int:
    """Return the descriptor of an unnamed file with space: writing without would kill."""
    descriptor = os.memfd_create("expt")
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


def _path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _identity(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino


def _map_at(path: str, identity: tuple[int, int], size: int) -> mmap.mmap:
    """Return the memory; raise OSError for another's, which a path may be in containers."""
    with open(path, "r+b") as file:
        if _identity(file.fileno()) != identity:
            raise OSError(f"{path} is not that of rank 0")
        return mmap.mmap(file.fileno(), size)
