"""The frozen dataclasses of a run's configuration; conf/ holds the values. Free of torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt import registry
from expt.config.constraints import (
    IS_GIVEN,
    IS_SET,
    STRICT,
    Count,
    Folder,
    Fraction,
    Key,
    NonNegative,
    Positive,
    Regex,
    Target,
    group,
)
from expt.config.groups import GROUPS

SHARDED = ("fsdp", "hsdp")
UNPROFILED_STEPS = 5
"""The steps that warm up before `profile` traces some."""
POWERSGD_BEGINS = 10
"""The steps that average whole gradients before PowerSGD compresses some, as torch advises."""
TRACKERS = (*registry.trackers(),)
TrackerName: Any = Literal[TRACKERS]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DDP:
    find_unused_parameters: Annotated[bool, Key(result="none", only_if={"strategy": "ddp"})]
    static_graph: Annotated[bool, Key(result="none", only_if={"strategy": "ddp"})]
    gradient_as_bucket_view: Annotated[bool, Key(result="none")]
    bucket_cap_mb: Annotated[Positive, Key(result="rounding")]
    comm_hook: Annotated[
        Literal["bf16", "fp16", "powersgd"] | None,
        Key(
            only_if={"strategy": "ddp"},
            counts="further steps",
            at=lambda its, steps=POWERSGD_BEGINS: steps * (its.comm_hook == "powersgd"),
            later=True,
        ),
    ]
    shared_memory: Annotated[bool, Key(result="rounding")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sharding:
    wrap: Annotated[
        Literal["auto"] | Count | tuple[Regex, ...],
        Key(result="rounding", example='sharding.wrap=["blocks\\..*"]'),
    ] = "auto"
    shards: Annotated[
        Literal["auto"] | Count, Key(result="rounding", only_if={"strategy": "hsdp"})
    ] = "auto"
    reshard_after_forward: Annotated[bool, Key(result="none")] = True
    param_dtype: Literal["auto", "float32", "bf16", "fp16"] = "auto"
    reduce_dtype: Literal["float32", "bf16"] = "float32"
    reduce_each_part: Annotated[bool, Key(result="rounding")] = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TensorBoard:
    images: Annotated[bool | Literal["end", "spare"], Key(evaluate=True)]
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
    every_steps: Annotated[Count | None, Key(counts="steps")]
    every_epochs: Annotated[Count | None, Key(counts="epochs")]
    every_minutes: Annotated[Positive | None, Key(counts="minutes")]
    keep: Annotated[int, Field(ge=0)]
    keep_best: Count = 1
    sharded: Annotated[bool | Literal["auto"], Key(only_if={"strategy": SHARDED})] = "auto"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EarlyStop:
    metric: str
    patience: Annotated[
        Count | None, Key(counts="own evaluations", at=lambda its: its.patience + 1, later=True)
    ] = None
    min_delta: NonNegative = 0.0
    threshold: Annotated[
        Annotated[float, Field(allow_inf_nan=False)] | None,
        Key(only_if={"early_stop.threshold": IS_GIVEN}),
    ] = None


if TYPE_CHECKING:

    class _Trackers:
        """The settings of each registered tracker, by its name, which getattr reads."""

else:
    _Trackers = dataclasses.make_dataclass(
        "_Trackers",
        [
            (name, Annotated[cls, Key(result="none")], dataclasses.field(default_factory=cls))
            for name, cls in registry.trackers().items()
        ],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(_Trackers):
    """One run, resolved and checked.

    conf/config.yaml has the meaning of each key, its `Key` the effects of a change.
    """

    model: Annotated[group(**GROUPS["model"]), Key(fork=False)]  # type: ignore[valid-type]
    init: Annotated[group(**GROUPS["init"]), Key(fork=False, cost=False)]  # type: ignore[valid-type]
    task: Annotated[group(**GROUPS["task"]), Key(fork="epoch")]  # type: ignore[valid-type]
    dataset: Annotated[group(**GROUPS["dataset"]), Key(fork=False)]  # type: ignore[valid-type]
    optimizer: group(**GROUPS["optimizer"])  # type: ignore[valid-type]
    scheduler: Annotated[group(**GROUPS["scheduler"]), Key(cost=False)]  # type: ignore[valid-type]
    gpus: Annotated[
        Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...],
        Key(resume=True, evaluate=True, evaluated_as="auto", own_machine=True),
    ]
    world_size: Annotated[Count, Key(resume=True, evaluate=True, evaluated_as="auto")]
    strategy: Annotated[Literal["ddp", "dp", "fsdp", "hsdp"], Key(resume=True, evaluated_as="ddp")]
    backend: Annotated[
        Literal["nccl", "gloo"], Key(resume=True, evaluate=True, evaluated_as="auto")
    ]
    threads: Annotated[
        Count, Key(result="rounding", evaluate=True, evaluated_as="auto", own_machine=True)
    ]
    batch_size: Annotated[Count, Key(fork="epoch", evaluate=True)]
    lr_scaling: Annotated[Literal["none", "linear", "sqrt"], Key(cost=False)]
    base_batch_size: Annotated[
        Count | None, Key(cost=False, only_if={"lr_scaling": ("linear", "sqrt")})
    ]
    epochs: Annotated[
        Count,
        Key(
            resume=True,
            varies="length",
            cost=False,
            counts="epochs",
            at=lambda its: its.epochs - 1,  # a run may end within its last epoch
            later=True,
        ),
    ]
    max_steps: Annotated[
        Count | None, Key(resume=True, varies="length", cost=False, counts="steps")
    ]
    epoch_steps: Annotated[
        Count | None, Key(fork="epoch", cost=False, only_if={"epoch_steps": IS_SET})
    ] = None
    max_minutes: Annotated[
        Positive | None,
        Key(
            resume=True,
            varies="length",
            cost=False,
            only_if={"max_minutes": IS_SET},
            counts="minutes",
        ),
    ] = None
    early_stop: Annotated[
        EarlyStop | None,
        Key(resume=True, cost=False, example="early_stop={metric: loss/val, patience: 5}"),
    ] = None
    seed: Annotated[
        Annotated[int, Field(ge=0, lt=2**32)], Key(fork="epoch", varies="repetition", cost=False)
    ]
    weights: Annotated[Folder | None, Key(varies="source", evaluated_as="null")] = None
    fork: Annotated[Folder | None, Key(resume=True, varies="source", evaluated_as="null")] = None
    freeze: Annotated[tuple[Regex, ...], Key(example='freeze=["conv"]')] = ()
    deterministic: Annotated[bool, Key(resume=True, evaluate=True)]
    drop_last: Annotated[bool, Key(fork="epoch")]
    batch_norm: Annotated[Literal["per_worker", "sync", "groups"], Key(evaluated_as="per_worker")]
    batch_norm_group: Annotated[int, Field(ge=2), Key(only_if={"batch_norm": "groups"})]
    label_smoothing: Annotated[Fraction, Key(cost=False)]
    mixup: Positive | None = None
    cutmix: Positive | None = None
    gradient_clip: Annotated[Positive | None, Key(cost=False)]
    gradient_clip_value: Annotated[Positive | None, Key(cost=False)] = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    gradient_accumulation: Annotated[Literal["auto"] | Count, Key(resume=True)]
    activation_checkpointing: Annotated[
        Literal["auto"] | tuple[Regex, ...],
        Key(result="none", example='activation_checkpointing=["blocks\\..*"]'),
    ] = ()
    offload: Annotated[Literal["cpu"] | None, Key(result="none")] = None
    callbacks: Annotated[
        tuple[Target, ...],
        Key(resume=True, evaluated_as="[]", example="callbacks=[{_target_: mine.Watch}]"),
    ] = ()
    eval_split: Literal["val", "test"] | None
    eval_every_steps: Annotated[
        Count | None,
        Key(resume=True, cost=False, only_if={"eval_every_steps": IS_SET}, counts="steps"),
    ] = None
    eval_every_minutes: Annotated[
        Positive | None,
        Key(resume=True, cost=False, only_if={"eval_every_minutes": IS_SET}, counts="minutes"),
    ] = None
    eval_batch_size: Annotated[
        Literal["auto"] | Count, Key(result="rounding", evaluate=True, cost=False)
    ] = "auto"
    objective: Annotated[str, Key(cost=False)]
    log_every: Annotated[Count, Key(result="none", counts="steps")]
    tensorboard: Annotated[TensorBoard, Key(result="none")]
    send: Annotated[tuple[TrackerName, ...], Key(result="none", example="send=[mlflow]")] = ()
    print_every: Annotated[Count | None, Key(result="none", counts="steps")]
    amp: Annotated[bool | Literal["bf16", "fp16"], Key(evaluate=True)]
    compile: Annotated[
        bool | Literal["auto", "default", "reduce-overhead", "max-autotune", "blocks"],
        Key(resume=True, evaluate=True, evaluated_as="false"),
    ]
    matmul_precision: Annotated[
        Literal["highest", "high", "medium"], Key(resume=True, evaluate=True)
    ]
    channels_last: Annotated[bool, Key(resume=True)]
    patches: Annotated[Patches, Key(result="none")] = dataclasses.field(default_factory=Patches)
    ddp: Annotated[DDP, Key(resume=True)]
    sharding: Annotated[Sharding, Key(resume=True, only_if={"strategy": SHARDED})] = (
        dataclasses.field(default_factory=Sharding)
    )
    resume: Annotated[Folder | None, Key(result="none", varies="source", evaluated_as="null")]
    checkpoint: Annotated[Checkpoint, Key(result="none")]
    on_nan: Annotated[Literal["stop", "skip"], Key(resume=True)]
    max_restarts: Annotated[int, Field(ge=0), Key(result="none", evaluated_as="0")]
    timeout_s: Annotated[Positive, Key(result="none", evaluate=True)]
    profile: Annotated[
        bool,
        Key(
            result="none",
            evaluated_as="false",
            counts="further steps",
            at=lambda its, steps=UNPROFILED_STEPS: steps * its.profile,
        ),
    ]
    overfit_batches: Annotated[
        Count | None, Key(fork=False, cost=False, only_if={"overfit_batches": IS_SET})
    ] = None
    detect_anomaly: Annotated[bool, Key(result="none", evaluated_as="false")] = False
    debug: Annotated[bool, Key(result="none", evaluated_as="false")]
    preflight: Annotated[bool, Key(result="none")] = False
    secrets: Annotated[dict[str, str], Key(result="none")] = dataclasses.field(
        default_factory=dict, repr=False
    )
    following: Annotated[dict[str, str], Key(result="none")] = dataclasses.field(
        default_factory=dict
    )
    """The interpolations, by key, whose values differ with the seed or the fold."""

    @property
    def trackers(self) -> dict[str, Any]:
        """The settings of every tracker by its name."""
        return {name: getattr(self, name) for name in TRACKERS}

    @property
    def num_gpus(self) -> int:
        """How many GPUs the run uses; 0 is the CPU."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)

    @property
    def is_sharded(self) -> bool:
        """True if each worker has only a part of the model."""
        return self.strategy in SHARDED

    def total_steps(self, steps_per_epoch: int, offset: int = 0) -> int:
        """Return the optimizer steps of the whole run; a fork may have `offset` more."""
        steps = self.epochs * steps_per_epoch + offset
        return min(steps, self.max_steps or steps)

    @property
    def evaluates_epochs(self) -> bool:
        """True if the end of each epoch is evaluated, not every N steps or minutes."""
        return self.eval_every_steps is None and self.eval_every_minutes is None

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a worker divides its batch into; auto begins with one."""
        return 1 if self.gradient_accumulation == "auto" else self.gradient_accumulation

    @property
    def samples_per_evaluation(self) -> int | None:
        """How many samples a worker evaluates at a time; None leaves it to their loader."""
        if self.eval_batch_size != "auto":
            return self.eval_batch_size
        at_a_time = self.batch_size // (self.world_size * self.micro_batches)
        found: int | None = self.dataset.evaluated_at_once(max(1, at_a_time))
        return found

    @property
    def steps_of_uncounted(self) -> int | None:
        """The steps of an epoch where samples are not counted: without `epoch_steps` all."""
        return self.epoch_steps or self.max_steps

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The GPUs that the run uses, of those that this process can see."""
        return tuple(range(self.gpus)) if isinstance(self.gpus, int) else self.gpus
