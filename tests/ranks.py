"""Ranks of a real process group, forked from the test, which talk by gloo."""

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from expt.training.collectives import Worker, process_group
from tests import on_cards

TIMEOUT_S, CPU = 20.0, torch.device("cpu")
BackendConfig(on_cards.BACKEND)  # torch looks for it among all packages, here once for all ranks


def worker_of(
    rank: int = 0, size: int = 1, device: torch.device = CPU, gpus: tuple[int, ...] = ()
) -> Worker:
    """Return the worker of this rank, of all on one machine."""
    sizes: Any = {"world_size": size, "local_world_size": size}
    return Worker(rank=rank, local_rank=rank, device=device, gpus=gpus, **sizes)


def together(folder: Path, size: int, each: Callable[[Worker], Any]) -> list[Any]:
    """Return what `each` returns on each of `size` ranks, which meet in a file in `folder`."""
    pipes, ranks = _started(folder, size, each)
    try:
        found = [mine.recv() for mine, _ in pipes]
    finally:
        for rank in ranks:
            rank.join(TIMEOUT_S)
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * size
    return found


def ends_of(folder: Path, size: int, each: Callable[[Worker], Any]) -> list[int | None]:
    """Return the exit codes of ranks, of which all are ended with the first."""
    _, ranks = _started(folder, size, each)
    ranks[0].join(TIMEOUT_S)
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _started(
    folder: Path, size: int, each: Callable[[Worker], Any]
) -> tuple[list[tuple[Connection, Connection]], list[ForkProcess]]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    store = Path(tempfile.mkdtemp(prefix="store-", dir=folder)) / "store"
    ranks = [
        context.Process(target=_rank, args=(rank, size, store, pipes, each)) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    return pipes, ranks


def _rank(
    rank: int,
    size: int,
    store: Path,
    pipes: list[tuple[Connection, Connection]],
    each: Callable[[Worker], Any],
) -> None:
    answer = pipes[rank][1]
    for _, theirs in pipes:
        if theirs is not answer:
            theirs.close()  # or nobody would notice the end of another rank
    gc.freeze()  # collections pass by what is the test's
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gpus = tuple(range(size)) if on_cards.ON else ()
    worker = worker_of(rank, size, on_cards.device_of(rank), gpus)
    meeting = dist.FileStore(str(store), size)
    with process_group(worker, backend=on_cards.BACKEND, timeout_s=TIMEOUT_S, store=meeting):
        meeting.set(f"there/{rank}", "")  # one that ends sooner would break off another's start
        meeting.wait([f"there/{one}" for one in range(size)])
        answer.send(each(worker))
    assert not dist.is_initialized(), "the group is left"
