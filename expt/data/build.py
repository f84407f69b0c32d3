"""From the dataset's configuration to its three loaders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.config import groups, user_class
from expt.data.augment import Augmentation
from expt.data.classes import CLASS_NAMES
from expt.data.files import Arrays, DatasetConfig, load
from expt.data.image_folder import FolderDataset
from expt.data.image_folder_cache import decoded_folder
from expt.data.image_folder_files import list_images
from expt.data.indexing import split
from expt.data.loading import Loader, LoaderOptions, Shard
from expt.data.memory import InMemoryLoader, place
from expt.data.stream import StreamLoader, to_tensor
from expt.data.synthetic import synthetic
from expt.errors import ConfigError, DataError


@dataclass(frozen=True)
class DataInfo:
    """What a model needs to know of its data."""

    channels: int
    image_size: tuple[int, int]
    """height, width"""
    num_classes: int
    class_names: tuple[str, ...]
    train_size: int
    """samples to train on, after validation is held out and train_limit applied"""
    val_size: int
    test_size: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """channels, height, width"""
        return self.channels, *self.image_size


@dataclass(frozen=True)
class Data:
    """The loaders of a run, on one worker; there is no `val` when val_fraction is 0."""

    info: DataInfo
    train: Loader
    val: Loader | None
    test: Loader


class _Part(Protocol):
    """The training or the test part of a dataset, before it is split and batched."""

    def __call__(self, indices: Tensor, options: LoaderOptions) -> Loader:
        """A loader of the samples at `indices`."""


@dataclass(frozen=True)
class _Source:
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    train_size: int
    test_size: int
    train: _Part
    test: _Part


def build(
    dataset: DatasetConfig,
    *,
    batch_size: int,
    shard: Shard,
    device: torch.device,
    seed: int,
    drop_last: bool,
    channels_last: bool,
    num_workers: int = 0,
    batch_parts: int = 1,
) -> Data:
    """The loaders of `dataset` on one worker; `batch_size` is global, `num_workers` reads for this worker.

    A batch is a multiple of `batch_parts`, which is told where it is too large.

    Raises DataError for the data, ConfigError for a dataset class or a mean and std that do not fit it.
    """
    source = _source(dataset, device, num_workers)
    _check_channels(dataset, source.shape[0])
    _check_augment(dataset.augment, source.shape[1:])
    train_idx, val_idx = split(source.train_size, dataset.val_fraction, dataset.train_limit)
    if drop_last and len(train_idx) < batch_size:
        fits = len(train_idx) // batch_parts * batch_parts
        smaller = f"batch_size={fits}, or " if fits else ""
        raise DataError(
            f"the training set has {len(train_idx)} images, fewer than batch_size={batch_size}; "
            f"use {smaller}drop_last=false"
        )
    in_order = LoaderOptions(
        batch_size=batch_size,
        shard=shard,
        device=device,
        mean=dataset.mean,
        std=dataset.std,
        channels_last=channels_last,
    )
    to_train = dataclasses.replace(
        in_order,
        seed=seed,
        shuffle=True,
        drop_last=drop_last,
        augment=Augmentation(**dataclasses.asdict(dataset.augment)),
    )
    return Data(
        info=DataInfo(
            channels=source.shape[0],
            image_size=source.shape[1:],
            num_classes=len(source.class_names),
            class_names=source.class_names,
            train_size=len(train_idx),
            val_size=len(val_idx),
            test_size=source.test_size,
        ),
        train=source.train(train_idx, to_train),
        val=source.train(val_idx, in_order) if len(val_idx) else None,
        test=source.test(torch.arange(source.test_size), in_order),
    )


def _source(dataset: DatasetConfig, device: torch.device, num_workers: int) -> _Source:
    if isinstance(dataset, groups.Synthetic):
        names = tuple(map(str, range(dataset.num_classes)))
        return _in_memory(*synthetic(dataset), names, device)
    if isinstance(dataset, groups.ImageFolder):
        return _folder(dataset, device, num_workers)
    if isinstance(dataset, groups.TargetDataset):
        return _own(dataset, num_workers)
    tensors = (_tensors(load(dataset, "train")), _tensors(load(dataset, "test")))
    return _in_memory(*tensors, CLASS_NAMES[dataset.name], device)


def _folder(dataset: groups.ImageFolder, device: torch.device, num_workers: int) -> _Source:
    """From memory where the driver has put the images into the cache, else read one by one."""
    train, test = list_images(dataset.root, "train"), list_images(dataset.root, "test")
    decoded = decoded_folder(train, dataset), decoded_folder(test, dataset)
    if decoded[0] is not None and decoded[1] is not None:
        return _in_memory(_tensors(decoded[0]), _tensors(decoded[1]), train.classes, device)
    parts = FolderDataset(train, dataset.image_size), FolderDataset(test, dataset.image_size)
    return _streamed(*parts, (3, *dataset.image_size), train.classes, num_workers)


def _tensors(arrays: Arrays) -> tuple[Tensor, Tensor]:
    images, labels = (array if array.flags.writeable else np.array(array) for array in arrays)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _in_memory(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], class_names: tuple[str, ...], device: torch.device
) -> _Source:
    channels, height, width = train[0].shape[1:]
    return _Source(
        shape=(channels, height, width),
        class_names=class_names,
        train_size=len(train[0]),
        test_size=len(test[0]),
        # Placed here, so that training and validation share one copy on the GPU.
        train=functools.partial(InMemoryLoader, place(train[0], device), train[1]),
        test=functools.partial(InMemoryLoader, place(test[0], device), test[1]),
    )


def _streamed(
    train: Dataset[Any],
    test: Dataset[Any],
    shape: tuple[int, int, int],
    class_names: tuple[str, ...],
    num_workers: int,
) -> _Source:
    def part(dataset: Dataset[Any]) -> _Part:
        return lambda indices, options: StreamLoader(
            dataset, indices, options, shape=shape, num_classes=len(class_names), num_workers=num_workers
        )

    return _Source(
        shape=shape,
        class_names=class_names,
        train_size=len(cast(Sized, train)),
        test_size=len(cast(Sized, test)),
        train=part(train),
        test=part(test),
    )


def _own(dataset: groups.TargetDataset, num_workers: int) -> _Source:
    """A person's own Dataset class; its first sample tells the images' shape."""
    cls: type[Dataset[Any]] = user_class.resolve(dataset.target, Dataset)
    if issubclass(cls, IterableDataset) or not hasattr(cls, "__len__"):
        raise ConfigError(f"dataset._target_={dataset.target}: must have __len__ and __getitem__ (a map-style Dataset)")
    train = _construct(dataset, cls, {**dataset.kwargs, **dataset.train})
    test = _construct(dataset, cls, {**dataset.kwargs, **dataset.test})
    for name, part in (("training", train), ("test", test)):
        if len(cast(Sized, part)) == 0:
            raise DataError(f"dataset._target_={dataset.target}: its {name} part has no samples")
    try:
        image, _ = train[0]
        channels, height, width = to_tensor(image).shape
    except (TypeError, ValueError) as error:
        raise DataError(f"dataset._target_={dataset.target}: its sample 0 is not (image, label): {error}") from error
    names = tuple(map(str, getattr(train, "classes", None) or range(dataset.num_classes)))
    if len(names) != dataset.num_classes:
        raise ConfigError(
            f"dataset.num_classes={dataset.num_classes}: {dataset.target}.classes has {len(names)}; "
            f"use dataset.num_classes={len(names)}"
        )
    return _streamed(train, test, (channels, height, width), names, num_workers)


def _construct(dataset: groups.TargetDataset, cls: type[Dataset[Any]], arguments: dict[str, Any]) -> Dataset[Any]:
    try:
        return cls(**arguments)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ConfigError(
            f"dataset._target_={dataset.target}: cannot be built as {cls.__name__}({given}): {error}"
        ) from error


def _check_channels(dataset: DatasetConfig, channels: int) -> None:
    problems = [
        f"dataset.{name} has {len(values)} values, but the images have {channels} channels; give one per channel"
        for name, values in (("mean", dataset.mean), ("std", dataset.std))
        if values is not None and len(values) != channels
    ]
    if problems:
        raise ConfigError(problems)


def _check_augment(augment: groups.Augment, image_size: tuple[int, int]) -> None:
    smallest = min(image_size)
    problems = [
        f"dataset.augment.{name}={value}: must be below {smallest}, the images being {image_size[0]}x{image_size[1]}"
        for name, value in (("crop_padding", augment.crop_padding), ("cutout", augment.cutout))
        if value >= smallest
    ]
    if problems:
        raise ConfigError(problems)
