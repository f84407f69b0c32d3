"""The keyword arguments of expt.run and expt.sweep, for editors and type checkers; a test holds
them to the schema.

conf/config.yaml and `python -m expt --help` say what each key means, and its unit.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from expt.python.interval import Interval

Path: TypeAlias = str | os.PathLike[str]
Own: TypeAlias = type | functools.partial[Any]
"""A class of one's own, or functools.partial(Class, width=16)."""
Group: TypeAlias = str | Mapping[str, Any]
"""The name of a choice; or a dict of its `name` and settings, or of settings alone."""
GroupOfClasses: TypeAlias = Group | Own
"""Also a class of one's own; with arguments as {"_target_": Class, "width": 16}."""
Auto: TypeAlias = Literal["auto"]
CompileMode: TypeAlias = Literal["auto", "default", "reduce-overhead", "max-autotune", "blocks"]


class DDP(TypedDict, total=False):
    """Of torch's DistributedDataParallel."""

    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: float
    comm_hook: Literal["bf16", "fp16", "powersgd"] | None
    shared_memory: bool


class TensorBoard(TypedDict, total=False):
    """What is written for TensorBoard."""

    images: bool | Literal["end", "spare", "auto"]
    graph: bool | Auto
    norms: bool
    histograms: bool
    health: bool


class Patches(TypedDict, total=False):
    """Of torch and the C library."""

    unguarded: bool
    backward: bool
    malloc: bool


class Sharding(TypedDict, total=False):
    """How strategy=fsdp and hsdp cut a model into parts."""

    wrap: Auto | int | Sequence[str]
    shards: Auto | int
    reshard_after_forward: bool
    param_dtype: Literal["auto", "float32", "bf16", "fp16"]
    reduce_dtype: Literal["float32", "bf16"]
    reduce_each_part: bool


class Checkpoint(TypedDict, total=False):
    """When checkpoints are written, and how many are kept."""

    every_steps: int | None
    every_epochs: int | None
    every_minutes: float | None
    keep: int
    sharded: bool | Auto


class EarlyStop(TypedDict, total=False):
    """When a run ends before its last epoch."""

    metric: str
    patience: int
    min_delta: float


class MLflow(TypedDict, total=False):
    """Where MLflow's copy goes."""

    tracking_uri: str | None
    experiment: str | None
    tags: dict[str, str] | None
    checkpoints: bool


class Wandb(TypedDict, total=False):
    """Where W&B's copy goes."""

    project: str | None
    entity: str | None
    group: str | None
    tags: Sequence[str]
    mode: Literal["online", "offline"] | None
    checkpoints: bool


class Settings(TypedDict, total=False):
    """Of one run."""

    model: GroupOfClasses
    init: Group
    task: GroupOfClasses
    dataset: GroupOfClasses
    optimizer: GroupOfClasses
    scheduler: GroupOfClasses
    experiment: str
    gpus: int | Sequence[int] | Auto
    world_size: int | Auto
    strategy: Literal["ddp", "dp", "fsdp", "hsdp"]
    backend: Literal["nccl", "gloo", "auto"]
    threads: int | Auto
    batch_size: int | str
    lr_scaling: Literal["none", "linear", "sqrt"]
    base_batch_size: int | None
    epochs: int
    max_steps: int | None
    early_stop: EarlyStop | None
    seed: int
    weights: Path | None
    fork: Path | None
    freeze: Sequence[str]
    deterministic: bool
    drop_last: bool
    batch_norm: Literal["per_worker", "sync", "groups"]
    batch_norm_group: int
    label_smoothing: float
    mixup: float | None
    cutmix: float | None
    gradient_clip: float | None
    gradient_clip_value: float | None
    ema: float | None
    gradient_accumulation: int
    activation_checkpointing: Sequence[str] | Auto
    offload: Literal["cpu"] | None
    callbacks: Sequence[Own | Mapping[str, Any]]
    eval_split: Literal["val", "test"]
    objective: str
    send: Sequence[Literal["mlflow", "wandb"]] | Literal["mlflow", "wandb"]
    mlflow: MLflow
    wandb: Wandb
    log_every: int
    tensorboard: TensorBoard
    print_every: int | None
    amp: bool | Literal["bf16", "fp16"]
    compile: bool | CompileMode
    matmul_precision: Literal["highest", "high", "medium"]
    channels_last: bool | Auto
    onednn: bool | Auto
    patches: Patches
    ddp: DDP
    sharding: Sharding
    resume: Path | None
    checkpoint: Checkpoint
    on_nan: Literal["stop", "skip"]
    max_restarts: int
    timeout_s: float
    profile: bool
    debug: bool
    preflight: bool
    hydra: Mapping[str, Any]


class SweepSettings(TypedDict, total=False):
    """Of a sweep: a list, a range or an array is an axis of several values, a tuple is one value."""

    model: GroupOfClasses | Sequence[GroupOfClasses]
    init: Group | Sequence[Group]
    task: GroupOfClasses | Sequence[GroupOfClasses]
    dataset: GroupOfClasses | Sequence[GroupOfClasses]
    optimizer: GroupOfClasses | Sequence[GroupOfClasses]
    scheduler: GroupOfClasses | Sequence[GroupOfClasses]
    experiment: str | Sequence[str]
    gpus: int | Sequence[int] | Auto | Sequence[int | Sequence[int] | Auto]
    world_size: int | Auto | Sequence[int | Auto]
    strategy: Literal["ddp", "dp", "fsdp", "hsdp"] | Sequence[Literal["ddp", "dp", "fsdp", "hsdp"]]
    backend: Literal["nccl", "gloo", "auto"] | Sequence[Literal["nccl", "gloo", "auto"]]
    threads: int | Auto | Sequence[int | Auto]
    batch_size: int | str | Sequence[int | str] | Interval
    lr_scaling: Literal["none", "linear", "sqrt"] | Sequence[Literal["none", "linear", "sqrt"]]
    base_batch_size: int | Sequence[int | None] | None
    epochs: int | Sequence[int] | Interval
    max_steps: int | Sequence[int | None] | Interval | None
    early_stop: EarlyStop | Sequence[EarlyStop | None] | None
    seed: int | Sequence[int]
    weights: Path | Sequence[Path | None] | None
    fork: Path | Sequence[Path | None] | None
    freeze: Sequence[str] | Sequence[Sequence[str]]
    deterministic: bool | Sequence[bool]
    drop_last: bool | Sequence[bool]
    batch_norm: (
        Literal["per_worker", "sync", "groups"] | Sequence[Literal["per_worker", "sync", "groups"]]
    )
    batch_norm_group: int | Sequence[int]
    label_smoothing: float | Sequence[float] | Interval
    mixup: float | Sequence[float | None] | Interval | None
    cutmix: float | Sequence[float | None] | Interval | None
    gradient_clip: float | Sequence[float | None] | Interval | None
    gradient_clip_value: float | Sequence[float | None] | Interval | None
    ema: float | Sequence[float | None] | Interval | None
    gradient_accumulation: int | Sequence[int] | Interval
    activation_checkpointing: Sequence[str] | Auto | Sequence[Sequence[str] | Auto]
    offload: Literal["cpu"] | Sequence[Literal["cpu"] | None] | None
    callbacks: Sequence[Own | Mapping[str, Any]] | Sequence[Sequence[Own | Mapping[str, Any]]]
    eval_split: Literal["val", "test"] | Sequence[Literal["val", "test"]]
    objective: str | Sequence[str]
    send: Sequence[Literal["mlflow", "wandb"]] | Literal["mlflow", "wandb"]
    mlflow: Mapping[str, Any]
    wandb: Mapping[str, Any]
    log_every: int | Sequence[int]
    tensorboard: Mapping[str, Any]
    print_every: int | Sequence[int | None] | None
    amp: bool | Literal["bf16", "fp16"] | Sequence[bool | Literal["bf16", "fp16"]]
    compile: bool | CompileMode | Sequence[bool | CompileMode]
    matmul_precision: (
        Literal["highest", "high", "medium"] | Sequence[Literal["highest", "high", "medium"]]
    )
    channels_last: bool | Auto | Sequence[bool | Auto]
    onednn: bool | Auto | Sequence[bool | Auto]
    patches: Mapping[str, Any]
    ddp: Mapping[str, Any]
    sharding: Mapping[str, Any]
    resume: Path | Sequence[Path | None] | None
    checkpoint: Mapping[str, Any]
    on_nan: Literal["stop", "skip"] | Sequence[Literal["stop", "skip"]]
    max_restarts: int | Sequence[int]
    timeout_s: float | Sequence[float]
    profile: bool | Sequence[bool]
    debug: bool | Sequence[bool]
    preflight: bool
    sweep: str
    search: Group
    hydra: Mapping[str, Any]
