"""What a configuration means on a given machine: the value of each `auto`, and what cannot run
there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from expt.config import trackers
from expt.config.datasets import has_rows
from expt.config.groups import (
    SGD,
    ConvNet,
    DefaultInit,
    NamedModel,
    Plateau,
    ResNet18,
    TargetOptimizer,
    TargetScheduler,
    Transformer,
)
from expt.config.sharding_rules import of_sharding
from expt.config.task_rules import of_samples, of_task, of_tokens
from expt.machine import Machine, is_slice

if TYPE_CHECKING:
    from expt.config.schema import RunConfig


DDP = "use strategy=ddp, which is faster too"


def impossible(config: RunConfig, machine: Machine) -> list[str]:
    """Combinations that cannot run on `machine`, one line each, with the mend."""
    return [
        *_hardware(config, machine),
        *_strategy(config),
        *of_sharding(config, machine),
        *_compile(config),
        *_model(config),
        *_freeze(config),
        *_memory(config),
        *_optimizer(config),
        *_batch(config),
        *of_task(config),
        *_schedule(config),
        *trackers.problems(config.mlflow, config.secrets),
    ]


def unmeasurable(config: RunConfig, machine: Machine) -> list[str]:
    """What of `impossible` concerns an evaluation too."""
    return [*_hardware(config, machine), *_compile(config), *_model(config), *of_samples(config)]


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
        problems.append(
            f"gpus={shown}: names a GPU twice; use backend=gloo and world_size for two workers"
            " on one"
        )
    elif config.num_gpus > 1 and any(map(is_slice, _chosen(config, machine))):
        problems.append(
            f"gpus={shown}: CUDA shows a process one slice of a GPU (MIG) alone; use gpus=1"
        )
    workers = (
        1 if machine.own_gpus else machine.local_workers or config.world_size
    )  # those that share the GPUs
    if machine.workers not in (None, config.world_size):
        problems.append(
            f"world_size={config.world_size}: {machine.workers} workers were started; leave"
            " world_size out"
        )
    elif config.num_gpus > workers and config.strategy != "dp":
        problems.append(
            f"world_size={workers}: {config.num_gpus} GPUs need as many workers; use gpus={workers}"
        )
    if config.backend == "nccl" and (not config.num_gpus or machine.simulated):
        problems.append("backend=nccl: needs a GPU, and this run uses none; use backend=gloo")
    elif config.backend == "nccl" and workers > config.num_gpus:
        problems.append(
            f"world_size={workers}: nccl takes one worker per GPU, and gpus={shown}; "
            f"use world_size={config.num_gpus} or backend=gloo"
        )
    if config.debug and config.world_size > 1:
        problems.append(
            f"world_size={config.world_size}: debug=true runs one worker in this process; use"
            " world_size=1"
        )
    if config.amp == "fp16" and not config.num_gpus and not machine.cpu_fp16:
        problems.append("amp=fp16: this CPU does not compute in float16; use amp=bf16 or a GPU")
    if config.on_nan == "skip" and config.ddp.comm_hook == "powersgd":
        problems.append(
            "on_nan=skip: powersgd would carry a nan into later steps; use another ddp.comm_hook"
        )
    return problems


def _chosen(config: RunConfig, machine: Machine) -> list[str]:
    gpus = range(config.gpus) if isinstance(config.gpus, int) else config.gpus
    return [machine.gpus[index] for index in gpus]


def _strategy(config: RunConfig) -> list[str]:
    if config.strategy != "dp":
        return []
    problems = []
    if config.num_gpus < 2:
        gpus = _count(config.num_gpus, "GPU")
        problems.append(
            f"strategy=dp: shares each batch out among at least 2 GPUs, and this run uses {gpus};"
            f" {DDP}"
        )
    if config.world_size > 1:
        problems.append(
            f"world_size={config.world_size}: strategy=dp has one process for all GPUs; {DDP}"
        )
    if config.compile:
        problems.append(
            f"compile={config.compile}: the copies that strategy=dp makes can't be compiled; {DDP}"
        )
    if config.batch_norm != "per_worker":
        problems.append(
            f"batch_norm={config.batch_norm}: strategy=dp can't share batch statistics; {DDP}"
        )
    return problems


def _compile(config: RunConfig) -> list[str]:
    if not config.compile:
        return []
    problems = []
    if config.onednn:
        problems.append("onednn=true: torch.compile can't take these layers; use onednn=auto")
    if (
        config.num_gpus
        and config.gradient_accumulation > 1
        and config.compile in ("reduce-overhead", "max-autotune")
    ):
        problems.append(
            f"gradient_accumulation={config.gradient_accumulation}: with compile={config.compile}"
            " (CUDA graphs) each part of a batch would overwrite the gradients of those before;"
            " use compile=true"
        )
    if config.batch_norm == "sync" and not config.num_gpus and config.world_size > 1:
        problems.append(
            "batch_norm=sync: torch.compile can't take these layers on a CPU; use batch_norm=groups"
        )
    return problems


def _model(config: RunConfig) -> list[str]:
    if (
        isinstance(config.model, NamedModel)
        and config.model.pretrained
        and not isinstance(config.init, DefaultInit)
    ):
        return [
            f"init={config.init.name}: would draw anew what model.pretrained=true loads; use"
            " init=default"
        ]
    if isinstance(config.model, Transformer):
        return [*_heads(config.model), *of_tokens(config)]
    if has_rows(config.dataset) and isinstance(config.model, ConvNet | ResNet18):
        name = config.model.name
        return [
            f"model={name}: takes images, and dataset={config.dataset.name} has rows of numbers;"
            " use model=mlp"
        ]
    if not isinstance(config.model, ConvNet):
        return of_tokens(config)
    return [*_convolutions(config.model), *of_tokens(config)]


def _heads(model: Transformer) -> list[str]:
    heads, below = model.heads, model.width // model.heads * model.heads
    if below == model.width and model.positions == "rotary" and model.width // heads % 2:
        return [
            f"model.positions=rotary: turns pairs of channels, and each of model.heads={heads} has"
            f" {model.width // heads} of model.width={model.width}; use an even number, or"
            " model.positions=learned"
        ]
    if below == model.width:
        return []
    near = f"{below} or {below + heads}" if below else f"{heads}"
    return [f"model.width={model.width}: must divide by model.heads={heads}; use {near}"]


def _convolutions(model: ConvNet) -> list[str]:
    lists = ("kernels", "strides", "paddings")
    others = [f"model.{key} has {len(getattr(model, key))}" for key in lists]
    if all(len(getattr(model, key)) == len(model.widths) for key in lists):
        return []
    shown = ", ".join(map(str, model.widths))
    return [
        f"model.widths=[{shown}]: {_count(len(model.widths), 'convolution')}, but"
        f" {', '.join(others)}; give each one"
    ]


def _freeze(config: RunConfig) -> list[str]:
    problems = []
    for pattern in config.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(
                f"freeze={pattern}: is no regular expression ({error}); a name as it is will do"
            )
    return problems


def _memory(config: RunConfig) -> list[str]:
    problems, wanted = [], config.activation_checkpointing
    if wanted and config.strategy == "dp":
        shown = wanted if isinstance(wanted, str) else f"[{','.join(wanted)}]"
        problems.append(
            f"activation_checkpointing={shown}: the copies that strategy=dp makes can't be"
            f" checkpointed; {DDP}"
        )
    for pattern in () if isinstance(wanted, str) else wanted:
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(
                f"activation_checkpointing={pattern}: is no regular expression ({error})"
            )
    if config.offload and isinstance(config.optimizer, TargetOptimizer):
        problems.append(
            "offload=cpu: updates part by part, which an optimiser of your own may not take; use"
            " null"
        )
    return problems


def _optimizer(config: RunConfig) -> list[str]:
    problems = []
    if (
        isinstance(config.optimizer, SGD)
        and config.optimizer.nesterov
        and not config.optimizer.momentum
    ):
        problems.append("optimizer.nesterov=true: needs a momentum, as in optimizer.momentum=0.9")
    for index, group in enumerate(config.optimizer.groups):
        try:
            re.compile(group.match)
        except re.error as error:
            problems.append(
                f"optimizer.groups.{index}.match={group.match}: is no regular expression: {error}"
            )
        if group.epochs and isinstance(config.scheduler, Plateau | TargetScheduler):
            problems.append(
                f"optimizer.groups.{index}.epochs={group.epochs:g}:"
                f" scheduler={config.scheduler.name} sets rates by itself; use constant, cosine,"
                " step or one_cycle"
            )
    return problems


def _batch(config: RunConfig) -> list[str]:
    parts = config.world_size * config.gradient_accumulation
    problems = []
    if config.lr_scaling != "none" and config.base_batch_size is None:
        problems.append(
            f"lr_scaling={config.lr_scaling}: needs the batch that optimizer.lr is meant for, as in"
            " base_batch_size=256"
        )
    if config.print_every and config.print_every % config.log_every:
        problems.append(
            f"print_every={config.print_every}: what is printed is logged, and"
            f" log_every={config.log_every}; use a multiple of it, or"
            f" log_every={config.print_every}"
        )
    if config.batch_size % parts == 0:
        return [*problems, *_groups(config, config.batch_size // parts)]
    below = config.batch_size // parts * parts
    near = f"{below} or {below + parts}" if below else f"{parts}"
    by = f"{config.world_size} workers"
    if config.gradient_accumulation > 1:
        by += f" x {config.gradient_accumulation} parts (gradient_accumulation)"
    return [
        *problems,
        f"batch_size={config.batch_size}: is the global batch and must divide by {by}; use {near}",
    ]


def _groups(config: RunConfig, share: int) -> list[str]:
    """Of each part of a batch that is computed at once, `share` samples."""
    size = config.batch_norm_group
    if config.batch_norm != "groups" or share % size == 0:
        return []
    smaller = next(
        (number for number in range(min(size, share), 1, -1) if share % number == 0), None
    )
    larger = config.batch_size // share * size * -(-share // size)
    mends = [f"batch_norm_group={smaller}"] if smaller else []
    return [
        f"batch_norm_group={size}: each worker computes {_count(share, 'sample')} at once, which"
        f" must be whole groups; use {' or '.join([*mends, f'batch_size={larger}'])}"
    ]


def _schedule(config: RunConfig) -> list[str]:
    warmup_epochs = getattr(config.scheduler, "warmup_epochs", 0.0)
    planned = getattr(config.scheduler, "epochs", None)
    if planned is not None and warmup_epochs >= planned:
        return [
            f"scheduler.epochs={planned:g}: is all warm-up,"
            f" scheduler.warmup_epochs={warmup_epochs:g}; use more, or less of it"
        ]
    if warmup_epochs <= config.epochs:
        return []
    return [
        f"scheduler.warmup_epochs={warmup_epochs:g}: the run ends before, after"
        f" epochs={config.epochs}; use {config.epochs} or less"
    ]


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}" + ("" if number == 1 else "s")
