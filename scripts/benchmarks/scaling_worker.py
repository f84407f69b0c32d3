"""One of n workers that measure what the scaling model needs, and what it is to be compared with;
prints JSON.

Started by scripts/scaling with RANK and its companions in the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from expt.worker.parallel import without_broadcasts
from scripts.benchmarks.scaling import BUCKET_MIB, IMAGE, SMALL

BLOCKS = 5


def main() -> None:
    """Time steps with and without the sum of gradients, and sums of two sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    module = _model(args.model).to(device)
    # Without the statistics of batch norms, as expt has it: a broadcast in each step would count as
    # computation.
    parallel = DistributedDataParallel(
        module, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB, **without_broadcasts(module)
    )
    images = torch.randn(args.batch, *IMAGE, device=device)
    labels = torch.randint(10, (args.batch,), device=device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, fused=True)

    exchanges, everyone = True, dist.group.WORLD
    assert everyone is not None

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations as they stand
        if exchanges:
            return default_hooks.allreduce_hook(everyone, bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(dist.get_world_size()))
        return done

    parallel.register_comm_hook(None, hook)

    def step(*, together: bool) -> None:
        """Alone it fills the buckets too: that is DistributedDataParallel's own work, not the
        links'.
        """
        nonlocal exchanges
        exchanges = together
        functional.cross_entropy(parallel(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    together_s, alone_times_s = _alternately(step, args.steps, device)
    found: dict[str, Any] = {
        "together_s": together_s,
        "alone_times_s": alone_times_s,
        "flop": _flop(parallel, images, labels),
        "on_gpu": cuda,
        "gradient_bytes": sum(4 * p.numel() for p in module.parameters()),
        "sums": {},
    }
    for size in (SMALL, min(found["gradient_bytes"], BUCKET_MIB * 2**20)):
        values = torch.zeros(size // 4, device=device)
        found["sums"][size] = _sum_s(values, step, args.steps, device)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    os._exit(
        0
    )  # a thread of gloo that gives back the hook while Python ends would call std::terminate


def _flop(parallel: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    """Floating-point operations of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(parallel(images), labels).backward()
    return int(counter.get_total_flops())


def _model(name: str) -> nn.Module:
    """The model as conf/model has it."""
    shape: Any = {"channels": IMAGE[0], "image_size": IMAGE[1:], "num_classes": 10}
    if name == "mlp":
        from expt.models.vision import MLP

        return MLP(hidden=(256,), dropout=0.0, **shape)
    if name == "convnet":
        from expt.models.vision import ConvNet

        return ConvNet(widths=(12, 24, 32), kernels=(3, 6, 6), hidden=256, dropout=0.5, **shape)
    from expt.models.vision import ResNet18

    return ResNet18(stem="small", **shape)


def _sum_s(
    values: torch.Tensor, step: Callable[..., None], times: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a sum, and of cores that it takes; each comes after a step, which leaves caches as
    training does.
    """
    blocks = []
    for _ in range(BLOCKS):
        found = []
        for _ in range(times):
            step(together=False)
            found.append(_block(lambda: dist.all_reduce(values), 1, device))
        blocks.append([statistics.fmean(column) for column in zip(*found, strict=True)])
    seconds, of_cores = (statistics.median(column) for column in zip(*blocks, strict=True))
    return seconds, of_cores


def _block(work: Callable[[], object], times: int, device: torch.device) -> tuple[float, float]:
    """Seconds of each of so many, and of cores."""
    dist.barrier()
    began, before = time.perf_counter(), time.process_time()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / times, (time.process_time() - before) / times


def _alternately(
    step: Callable[..., None], times: int, device: torch.device
) -> tuple[float, list[list[float]]]:
    """The median seconds of a step with the sum of gradients, and those of each worker's steps
    without it.

    Blocks of both take turns, so that what else the machine does falls on either. All workers begin
    each step without the sum together, as the sum makes them, and so share cores as they do with
    it."""
    together: list[float] = []
    alone: list[float] = []
    for block in range(BLOCKS + 1):
        (seconds, *_), times_s = (
            _block(lambda: step(together=True), times, device),
            _each(step, times, device),
        )
        if block:  # the first one warms up
            together.append(seconds)
            alone += times_s
    return statistics.median(together), _everyones(alone)


def _each(step: Callable[..., None], times: int, device: torch.device) -> list[float]:
    found = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        step(together=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return found


def _everyones(times: list[float]) -> list[list[float]]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return gathered


if __name__ == "__main__":
    main()
