"""Ranks, and the collectives of the run's workers."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from expt.errors import sized_by, warn

T = TypeVar("T")
BUCKET_BYTES = 2**25
"""The bytes copied at a time to be sent, unless a tensor is larger."""
NCCL_LATER_S = 90.0
"""NCCL kills a process that waits in vain, without an exception: the watchdog is to be first."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One process of a run; passed to whoever needs a rank, never looked up."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    gpus: tuple[int, ...] = ()
    """Those that it may use, of those it can see; all of them where one process drives several."""
    beat: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Reports progress, such as a step of training or a batch of an evaluation."""

    def warn(self, text: str) -> None:
        """Warn on rank 0, which speaks for all workers."""
        if self.rank == 0:
            warn(text)


def worker_from(environment: Mapping[str, str], *, gpus: Sequence[int]) -> Worker:
    """Return the worker that the launcher's variables describe; its device is one of `gpus`."""
    local_rank = int(environment["LOCAL_RANK"])
    return Worker(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=local_rank,
        local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
        device=torch.device("cuda", gpus[local_rank % len(gpus)]) if gpus else torch.device("cpu"),
        gpus=tuple(gpus),
    )


@contextlib.contextmanager
def process_group(
    worker: Worker,
    *,
    backend: str,
    timeout_s: float,
    store: dist.Store | None = None,
    ends_with_process: bool = False,
) -> Iterator[None]:
    """Have the run's process group within the body, unless there is a single worker.

    Workers meet in the `store`, or else at MASTER_ADDR and MASTER_PORT. Where the body raises, the
    group is left as it is: NCCL would first wait for the peers, and they for this worker. Gloo is
    left where it `ends_with_process`: it takes 10 ms and more to end its threads.
    """
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
    if worker.world_size == 1:
        yield
        return
    dist.init_process_group(
        backend,
        store=store,
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(seconds=timeout_s + (NCCL_LATER_S if backend == "nccl" else 0)),
        device_id=worker.device if backend == "nccl" else None,
    )
    yield
    if not (ends_with_process and backend == "gloo"):
        dist.destroy_process_group()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide the other workers from the body: a collective of torch's raises at once."""
    everyone = dist.group.WORLD if dist.is_initialized() else None
    try:
        dist.group.WORLD = None
        yield
    finally:
        dist.group.WORLD = everyone


def sum_across_workers(values: torch.Tensor, largest: int = 0) -> torch.Tensor:
    """Return the sum of all workers' `values`, a new tensor; the maximum of the last `largest`."""
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    if largest:
        peaks = values[-largest:]
        # Gloo's largest of a number and nan is one or the other.
        numbers = peaks.nan_to_num(-math.inf, math.inf, -math.inf)
        both = torch.cat((numbers, peaks.isnan().to(peaks)))
        dist.all_reduce(both, dist.ReduceOp.MAX)
        total[-largest:] = torch.where(both[largest:] > 0, torch.nan, both[:largest])
    return total


def _sending(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device whose tensors a group sends for sure."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def max_across_workers(
    values: Sequence[float], group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return the largest of every worker's `values` by element, waiting for the device."""
    if not dist.is_initialized():
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=_sending(group))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return cast("list[float]", largest.tolist())


def patient_barrier() -> Callable[[], object]:
    """Return a barrier without a limit in time; a collective."""
    if not dist.is_initialized():
        return lambda: None
    group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    return functools.partial(dist.barrier, group)


def from_rank_0(value: T | None) -> T:
    """Return rank 0's `value` on every worker; tensors in it must be on the CPU.

    It is sent in pieces: torch's collectives of objects take its whole size of the device's memory.
    """
    if not dist.is_initialized():
        return cast("T", value)
    is_first, device = dist.get_rank() == 0, _sending()
    mine = bytearray(pickle.dumps(value) if is_first else b"")
    size = torch.tensor(len(mine), device=device)
    dist.broadcast(size, 0)
    held = mine or bytearray(int(size))
    for piece in torch.frombuffer(held, dtype=torch.uint8).split(BUCKET_BYTES):
        sent = piece.to(device)
        dist.broadcast(sent, 0)
        piece.copy_(sent)
    return cast("T", value if is_first else pickle.loads(held))


def gather_across_workers(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every worker's `value`, by rank, on every worker; in pieces, as `from_rank_0`."""
    if not dist.is_initialized():
        return [value]
    device = _sending(group)
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([len(mine)], device=device)
    sizes = stack_across_workers(size, group).flatten().tolist()
    padded = nn.functional.pad(mine, (0, max(sizes) - len(mine)))
    pieces = padded.split(max(1, BUCKET_BYTES // 2 // len(sizes)))
    everyones = torch.cat([stack_across_workers(one.to(device), group).cpu() for one in pieces], 1)
    return [pickle.loads(one[:size].numpy()) for one, size in zip(everyones, sizes, strict=True)]


def kinds_of_devices(device: torch.device) -> set[str]:
    """Return the names of all workers' devices; unlike ones may round differently. A collective."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = torch.backends.cpu.get_cpu_capability()
    return {*gather_across_workers(name)}


def stack_across_workers(
    values: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return every worker's `values` [N], by rank [world_size, N], on every worker."""
    if not dist.is_initialized():
        return values[None]
    everyones = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, values, group)
    return torch.stack(everyones)


def broadcast_parameters(module: nn.Module) -> None:
    """Give every worker rank 0's parameters and buffers; see `broadcast`."""
    broadcast([*module.parameters(), *module.buffers()])


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's `tensors` into every worker's; a collective."""
    if dist.is_initialized():
        _change(tensors, lambda flat: dist.broadcast(flat, src=0))


def average(
    tensors: Iterable[torch.Tensor], mean: Callable[[torch.Tensor], object] | None = None
) -> None:
    """Replace `tensors` by their mean over all workers; `mean` may compute that of a vector."""
    _change(tensors, mean or (lambda flat: dist.all_reduce(flat.div_(dist.get_world_size()))))


def average_gradients(
    every: Sequence[nn.Parameter],
    mean: Callable[[torch.Tensor], object] | None = None,
    sparse: Collection[torch.Tensor] = (),
) -> None:
    """Average gradients over all workers, as `average`; where one is missing it counts as 0.

    A gradient that no worker has stays missing. Waits for the device only if this worker lacks one,
    or if some are `sparse`.
    """
    if not dist.is_initialized():
        return
    parameters = [one for one in every if one not in sparse]
    for one in filter(sparse.__contains__, every):
        _average_sparse(one)
    if not parameters:
        return
    lacking = [index for index, one in enumerate(parameters) if one.grad is None]
    has = torch.ones(len(parameters), device=parameters[0].device)
    for index in lacking:
        has[index], parameters[index].grad = 0, torch.zeros_like(parameters[index])
    average([has, *(cast("torch.Tensor", one.grad) for one in parameters)], mean)
    for index in lacking:
        if not has[index]:
            parameters[index].grad = None


def _average_sparse(parameter: nn.Parameter) -> None:
    """Replace a gradient that has only some rows by its mean, added up in the order of ranks."""
    mine, own = None, parameter.grad
    if own is not None:
        is_sparse, own = own.is_sparse, own if own.is_sparse else own.to_sparse(1)
        own = own.coalesce().cpu()
        # Tensors take a hundred times as long to pickle, and NumPy has no bfloat16
        mine = own.indices().numpy(), own.values().view(torch.uint8).numpy(), is_sparse
    every = [each for each in gather_across_workers(mine) if each is not None]
    if every:
        indices = torch.cat([torch.from_numpy(where) for where, *_ in every], 1)
        values = torch.cat([torch.from_numpy(rows) for _, rows, _ in every]).view(parameter.dtype)
        mean, size = values / dist.get_world_size(), parameter.shape
        total = torch.sparse_coo_tensor(indices, mean, size, check_invariants=False).coalesce()
        if not all(is_sparse for *_, is_sparse in every):  # the model uses all rows, too
            total = total.to_dense()
        parameter.grad = total.to(parameter.device)


@sized_by("model")
def reserve_bucket(parameters: Sequence[nn.Parameter]) -> None:
    """Raise where there is no memory for `average_gradients`, in which other workers would wait."""
    if dist.is_initialized():
        missing = sum(one.nbytes for one in parameters if one.grad is None)
        gradients = [one if one.grad is None else one.grad for one in parameters]
        copied = (sum(one.nbytes for one in same) for same in buckets(gradients) if _moves(same))
        size = missing + 4 * len(gradients) + max(copied, default=0)
        torch.empty(size, dtype=torch.uint8, device=parameters[0].device)


@torch.no_grad()
def _change(tensors: Iterable[torch.Tensor], change: Callable[[torch.Tensor], object]) -> None:
    """Change `tensors` in place, one bucket of one data type at a time."""
    for same in buckets(tensors):
        if not _moves(same):
            change(same[0].view(-1))
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        change(flat)
        parts = flat.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
        del flat, parts, part  # before the next is made


def _moves(same: Sequence[torch.Tensor]) -> bool:
    """Return whether these tensors are copied to be sent together."""
    return len(same) > 1 or not same[0].is_contiguous()


def buckets(
    tensors: Iterable[torch.Tensor], most: int | None = None
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield groups of tensors of one data type, of `most` (or BUCKET_BYTES) or of one tensor."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        begin = size = 0
        for index, tensor in enumerate(same):
            if size and size + tensor.nbytes > (most or BUCKET_BYTES):
                yield same[begin:index]
                begin, size = index, 0
            size += tensor.nbytes
        yield same[begin:]
