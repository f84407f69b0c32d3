"""The models of a run's configuration, and how their weights begin; conf/ holds the values. Free of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.constraints import STRICT, Count, Fraction, Positive


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MLP:
    name: Literal["mlp"]
    hidden: tuple[Count, ...]
    dropout: Fraction


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConvNet:
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
