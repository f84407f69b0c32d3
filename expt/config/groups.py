"""The members of the groups of conf/ with the types of their keys; conf/ has values and meanings.

In order: models, initialisations, schedules by the step, optimisers, further schedulers, and their
table.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from expt import registry
from expt.config.constraints import (
    IS_SET,
    STRICT,
    Count,
    Fraction,
    Key,
    Name,
    NonNegative,
    Positive,
    Regex,
    Target,
    group,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MLP:
    EACH: ClassVar[tuple[str, ...]] = (
        "sample",
    )  # units of Feature.each, with outputs of their own
    name: Literal["mlp"]
    hidden: tuple[Count, ...]
    dropout: Annotated[Fraction, Key(fork=True)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConvNet:
    EACH: ClassVar[tuple[str, ...]] = ("sample",)
    # measured on a CPU: a tenth faster or more, and a quarter with amp
    CHANNELS_LAST_PAYS: ClassVar[bool] = True
    name: Literal["convnet", "paddle_convnet"]
    widths: Annotated[tuple[Count, ...], Field(min_length=1)]
    kernels: tuple[Count, ...]
    strides: tuple[Count, ...]
    paddings: Annotated[
        tuple[Literal["same", "valid"], ...], Key(example="model.paddings=[same,valid,same]")
    ]
    batch_norm: bool
    pool: Count
    global_average: bool
    hidden: Count | None
    dropout: Annotated[Fraction, Key(fork=True)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResNet18:
    EACH: ClassVar[tuple[str, ...]] = ("sample",)
    CHANNELS_LAST_PAYS: ClassVar[bool] = True
    name: Literal["resnet18"]
    stem: Literal["auto", "small", "imagenet"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NamedModel:
    """A classifier by its name in a library.

    It may have no colon, by which timm would read code from elsewhere.
    """

    EACH: ClassVar[tuple[str, ...]] = ("sample",)
    name: Literal["torchvision", "timm"]
    arch: Annotated[str, Field(pattern=r"^\w[\w.]*$")]
    pretrained: bool


TransformerSize = Literal["400k", "1m", "10m", "124m", "350m", "1b"]
TRANSFORMER_SIZES: dict[str | None, dict[str, int]] = {
    None: {"layers": 4, "heads": 4, "width": 128},
    "400k": {"layers": 2, "heads": 4, "width": 128},
    "1m": {"layers": 5, "heads": 4, "width": 128},
    "10m": {"layers": 6, "heads": 6, "width": 384},
    "124m": {"layers": 12, "heads": 12, "width": 768},
    "350m": {"layers": 24, "heads": 16, "width": 1024},
    "1b": {"layers": 18, "heads": 16, "width": 2048},
}
"""The values of `auto`. 124m and 350m are GPT-2's small and medium; smaller ones count bytes."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Transformer:
    EACH: ClassVar[tuple[str, ...]] = ("token",)
    name: Literal["transformer"]
    layers: Count
    heads: Count
    width: Count
    dropout: Annotated[Fraction, Key(fork=True)]
    tied: bool
    size: Annotated[TransformerSize | None, Key(result="none")] = None
    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["learned", "rotary"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UNet:
    CHANNELS_LAST_PAYS: ClassVar[bool] = True
    EACH: ClassVar[tuple[str, ...]] = ("pixel",)
    name: Literal["unet"]
    widths: Annotated[tuple[Count, ...], Field(min_length=2)]
    batch_norm: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lora:
    rank: Count | None = None
    alpha: Annotated[Count, Key(only_if={"model.lora.rank": IS_SET})] = 8
    dropout: Annotated[Fraction, Key(fork=True, only_if={"model.lora.rank": IS_SET})] = 0.0
    targets: Annotated[
        Literal["all-linear"] | tuple[str, ...] | None,
        Key(only_if={"model.lora.rank": IS_SET}, example="'model.lora.targets=[q_proj,v_proj]'"),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingFaceModel:
    """A model of transformers; the content of its files is part of a run's identity."""

    EACH: ClassVar[tuple[str, ...]] = ("sample", "token")
    name: Literal["transformers"]
    path: Annotated[Name, Key(result="none")]
    revision: Annotated[Name | None, Key(result="none")] = None
    pretrained: bool = True
    config: Annotated[
        dict[str, Any] | None, Key(example="'model.config={hidden_dropout_prob: 0.0}'")
    ] = None
    lora: Lora = dataclasses.field(default_factory=Lora)

    @property
    def files(self) -> tuple[Any, ...]:
        """The settings on which the files that it is built from depend."""
        return self.path, self.revision, self.pretrained

    @property
    def needs_base(self) -> bool:
        """True if checkpoints lack published weights, which are read again."""
        return self.pretrained and self.lora.rank is not None


Model = MLP | ConvNet | ResNet18 | NamedModel | Transformer | UNet | HuggingFaceModel | Target


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


WarmupEpochs = Annotated[NonNegative, Key(counts="epochs")]
PlanEpochs = Annotated[Positive | None, Key(resume=True, varies="length")]
"""It may change on resume where the plan ends at the same step all the same; see expt.runs."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Constant:
    name: Literal["constant"]
    warmup_epochs: WarmupEpochs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cosine:
    name: Literal["cosine"]
    warmup_epochs: WarmupEpochs
    min_lr: NonNegative
    epochs: PlanEpochs = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Linear:
    name: Literal["linear"]
    warmup_steps: Annotated[Annotated[int, Field(ge=0)] | Fraction, Key(counts="steps")]
    epochs: PlanEpochs = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step:
    name: Literal["step"]
    warmup_epochs: WarmupEpochs
    every_epochs: Annotated[Positive, Key(resume="ahead", counts="epochs", later=True)]
    gamma: Positive


LearningRate = Annotated[Positive, Key(cost=False)]
WeightDecay = Annotated[NonNegative, Key(cost=False)]
Betas = Annotated[tuple[Fraction, Fraction], Key(example="optimizer.betas=[0.9,0.999]")]


def _unless_one(decay: float) -> float | None:
    """Return None for a rate that does not fall: the same run, by the same identity."""
    return None if decay == 1 else decay


LayerDecay = Annotated[float, Field(gt=0, le=1), AfterValidator(_unless_one)] | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SGDRule:
    name: Literal["sgd"]
    lr: LearningRate
    momentum: Fraction
    weight_decay: WeightDecay
    nesterov: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdamRule:
    name: Literal["adam", "adamw"]
    lr: LearningRate
    betas: Betas
    eps: Positive
    weight_decay: WeightDecay


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MuonRule:
    name: Literal["muon"]
    lr: LearningRate
    momentum: Fraction
    nesterov: bool
    betas: Betas
    eps: Positive
    weight_decay: WeightDecay


def _by_name(*members: Any) -> dict[str, Any]:
    return {name: cls for cls in members for name in get_args(get_type_hints(cls)["name"])}


OWN: dict[str, dict[str, Any]] = {
    "optimizer": _by_name(SGDRule, AdamRule, MuonRule, Target),
    "scheduler": _by_name(Constant, Cosine, Linear, Step),
}
"""The optimizers and the schedules that a group of parameters may have for itself."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParameterGroup:
    """Settings of the parameters in whose names `match` is found."""

    match: Regex
    lr_scale: Positive = 1.0  # times the optimiser's
    weight_decay: NonNegative | None = None  # None: the optimiser's
    epochs: Annotated[Positive | None, Key(counts="epochs", later=True)] = None
    """after which its learning rate is 0; None: trained to the end"""
    optimizer: group(**OWN["optimizer"]) | None = None  # type: ignore[valid-type]
    scheduler: group(**OWN["scheduler"]) | None = None  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Optimizer:
    decay_biases_and_norms: bool = True
    layer_decay: LayerDecay = None
    groups: tuple[ParameterGroup, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SGD(_Optimizer, SGDRule):
    pass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adam(_Optimizer, AdamRule):
    pass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Muon(_Optimizer, MuonRule):
    pass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LBFGS:
    # torch's has one group of all parameters
    decay_biases_and_norms: ClassVar[bool] = True
    layer_decay: ClassVar[None] = None
    groups: ClassVar[tuple[ParameterGroup, ...]] = ()
    name: Literal["lbfgs"]
    lr: LearningRate
    max_iter: Count
    history_size: Annotated[Count, Key(fork=False)]
    line_search: Literal["strong_wolfe"] | None
    tolerance_grad: NonNegative
    tolerance_change: NonNegative


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetOptimizer(_Optimizer, Target):
    """A custom optimiser, given its parameters first."""


Optimizer = SGD | Adam | Muon | LBFGS | TargetOptimizer


def optimizers(config: Optimizer) -> list[Any]:
    """Return an optimizer and those that some of its groups of parameters have for themselves."""
    return [config, *(group.optimizer for group in config.groups if group.optimizer)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetScheduler(Target):
    """A custom scheduler, stepped after each epoch or each optimiser step."""

    interval: Literal["epoch", "step"] = "epoch"

    def step_counts(self, *, steps_per_epoch: int, total_steps: int) -> dict[str, int]:
        """Return the numbers of its own steps that the class may ask for, as OneCycleLR does."""
        if self.interval == "epoch":
            steps_per_epoch, total_steps = 1, math.ceil(total_steps / steps_per_epoch)
        if type(epochs := self.kwargs.get("epochs")) is int:
            total_steps = epochs * steps_per_epoch
        return {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Plateau:
    interval: ClassVar[Literal["epoch"]] = "epoch"
    name: Literal["plateau"]
    metric: str
    factor: Annotated[float, Field(gt=0, lt=1)]
    # Of N evaluations the first is compared with, and more than `patience` must be no better.
    patience: Annotated[
        int, Field(ge=0), Key(counts="evaluations", at=lambda its: its.patience + 2, later=True)
    ]
    min_delta: NonNegative
    cooldown: Annotated[
        int,
        Field(ge=0),
        Key(
            counts="evaluations",
            at=lambda its: its.cooldown and max(2 * its.patience + 3, its.cooldown),
            later=True,
        ),
    ]
    min_lr: NonNegative


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OneCycle:
    name: Literal["one_cycle"]
    rise_fraction: Annotated[float, Field(gt=0, lt=1)]
    start_factor: Annotated[float, Field(gt=0, le=1)]
    end_factor: Annotated[float, Field(gt=0, le=1)]
    epochs: PlanEpochs = None


Scheduler = Constant | Cosine | Linear | Step | OneCycle | Plateau | TargetScheduler


GROUPS: dict[str, dict[str, Any]] = {
    "model": _by_name(*get_args(Model)),
    "init": _by_name(*get_args(Init)),
    **registry.groups(),
    "optimizer": _by_name(*get_args(Optimizer)),
    "scheduler": _by_name(*get_args(Scheduler)),
}
"""The members of each group by their names."""


def planned_steps(scheduler: Scheduler, *, steps_per_epoch: int, total_steps: int) -> int | None:
    """Return the optimiser steps to the end of a schedule's plan, or None where it has no plan.

    It may end before or after the run does. Of a custom scheduler nothing is known here.
    """
    if not isinstance(scheduler, Cosine | Linear | OneCycle):
        return None
    if scheduler.epochs is None:
        return total_steps
    return max(1, round(scheduler.epochs * steps_per_epoch))
