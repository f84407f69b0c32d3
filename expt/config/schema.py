"""The frozen dataclasses of a run's configuration; conf/ holds the values. Free of torch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import (
    STRICT,
    Count,
    Folder,
    Fraction,
    NonNegative,
    Positive,
    Target,
    group,
)
from expt.config.groups import GROUPS
from expt.config.tasks import Classification
from expt.config.trackers import MLflow, TrackerName, Wandb


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DDP:
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: Positive
    comm_hook: Literal["bf16", "fp16", "powersgd"] | None
    shared_memory: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sharding:  # a run recorded before there was a choice has none of it
    wrap: Literal["auto"] | Count | tuple[str, ...] = "auto"
    shards: Literal["auto"] | Count = "auto"
    reshard_after_forward: bool = True
    param_dtype: Literal["auto", "float32", "bf16", "fp16"] = "auto"
    reduce_dtype: Literal["float32", "bf16"] = "float32"
    reduce_each_part: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TensorBoard:
    images: bool | Literal["end", "spare"]
    graph: bool | Literal["auto"]
    norms: bool
    histograms: bool
    health: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Patches:
    unguarded: bool = True
    backward: bool = True
    malloc: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpoint:
    every_steps: Count | None
    every_epochs: Count | None
    every_minutes: Positive | None
    keep: Annotated[int, Field(ge=0)]
    sharded: bool | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EarlyStop:
    metric: str
    patience: Count
    min_delta: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run, resolved and checked; conf/config.yaml says what each key means, and its unit."""

    model: group(**GROUPS["model"])  # type: ignore[valid-type]
    init: group(**GROUPS["init"])  # type: ignore[valid-type]
    # a record of before there was a choice has none
    task: group(**GROUPS["task"]) = dataclasses.field(default_factory=Classification)  # type: ignore[valid-type]
    dataset: group(**GROUPS["dataset"])  # type: ignore[valid-type]
    optimizer: group(**GROUPS["optimizer"])  # type: ignore[valid-type]
    scheduler: group(**GROUPS["scheduler"])  # type: ignore[valid-type]
    gpus: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...]
    world_size: Count
    strategy: Literal["ddp", "dp", "fsdp", "hsdp"]
    backend: Literal["nccl", "gloo"]
    threads: Count
    batch_size: Count
    lr_scaling: Literal["none", "linear", "sqrt"]
    base_batch_size: Count | None
    epochs: Count
    max_steps: Count | None
    early_stop: EarlyStop | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    weights: Folder | None = None  # of this and the next two a record of before has none
    fork: Folder | None = None
    freeze: tuple[str, ...] = ()
    deterministic: bool
    drop_last: bool
    batch_norm: Literal["per_worker", "sync", "groups"]
    batch_norm_group: Annotated[int, Field(ge=2)]
    label_smoothing: Fraction
    mixup: Positive | None = None
    cutmix: Positive | None = None
    gradient_clip: Positive | None
    gradient_clip_value: Positive | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    gradient_accumulation: Count
    activation_checkpointing: Literal["auto"] | tuple[str, ...] = ()
    offload: Literal["cpu"] | None = None
    callbacks: tuple[Target, ...] = ()
    eval_split: Literal["val", "test"]
    objective: str
    log_every: Count
    tensorboard: TensorBoard
    send: tuple[TrackerName, ...] = ()
    mlflow: MLflow = dataclasses.field(default_factory=MLflow)
    wandb: Wandb = dataclasses.field(default_factory=Wandb)
    print_every: Count | None
    amp: bool | Literal["bf16", "fp16"]
    compile: bool | Literal["auto", "default", "reduce-overhead", "max-autotune", "blocks"]
    matmul_precision: Literal["highest", "high", "medium"]
    channels_last: bool
    onednn: bool
    patches: Patches = dataclasses.field(
        default_factory=Patches
    )  # a run recorded before there was a choice has none
    ddp: DDP
    sharding: Sharding = dataclasses.field(default_factory=Sharding)
    resume: Folder | None
    checkpoint: Checkpoint
    on_nan: Literal["stop", "skip"]
    max_restarts: Annotated[int, Field(ge=0)]
    timeout_s: Positive
    profile: bool
    debug: bool
    preflight: bool = False
    secrets: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def num_gpus(self) -> int:
        """How many GPUs the run uses; 0 is the CPU."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)

    @property
    def is_sharded(self) -> bool:
        """Whether each worker has but a part of the model."""
        return self.strategy in ("fsdp", "hsdp")

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The GPUs that the run uses, of those that this process can see."""
        return tuple(range(self.gpus)) if isinstance(self.gpus, int) else self.gpus
