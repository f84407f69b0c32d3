"""Whether settings fit the data, as far as only the data can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from expt.config import datasets
from expt.data.files import DatasetConfig
from expt.data.mixing import Mixing
from expt.data.source import Source
from expt.errors import ConfigError, DataError, warn


def check_batch(num_samples: int, batch_size: int, parts: int) -> None:
    """Raise DataError where there is no whole batch, which is to be a multiple of `parts`."""
    if num_samples < batch_size:
        fits = num_samples // parts * parts
        smaller = f"batch_size={fits}, or " if fits else ""
        raise DataError(
            f"the training set has {num_samples} samples, fewer than batch_size={batch_size}; "
            f"use {smaller}drop_last=false"
        )


def are_images(class_names: Sequence[str], example: Any) -> bool:
    """Whether samples like `example` (inputs, targets) are images [C, H, W] of pixels, each of one
    class.
    """
    inputs = example[0]
    return (
        bool(class_names)
        and isinstance(inputs, Tensor)
        and inputs.dim() == 3
        and inputs.is_floating_point()
    )


def check_image_keys(dataset: DatasetConfig, source: Source) -> None:
    """Raise ConfigError where a mean, std or augmentation does not fit the samples."""
    if are_images(source.class_names, source.example):
        _check_channels(dataset, source.shapes["channels"])
        _check_augment(dataset.augment, source.shapes["image_size"])
    elif source.normalises:
        _check_channels(dataset, source.shapes["channels"])
        if not source.moves and dataset.augment.is_set:
            raise ConfigError(
                "dataset.augment: would move images and leave their masks; leave it out"
            )
        _check_augment(dataset.augment, source.shapes["image_size"])
    elif dataset.mean or dataset.std or dataset.augment.is_set:
        raise ConfigError(
            "dataset.mean, std and augment: are of images with classes; leave them out here"
        )


def mixing_of(source: Source, mixup: float | None, cutmix: float | None) -> Mixing | None:
    """What mixes the samples, if anything is to. Raises ConfigError where they cannot be mixed."""
    inputs = source.example[0]
    for key, value, mixes, least in (
        ("mixup", mixup, "adds tensors", 1),
        ("cutmix", cutmix, "cuts images", 3),
    ):
        if value and not (isinstance(inputs, Tensor) and least <= inputs.dim() <= 3):
            found = (
                list(inputs.shape) if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
            )
            raise ConfigError(
                f"{key}={value}: {mixes}, and a sample's inputs are {found}; use {key}=null"
            )
    return Mixing(len(source.class_names), mixup, cutmix) if mixup or cutmix else None


def warn_of_limit(dataset: DatasetConfig, samples: int, *, tells: bool) -> None:
    """Say that there are not as many `samples` to train on as are asked for."""
    if tells and (limit := dataset.train_limit) and limit > samples:
        warn(
            f"dataset.train_limit={limit}: there are {samples} samples to train on, and all are"
            " used"
        )


def known_classes(dataset: DatasetConfig, source: Source) -> Tensor:
    """The class of each training sample, int64 [N].

    Raises ConfigError where it shows only once a sample is read.
    """
    if not source.tells_classes:
        raise ConfigError(
            f"dataset.sampling={dataset.sampling}: needs the class of each sample before it is"
            " read; give the dataset an attribute `targets`, a list of them, or use"
            " dataset.sampling=null"
        )
    return source.classes


def _check_channels(dataset: DatasetConfig, channels: int) -> None:
    problems = [
        f"dataset.{name} has {len(values)} values, but the images have {channels} channels; give"
        " one per channel"
        for name, values in (("mean", dataset.mean), ("std", dataset.std))
        if values is not None and len(values) != channels
    ]
    if problems:
        raise ConfigError(problems)


def _check_augment(augment: datasets.Augment, image_size: tuple[int, int]) -> None:
    smallest = min(image_size)
    problems = [
        f"dataset.augment.{name}={value}: must be below {smallest}, the images being"
        f" {image_size[0]}x{image_size[1]}"
        for name, value in (("crop_padding", augment.crop_padding), ("cutout", augment.cutout))
        if value >= smallest
    ]
    if problems:
        raise ConfigError(problems)
