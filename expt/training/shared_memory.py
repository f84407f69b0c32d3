"""Gradients of the CPU workers of one machine, averaged through memory that they share.

A gloo all-reduce of a small model takes about 2 ms on two cores, four fifths of a step, nearly all of it spent waking
threads. Here each worker copies its gradients into a shared slot, says so by a counter, and adds up everyone's slots in
the order of ranks, so that all get the same bits.
"""

# Without `from __future__ import annotations`: DistributedDataParallel looks at the hook's annotations.
import mmap
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from expt.errors import RunFailed, TimedOut

CHUNK = 256 * 1024
"""Elements that travel at once: small enough for a core's cache."""
LINE = 8
"""int64 counters that share a cache line; each worker's stands alone in one."""
SPINS = 20_000


def is_supported() -> bool:
    """Whether a worker's stores are seen by others in the order in which they were made (x86), without fences."""
    return platform.machine() in ("x86_64", "AMD64")


class SharedMemory:
    """Slots for every worker, twice: while some still read one, the others may already fill the next."""

    def __init__(self, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        counters, slots = 8 * LINE * world_size, 2 * world_size * CHUNK * 4
        self._map = _mapped_by_all(rank, counters + slots)
        words = np.frombuffer(self._map, dtype=np.int64, count=LINE * world_size)
        self._arrived = words[::LINE]
        flat = torch.frombuffer(self._map, dtype=torch.float32, offset=counters)
        self._slots = flat.view(2, world_size, CHUNK)
        self._round = 0
        self.spent_s = 0.0
        """In all averages so far."""

    def average(self, values: torch.Tensor) -> None:
        """Replace float32 `values` [N] by their mean over all workers, who must all call this in the same order.

        Raises TimedOut, naming the rank, if one does not arrive in `timeout_s`.
        """
        began = time.perf_counter()
        for chunk in values.split(CHUNK):
            slots = self._slots[self._round % 2, :, : len(chunk)]
            slots[self._rank].copy_(chunk)
            self._wait_for_all()
            torch.sum(slots, dim=0, out=chunk)
        values.mul_(1 / self._world_size)
        self.spent_s += time.perf_counter() - began

    def _wait_for_all(self) -> None:
        # A worker arrives here for the next round after it has read this one: two sets of slots suffice.
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
                missing = [rank for rank in range(self._world_size) if self._arrived[rank] < self._round]
                names = ", ".join(map(str, missing))
                raise TimedOut(f"rank {names} did not arrive within {self._timeout_s:g} s (timeout_s)")
            time.sleep(1e-4)  # it is late: leave it the core


def average_gradients(memory: SharedMemory, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook for DistributedDataParallel."""
    memory.average(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _mapped_by_all(rank: int, size: int) -> mmap.mmap:
    """Memory that every worker of this machine maps, without a name once they have: it ends with the last of them."""
    names: list[str | None] = [None]
    if rank == 0:
        names = [_allocated("/dev/shm", size) or _allocated(tempfile.gettempdir(), size)]
    dist.broadcast_object_list(names, src=0)
    if names[0] is None:
        raise RunFailed(f"neither /dev/shm nor {tempfile.gettempdir()} has {size} bytes; use ddp.shared_memory=false")
    path = Path(names[0])
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
    dist.barrier()
    if rank == 0:
        path.unlink()
    return mapped


def _allocated(folder: str, size: int) -> str | None:
    """A new file there whose space is taken, for one without would kill whoever writes to it; None if there is none."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="expt-", dir=folder)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        Path(name).unlink()
        return None
    finally:
        os.close(descriptor)
    return name
