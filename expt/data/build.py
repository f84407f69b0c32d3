"""From the dataset's configuration to its three loaders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

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
from expt.data.image_folder_files import list_parts
from expt.data.indexing import split
from expt.data.loading import Loader, LoaderOptions, Shard
from expt.data.memory import InMemoryLoader, place
from expt.data.stream import StreamLoader, to_tensor
from expt.data.synthetic import synthetic
from expt.errors import ConfigError, DataError, warn


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
    """The loaders of a run, on one worker; `val` and `test` where there is such a set."""

    info: DataInfo
    train: Loader
    val: Loader | None
    test: Loader | None


class _Load(Protocol):
    def __call__(self, indices: Tensor, options: LoaderOptions) -> Loader:
        """A loader of the samples at `indices`."""


class _Part(NamedTuple):
    """The training, validation or test part of a dataset, before it is split and batched."""

    size: int
    load: _Load

    def whole(self, options: LoaderOptions) -> Loader:
        """A loader of all its samples."""
        return self.load(torch.arange(self.size), options)


@dataclass(frozen=True)
class _Source:
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    train: _Part
    test: _Part | None
    val: _Part | None = None
    """where it is a part of its own, and not held out of train"""
    classes: Tensor | None = None
    """of the training samples [N]; None where these come in random order as they are"""


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
    val_fraction = 0.0 if source.val else dataset.val_fraction
    train_idx, val_idx = split(source.train.size, val_fraction, dataset.train_limit, source.classes)
    if (limit := dataset.train_limit) and limit > len(train_idx) and shard.rank == 0:
        warn(f"dataset.train_limit={limit}: there are {len(train_idx)} images to train on, and all are used")
    if drop_last:
        _check_batch(len(train_idx), batch_size, batch_parts)
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
    val, test = source.val and source.val.whole(in_order), source.test and source.test.whole(in_order)
    if len(val_idx):
        val = source.train.load(val_idx, in_order)
    return Data(
        info=DataInfo(
            channels=source.shape[0],
            image_size=source.shape[1:],
            num_classes=len(source.class_names),
            class_names=source.class_names,
            train_size=len(train_idx),
            val_size=val.size if val else 0,
            test_size=test.size if test else 0,
        ),
        train=source.train.load(train_idx, to_train),
        val=val,
        test=test,
    )


def _source(dataset: DatasetConfig, device: torch.device, num_workers: int) -> _Source:
    if isinstance(dataset, groups.Synthetic):
        names = tuple(map(str, range(dataset.num_classes)))
        train, test = synthetic(dataset)
        return _Source(_shape_of(train), names, _in_memory(train, device), _in_memory(test, device))
    if isinstance(dataset, groups.ImageFolder):
        return _folder(dataset, device, num_workers)
    if isinstance(dataset, groups.TargetDataset):
        return _own(dataset, num_workers)
    train, test = _tensors(load(dataset, "train")), _tensors(load(dataset, "test"))
    return _Source(_shape_of(train), CLASS_NAMES[dataset.name], _in_memory(train, device), _in_memory(test, device))


def _folder(dataset: groups.ImageFolder, device: torch.device, num_workers: int) -> _Source:
    """From memory where the driver has put the images into the cache, else read one by one."""
    listings = list_parts(dataset.root)
    decoded = {part: decoded_folder(listing, dataset) for part, listing in listings.items()}
    shape, names = (3, *dataset.image_size), listings["train"].classes
    if any(arrays is None for arrays in decoded.values()):
        images = {part: FolderDataset(listing, dataset.image_size) for part, listing in listings.items()}
        parts = {part: _streamed(images[part], shape, len(names), num_workers) for part in listings}
    else:
        parts = {part: _in_memory(_tensors(arrays), device) for part, arrays in decoded.items() if arrays is not None}
    classes = torch.tensor(listings["train"].labels)
    return _Source(shape, names, parts["train"], parts.get("test"), parts.get("val"), classes)


def _tensors(arrays: Arrays) -> tuple[Tensor, Tensor]:
    images, labels = (array if array.flags.writeable else np.array(array) for array in arrays)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _shape_of(samples: tuple[Tensor, Tensor]) -> tuple[int, int, int]:
    channels, height, width = samples[0].shape[1:]
    return channels, height, width


def _in_memory(samples: tuple[Tensor, Tensor], device: torch.device) -> _Part:
    # Placed here, so that training and validation share one copy on the GPU.
    return _Part(len(samples[0]), functools.partial(InMemoryLoader, place(samples[0], device), samples[1]))


def _streamed(dataset: Dataset[Any], shape: tuple[int, int, int], num_classes: int, num_workers: int) -> _Part:
    def load_part(indices: Tensor, options: LoaderOptions) -> Loader:
        return StreamLoader(dataset, indices, options, shape=shape, num_classes=num_classes, num_workers=num_workers)

    return _Part(len(cast(Sized, dataset)), load_part)


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
    shape = channels, height, width
    to_train, to_test = (_streamed(part, shape, len(names), num_workers) for part in (train, test))
    return _Source(shape, names, to_train, to_test, classes=_classes_of(train))


def _classes_of(dataset: Dataset[Any]) -> Tensor:
    """The class of each sample, by the attribute `targets` that torchvision's datasets have; else all are of one."""
    size = len(cast(Sized, dataset))
    try:
        targets = torch.as_tensor(getattr(dataset, "targets", ()))
    except (TypeError, ValueError, RuntimeError):  # boxes, texts, ...
        targets = torch.empty(0)
    return targets if targets.shape == (size,) else torch.zeros(size)


def _construct(dataset: groups.TargetDataset, cls: type[Dataset[Any]], arguments: dict[str, Any]) -> Dataset[Any]:
    try:
        return cls(**arguments)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ConfigError(
            f"dataset._target_={dataset.target}: cannot be built as {cls.__name__}({given}): {error}"
        ) from error


def _check_batch(num_images: int, batch_size: int, parts: int) -> None:
    if num_images < batch_size:
        fits = num_images // parts * parts
        smaller = f"batch_size={fits}, or " if fits else ""
        raise DataError(
            f"the training set has {num_images} images, fewer than batch_size={batch_size}; "
            f"use {smaller}drop_last=false"
        )


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
