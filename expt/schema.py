"""The frozen dataclasses of a run's configuration; conf/ holds the values. Free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from expt.constraints import STRICT, Count, Fraction, NonNegative, Positive, Size
from expt.model_schema import MLP as MLP
from expt.model_schema import ConvNet as ConvNet
from expt.model_schema import DefaultInit as DefaultInit
from expt.model_schema import Init as Init
from expt.model_schema import KaimingInit as KaimingInit
from expt.model_schema import NormalInit as NormalInit
from expt.model_schema import OrthogonalInit as OrthogonalInit
from expt.model_schema import ResNet18 as ResNet18
from expt.model_schema import XavierInit as XavierInit


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Target:
    """A person's own class: `_target_` names it, every other key is a keyword argument."""

    name: Literal["_target_"] = "_target_"
    target: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    crop_padding: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    cutout: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Dataset:
    val_fraction: Fraction
    train_limit: Count | None
    mean: tuple[float, ...] | None
    std: tuple[Positive, ...] | None
    augment: Augment = Augment()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Digits(_Dataset):
    name: Literal["digits"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Downloaded(_Dataset):
    """A dataset that torchvision knows where to fetch."""

    name: Literal["mnist", "fashion_mnist", "cifar10", "cifar100"]
    root: str | None
    download: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Synthetic(_Dataset):
    name: Literal["synthetic"]
    train_size: Count
    test_size: Count
    channels: Count
    image_size: Size
    num_classes: Annotated[int, Field(ge=2)]
    seed: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageFolder(_Dataset):
    name: Literal["image_folder"]
    root: str
    cache: Literal["auto"] | bool = "auto"
    image_size: Size
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetDataset(_Dataset):
    """A person's own torch Dataset of (image, label): built twice, with `train` and with `test` added to `kwargs`."""

    name: Literal["_target_"] = "_target_"
    target: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    num_classes: Annotated[int, Field(ge=2)]
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    val_fraction: Fraction = 0.1
    train_limit: Count | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    train: dict[str, Any] = dataclasses.field(default_factory=lambda: {"train": True})
    test: dict[str, Any] = dataclasses.field(default_factory=lambda: {"train": False})
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SGD:
    name: Literal["sgd"]
    lr: Positive
    momentum: Fraction
    weight_decay: NonNegative
    nesterov: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adam:
    name: Literal["adam", "adamw"]
    lr: Positive
    betas: tuple[Fraction, Fraction]
    eps: Positive
    weight_decay: NonNegative


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Constant:
    name: Literal["constant"]
    warmup_epochs: NonNegative


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cosine:
    name: Literal["cosine"]
    warmup_epochs: NonNegative
    min_lr: NonNegative


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step:
    name: Literal["step"]
    warmup_epochs: NonNegative
    every_epochs: Positive
    gamma: Positive


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OneCycle:
    name: Literal["one_cycle"]
    rise_fraction: Annotated[float, Field(gt=0, lt=1)]
    start_factor: Annotated[float, Field(gt=0, le=1)]
    end_factor: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DDP:
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: Positive
    sync_batchnorm: bool
    comm_hook: Literal["bf16", "fp16", "powersgd"] | None
    shared_memory: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TensorBoard:
    images: bool | Literal["end", "spare"]
    graph: bool | Literal["auto"]
    norms: bool
    histograms: bool
    health: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpoint:
    every_steps: Count | None
    every_epochs: Count | None
    every_minutes: Positive | None
    keep: Annotated[int, Field(ge=0)]


def kind(node: Any) -> str | None:
    """The member of a group that `node` chooses."""
    return node.get("name") if isinstance(node, Mapping) else getattr(node, "name", None)


def _group(**kinds: Any) -> Any:
    """A union whose member is chosen by the key `name`; an underscore in a kind's word stays."""
    tagged = tuple(Annotated[cls, Tag(name)] for name, cls in kinds.items())
    return Annotated[Union[tagged], Discriminator(kind)]


GROUPS: dict[str, dict[str, Any]] = {
    "model": {
        "mlp": MLP,
        **dict.fromkeys(("convnet", "paddle_convnet"), ConvNet),
        "resnet18": ResNet18,
        "_target_": Target,
    },
    "init": {
        "default": DefaultInit,
        "normal": NormalInit,
        "xavier": XavierInit,
        "kaiming": KaimingInit,
        "orthogonal": OrthogonalInit,
    },
    "dataset": {
        "digits": Digits,
        **dict.fromkeys(("mnist", "fashion_mnist", "cifar10", "cifar100"), Downloaded),
        "synthetic": Synthetic,
        "image_folder": ImageFolder,
        "_target_": TargetDataset,
    },
    "optimizer": {"sgd": SGD, "adam": Adam, "adamw": Adam, "_target_": Target},
    "scheduler": {"constant": Constant, "cosine": Cosine, "step": Step, "one_cycle": OneCycle, "_target_": Target},
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run, resolved and checked; conf/config.yaml says what each key means, and its unit."""

    model: _group(**GROUPS["model"])  # type: ignore[valid-type]
    init: _group(**GROUPS["init"])  # type: ignore[valid-type]
    dataset: _group(**GROUPS["dataset"])  # type: ignore[valid-type]
    optimizer: _group(**GROUPS["optimizer"])  # type: ignore[valid-type]
    scheduler: _group(**GROUPS["scheduler"])  # type: ignore[valid-type]
    gpus: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...]
    world_size: Count
    strategy: Literal["ddp", "dp"]
    backend: Literal["nccl", "gloo"]
    threads: Count
    batch_size: Count
    lr_scaling: Literal["none", "linear", "sqrt"]
    base_batch_size: Count | None
    epochs: Count
    max_steps: Count | None
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    deterministic: bool
    drop_last: bool
    label_smoothing: Fraction
    gradient_clip: Positive | None
    gradient_accumulation: Count
    eval_split: Literal["val", "test"]
    objective: str
    log_every: Count
    tensorboard: TensorBoard
    print_every: Count | None
    amp: bool | Literal["bf16", "fp16"]
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"]
    matmul_precision: Literal["highest", "high", "medium"]
    channels_last: bool
    onednn: bool
    ddp: DDP
    resume: str | None
    checkpoint: Checkpoint
    on_nan: Literal["stop", "skip"]
    max_restarts: Annotated[int, Field(ge=0)]
    timeout_s: Positive
    profile: bool
    debug: bool
    secrets: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def num_gpus(self) -> int:
        """How many GPUs the run uses; 0 is the CPU."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The GPUs that the run uses, of those that this process can see."""
        return tuple(range(self.gpus)) if isinstance(self.gpus, int) else self.gpus
