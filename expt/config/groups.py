"""What each group of conf/ may hold, by the member that is chosen; conf/ has the values, and says what they mean.

In order: constraints, a person's own class, models, initialisations, datasets, optimisers, schedulers, and their table.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True)

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Folder = Annotated[str, AfterValidator(os.path.expanduser)]
Size = tuple[Count, Count]  # height, width
DottedName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Target:
    """A person's own class: `_target_` names it, every other key is a keyword argument."""

    name: Literal["_target_"] = "_target_"
    target: DottedName
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MLP:
    name: Literal["mlp"]
    hidden: tuple[Count, ...]
    dropout: Fraction


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConvNet:
    CHANNELS_LAST_PAYS: ClassVar[bool] = True  # measured on a CPU: a tenth faster or more, and a quarter with amp
    name: Literal["convnet", "paddle_convnet"]
    widths: Annotated[tuple[Count, ...], Field(min_length=1)]
    kernels: tuple[Count, ...]
    strides: tuple[Count, ...]
    paddings: tuple[Literal["same", "valid"], ...]
    batch_norm: bool
    pool: Count
    global_average: bool
    hidden: Count | None
    dropout: Fraction


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResNet18:
    CHANNELS_LAST_PAYS: ClassVar[bool] = True
    name: Literal["resnet18"]
    stem: Literal["small", "imagenet"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DefaultInit:
    name: Literal["default"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NormalInit:
    name: Literal["normal"]
    std: Positive
    zero_bias: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class XavierInit:
    name: Literal["xavier"]
    distribution: Literal["uniform", "normal"]
    zero_bias: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KaimingInit:
    name: Literal["kaiming"]
    distribution: Literal["uniform", "normal"]
    mode: Literal["fan_in", "fan_out"]
    zero_bias: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OrthogonalInit:
    name: Literal["orthogonal"]
    gain: Positive
    zero_bias: bool


Init = DefaultInit | NormalInit | XavierInit | KaimingInit | OrthogonalInit


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
    root: Folder | None
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
    root: Folder
    cache: Literal["auto"] | bool = "auto"
    image_size: Size
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetDataset(_Dataset):
    """A person's own torch Dataset of (image, label): built twice, with `train` and with `test` added to `kwargs`."""

    name: Literal["_target_"] = "_target_"
    target: DottedName
    num_classes: Annotated[int, Field(ge=2)]
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    val_fraction: Fraction = 0.1
    train_limit: Count | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    train: dict[str, Any] = dataclasses.field(default_factory=lambda: {"train": True})
    test: dict[str, Any] = dataclasses.field(default_factory=lambda: {"train": False})
    kwargs: dict[str, Any]


OWN_DATASET_KEYS = {field.name for field in dataclasses.fields(TargetDataset)} - {
    *("name", "target", "kwargs", "train", "test"),
}
"""What every dataset of a person's own has, named in its YAML or not."""


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
class TargetScheduler(Target):
    """A person's own scheduler, stepped after each epoch or each optimiser step."""

    interval: Literal["epoch", "step"] = "epoch"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OneCycle:
    name: Literal["one_cycle"]
    rise_fraction: Annotated[float, Field(gt=0, lt=1)]
    start_factor: Annotated[float, Field(gt=0, le=1)]
    end_factor: Annotated[float, Field(gt=0, le=1)]


def kind(node: Any) -> str | None:
    """The member of a group that `node` chooses."""
    return node.get("name") if isinstance(node, Mapping) else getattr(node, "name", None)


def group(**kinds: Any) -> Any:
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
    "scheduler": {
        "constant": Constant,
        "cosine": Cosine,
        "step": Step,
        "one_cycle": OneCycle,
        "_target_": TargetScheduler,
    },
}
