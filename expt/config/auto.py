"""The value that each `auto` stands for on a given machine."""

from __future__ import annotations

import re
from typing import Any

from expt.machine import Machine

CPU_WORKERS = 2


def fill_auto(node: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """`node` with each `auto` replaced, as far as the other values make sense."""
    gpus = node.get("gpus")
    if gpus == "auto":
        gpus = 1 if node.get("debug") is True and machine.gpus else len(machine.gpus)
        gpus = min(gpus, machine.local_workers or gpus)
    # A value of the wrong type is reported by the caller; the others still get theirs.
    num_gpus = len(gpus) if isinstance(gpus, list) else max(0, gpus) if isinstance(gpus, int) else 0
    world_size = node.get("world_size")
    if world_size == "auto":
        one = node.get("debug") is True or node.get("strategy") == "dp"
        world_size = machine.workers or (1 if one else num_gpus or CPU_WORKERS)
    batch_size = node.get("batch_size")
    per_worker = re.fullmatch(r"(\d+) per worker", str(batch_size).strip())
    if per_worker and isinstance(world_size, int):
        batch_size = int(per_worker[1]) * world_size
    backend = node.get("backend")
    if backend == "auto":
        backend = "nccl" if num_gpus and not machine.simulated else "gloo"
    threads = node.get("threads")
    if threads == "auto":
        local = machine.local_workers or world_size
        threads = max(1, machine.cpus // max(1, local if isinstance(local, int) else 1))
    channels_last = node.get("channels_last")
    if channels_last == "auto":
        model = node["model"].get("name") if isinstance(node.get("model"), dict) else None
        # Measured on a CPU: all gain a tenth or more, and a quarter with amp.
        channels_last = model in ("resnet18", "convnet", "paddle_convnet")
    onednn = node.get("onednn")
    if onednn == "auto":
        onednn = machine.cpu_vendor == "AuthenticAMD" and not node.get("compile")
    shown = node.get("tensorboard")
    if isinstance(shown, dict) and shown.get("images") == "auto":
        node = {**node, "tensorboard": {**shown, "images": "end"}}
    return {
        **node,
        "channels_last": channels_last,
        "onednn": onednn,
        "gpus": gpus,
        "world_size": world_size,
        "backend": backend,
        "batch_size": batch_size,
        "threads": threads,
    }
