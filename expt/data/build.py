"""From the dataset's configuration to its three loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expt.data import indexing, transforms
from expt.data.augment import Augmentation
from expt.data.kind import DatasetConfig
from expt.data.loading import Batch, Loader, LoaderOptions, Shard
from expt.data.mixing import Mixing
from expt.data.source import Source, are_images
from expt.data.tree import mapped
from expt.errors import ConfigError, DataError, warn

# deviations from 0, beyond which a variance from sums of squares loses more than four digits
_FAR = 100.0


@dataclass(frozen=True)
class DataInfo:
    """What a model needs to know of its data."""

    shapes: Mapping[str, Any]
    """what a model may ask for, by keyword, such as `channels`, `image_size` and `num_classes`"""
    class_names: tuple[str, ...]
    """empty where samples are of no class"""
    train_size: int
    """samples to train on, after validation is held out and train_limit applied"""
    val_size: int
    test_size: int
    standardised: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """of a table's columns: the mean and standard deviation over the training samples"""
    feature_names: tuple[str, ...] = ()
    """of a table's columns that the model gets, in their order"""
    target_names: tuple[str, ...] = ()
    """of a table's columns that are to be predicted"""
    class_counts: tuple[int, ...] = ()
    """samples of each class to train on, if that is known before they are read"""
    target_origin: float = 0.0
    """what targets that are numbers lie near, where that is far from 0 by their deviation"""

    @property
    def sizes(self) -> dict[str, int]:
        """The samples of each part."""
        return {name: getattr(self, name) for name in ("train_size", "val_size", "test_size")}

    @property
    def told(self) -> dict[str, Any]:
        """What a record has of it, as its `data`; `shapes_told` finds the shapes there again."""
        names = "class_names standardised feature_names target_names target_origin".split()
        more = {name: getattr(self, name) for name in names if getattr(self, name)}
        return {**self.shapes, **self.sizes, **more}

    @property
    def channels(self) -> int:
        """Of its images."""
        return int(self.shapes["channels"])

    @property
    def num_classes(self) -> int:
        """The number of a model's outputs."""
        return int(self.shapes["num_classes"])


def shapes_told(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes in what `DataInfo.told` has recorded."""
    others = {field.name for field in dataclasses.fields(DataInfo)}
    return {key: value for key, value in record.items() if key not in others}


@dataclass(frozen=True)
class Data:
    """The loaders of a run, on one worker; `val` and `test` where there is such a set."""

    info: DataInfo
    example: tuple[Any, Any]
    """inputs and targets of one sample, zeros on the device"""
    train: Loader
    val: Loader | None
    test: Loader | None

    @property
    def are_images(self) -> bool:
        """Whether its samples are images, each of one class."""
        return are_images(self.info.class_names, self.example)

    def blank(self, size: int) -> Batch:
        """Return a batch of `size` samples, all zeros."""
        inputs, targets = mapped(
            lambda tensor: tensor.expand(size, *tensor.shape).clone(), self.example
        )
        return Batch(inputs, targets, size)


def build(
    dataset: DatasetConfig,
    task: Any = None,
    *,
    batch_size: int,
    shard: Shard,
    device: torch.device,
    seed: int,
    drop_last: bool,
    channels_last: bool,
    num_workers: int = 0,
    batch_parts: int = 1,
    mixup: float | None = None,
    cutmix: float | None = None,
) -> Data:
    """Return the loaders of `dataset` on one worker.

    `batch_size` is global, a multiple of `batch_parts`; `num_workers` processes read for this
    worker. The `task` says what targets are. `mixup` and `cutmix` are of training only. Raise
    DataError for the data, ConfigError for keys that do not fit it.
    """
    source = dataset.open(task, device, num_workers)
    check_image_keys(dataset, source)
    train_idx, val_idx = split(dataset, source)
    source = source.fitted(train_idx) if source.fitted else source
    if shard.rank == 0 and (limit := dataset.train_limit) and limit > (there := len(train_idx)):
        warn(f"dataset.train_limit={limit}: there are {there} samples to train on, all are used")
    if drop_last:
        check_batch(len(train_idx), batch_size, batch_parts)
    in_order = LoaderOptions(
        batch_size=batch_size,
        shard=shard,
        device=device,
        mean=dataset.mean,
        std=dataset.std,
        channels_last=channels_last,
        batch_parts=batch_parts,
    )
    to_train = dataclasses.replace(
        in_order,
        seed=seed,
        shuffle=True,
        drop_last=drop_last,
        augment=Augmentation(**dataclasses.asdict(dataset.augment)),
        balanced=known_classes(dataset, source)[train_idx] if dataset.sampling else None,
        transforms=transforms.build(getattr(dataset, "transforms", None) or ()),
        mixing=mixing_of(source, mixup, cutmix),
    )
    val, test = (part and part.whole(in_order) for part in (source.val, source.test))
    if len(val_idx):
        val = source.train.load(val_idx, in_order)
    return Data(
        info=_info(source, train_idx, task, val=val, test=test),
        example=mapped(lambda tensor: torch.zeros_like(tensor, device=device), source.example),
        train=source.train.load(train_idx, to_train),
        val=val,
        test=test,
    )


def _info(
    source: Source, train: Tensor, task: Any, *, val: Loader | None, test: Loader | None
) -> DataInfo:
    names = source.class_names
    counts = torch.empty(0)
    if source.tells_classes:
        counts = torch.bincount(source.classes[train], minlength=len(names))
    return DataInfo(
        shapes=source.shapes,
        class_names=names,
        train_size=len(train),
        val_size=val.size if val else 0,
        test_size=test.size if test else 0,
        standardised=source.standardised,
        feature_names=source.feature_names,
        target_names=source.target_names,
        class_counts=tuple(counts.tolist()),
        target_origin=_origin(source, train)
        if getattr(task, "TARGETS", None) == "numbers"
        else 0.0,
    )


def _origin(source: Source, train: Tensor) -> float:
    """See DataInfo; alike on all workers, and in a run that resumes."""
    if source.targets_of is None:
        return 0.0
    values = source.targets_of(train).double()
    mean = float(values.mean())
    return mean if abs(mean) > _FAR * float(values.std(correction=0)) else 0.0


def split(dataset: DatasetConfig, source: Source) -> tuple[Tensor, Tensor]:
    """Return the samples to train on, and those held out to validate [N]."""
    size, limited_by = source.train.size, None if source.in_random_order else source.classes
    if dataset.folds is None or dataset.fold is None:
        return indexing.split(
            size, 0.0 if source.val else dataset.val_fraction, dataset.train_limit, limited_by
        )
    if source.val:
        raise ConfigError(
            f"dataset.folds={dataset.folds}: {getattr(dataset, 'root', '')}/val validates; use"
            " folds=null"
        )
    if dataset.folds > size:
        raise ConfigError(
            f"dataset.folds={dataset.folds}: there are {size} training samples; use {size} or fewer"
        )
    return indexing.split_fold(
        source.classes, dataset.folds, dataset.fold, dataset.train_limit, limited_by
    )


def check_batch(num_samples: int, batch_size: int, parts: int) -> None:
    """Raise DataError where there is no whole batch, which is to be a multiple of `parts`."""
    if num_samples < batch_size:
        fits = num_samples // parts * parts
        smaller = f"batch_size={fits}, or " if fits else ""
        raise DataError(
            f"the training set has {num_samples} samples, fewer than batch_size={batch_size}; "
            f"use {smaller}drop_last=false"
        )


def check_image_keys(dataset: DatasetConfig, source: Source) -> None:
    """Raise ConfigError where a mean, std or augmentation does not fit the samples."""
    augment, problems = dataset.augment, []
    if not (source.normalises or are_images(source.class_names, source.example)):
        if dataset.mean or dataset.std or augment.is_set:
            problems = ["dataset.mean, std and augment: are of images; leave them out here"]
    else:
        channels, (height, width) = source.shapes["channels"], source.shapes["image_size"]
        if not source.moves and augment.is_set:
            problems = ["dataset.augment: moves images without their masks; leave it out"]
        problems += [
            f"dataset.{name} has {len(values)} values, but the images have {channels} channels;"
            " give one per channel"
            for name, values in (("mean", dataset.mean), ("std", dataset.std))
            if values is not None and len(values) != channels
        ]
        problems += [
            f"dataset.augment.{name}={value}: must be below {min(height, width)}, the images being"
            f" {height}x{width}"
            for name, value in (("crop_padding", augment.crop_padding), ("cutout", augment.cutout))
            if value >= min(height, width)
        ]
    if problems:
        raise ConfigError(problems)


def mixing_of(source: Source, mixup: float | None, cutmix: float | None) -> Mixing | None:
    """Return what mixes the samples, if anything does. Raise ConfigError if they can't be."""
    inputs = source.example[0]
    for key, value, least in (("mixup", mixup, 1), ("cutmix", cutmix, 3)):
        if value and not (isinstance(inputs, Tensor) and least <= inputs.dim() <= 3):
            is_tensor = isinstance(inputs, Tensor)
            found = list(inputs.shape) if is_tensor else f"a {type(inputs).__name__}"
            what = "cuts images" if key == "cutmix" else "adds tensors"
            raise ConfigError(
                f"{key}={value}: {what}, and a sample's inputs are {found}; use {key}=null"
            )
    return Mixing(len(source.class_names), mixup, cutmix) if mixup or cutmix else None


def known_classes(dataset: DatasetConfig, source: Source) -> Tensor:
    """Return the class of each training sample, int64 [N].

    Raise ConfigError where it shows only once a sample is read.
    """
    if not source.tells_classes:
        raise ConfigError(
            f"dataset.sampling={dataset.sampling}: needs the class of each sample before it is"
            " read; give the dataset an attribute `targets`, a list of them, or use"
            " dataset.sampling=null"
        )
    return source.classes
