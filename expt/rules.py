"""What a configuration means on a given machine: the value of each `auto`, and what cannot run there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expt.errors import did_you_mean
from expt.machine import Machine

if TYPE_CHECKING:
    from expt.schema import RunConfig

METRICS = ("loss", "accuracy")
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
        world_size = machine.workers or (1 if node.get("debug") is True else num_gpus or CPU_WORKERS)
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
        # Measured on a CPU: resnet18 gains a tenth, and a quarter with amp; convnet nothing.
        channels_last = model == "resnet18" or (model == "convnet" and num_gpus > 0)
    return {
        **node,
        "channels_last": channels_last,
        "gpus": gpus,
        "world_size": world_size,
        "backend": backend,
        "threads": threads,
    }


def impossible(config: RunConfig, machine: Machine) -> list[str]:
    """Combinations that cannot run on `machine`, one line each, with the mend."""
    return [*_hardware(config, machine), *_batch(config), *_objective(config)]


def _hardware(config: RunConfig, machine: Machine) -> list[str]:
    problems = []
    have = len(machine.gpus)
    gpus = config.gpus
    shown = gpus if isinstance(gpus, int) else "[" + ",".join(map(str, gpus)) + "]"
    on_cpu = "use gpus=0 to run on the CPU"
    if isinstance(gpus, int) and gpus > have:
        problems.append(f"gpus={shown}: this machine has {_count(have, 'GPU')}; {on_cpu}")
    elif not isinstance(gpus, int) and any(index >= have for index in gpus):
        known = f"{_count(have, 'GPU')}, counted from 0" if have else "no GPU"
        problems.append(f"gpus={shown}: this machine has {known}; {on_cpu}")
    elif not isinstance(gpus, int) and len(set(gpus)) < len(gpus):
        problems.append(f"gpus={shown}: names a GPU twice; use backend=gloo and world_size for two workers on one")
    workers = machine.local_workers or config.world_size  # those that share this machine's GPUs
    if machine.workers not in (None, config.world_size):
        problems.append(f"world_size={config.world_size}: {machine.workers} workers were started; leave world_size out")
    elif config.num_gpus > workers:
        problems.append(f"world_size={workers}: {config.num_gpus} GPUs need as many workers; use gpus={workers}")
    if config.backend == "nccl" and (not config.num_gpus or machine.simulated):
        problems.append("backend=nccl: needs a GPU, and this run uses none; use backend=gloo")
    elif config.backend == "nccl" and workers > config.num_gpus:
        problems.append(
            f"world_size={workers}: nccl takes one worker per GPU, and gpus={shown}; "
            f"use world_size={config.num_gpus} or backend=gloo"
        )
    if config.debug and workers > 1:
        problems.append(f"world_size={workers}: debug=true runs one worker in this process; use world_size=1")
    if config.amp == "fp16" and not config.num_gpus and not machine.cpu_fp16:
        problems.append("amp=fp16: this CPU does not compute in float16; use amp=bf16 or a GPU")
    if config.ddp.sync_batchnorm and not config.num_gpus:
        problems.append("ddp.sync_batchnorm=true: works on GPUs only; use ddp.sync_batchnorm=false")
    return problems


def _batch(config: RunConfig) -> list[str]:
    parts = config.world_size * config.gradient_accumulation
    if config.batch_size % parts == 0:
        return []
    below = config.batch_size // parts * parts
    near = f"{below} or {below + parts}" if below else f"{parts}"
    by = f"{config.world_size} workers"
    if config.gradient_accumulation > 1:
        by += f" x {config.gradient_accumulation} parts (gradient_accumulation)"
    return [f"batch_size={config.batch_size}: is the global batch and must divide by {by}; use {near}"]


def _objective(config: RunConfig) -> list[str]:
    problems = []
    if config.eval_split == "val" and config.dataset.val_fraction == 0:
        problems.append("dataset.val_fraction=0.0: leaves nothing to evaluate on; use eval_split=test")
    metric, _, split = config.objective.partition("/")
    splits = ["train", "test"] if config.eval_split == "test" else ["train", "val", "test"]
    tags = [f"{metric}/{split}" for metric in METRICS for split in splits]
    if metric not in METRICS or split not in splits:
        hint = did_you_mean(config.objective, tags)
        problems.append(f"objective={config.objective}: not one of {', '.join(tags)}.{hint}")
    return problems


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}" + ("" if number == 1 else "s")
