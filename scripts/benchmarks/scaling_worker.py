"""One of n workers that measure what the scaling model needs, and what it is to be compared with; prints JSON.

Started by scripts/scaling with RANK and its companions in the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from scripts.benchmarks.scaling import BUCKET_MIB, IMAGE, SIZES


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
    parallel = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB)
    images = torch.randn(args.batch, *IMAGE, device=device)
    labels = torch.randint(10, (args.batch,), device=device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, fused=True)

    def step(*, together: bool) -> None:
        with contextlib.nullcontext() if together else parallel.no_sync():
            functional.cross_entropy(parallel(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = {
        "together_s": _seconds(lambda: step(together=True), args.steps, device),
        "alone_s": _seconds(lambda: step(together=False), args.steps, device),
        "flop": _flop(parallel, images, labels),
        "on_gpu": cuda,
        "gradient_bytes": sum(4 * p.numel() for p in module.parameters()),
    }
    for size in SIZES:
        values = torch.zeros(size // 4, device=device)
        found[f"sum_{size}_s"] = _seconds(lambda values=values: dist.all_reduce(values), 10, device)  # type: ignore[misc]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _flop(parallel: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    """Floating-point operations of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(parallel(images), labels).backward()
    return int(counter.get_total_flops())


def _model(name: str) -> nn.Module:
    """The model as conf/model has it."""
    shape: Any = {"channels": IMAGE[0], "image_size": IMAGE[1:], "num_classes": 10}
    if name == "mlp":
        from expt.models.mlp import MLP

        return MLP(hidden=(256,), dropout=0.0, **shape)
    if name == "convnet":
        from expt.models.convnet import ConvNet

        return ConvNet(widths=(12, 24, 32), kernels=(3, 6, 6), hidden=256, dropout=0.5, **shape)
    from expt.models.resnet import ResNet18

    return ResNet18(stem="small", **shape)


def _seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """The median of 5 blocks, after one that warms up."""
    blocks = []
    for _ in range(6):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        blocks.append((time.perf_counter() - began) / times)
    return statistics.median(blocks[1:])


if __name__ == "__main__":
    main()
