"""From the dataset's configuration to its three loaders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expt.config import datasets
from expt.config.tasks import kinds
from expt.data import (
    checks,
    huggingface,
    indexing,
    mask_files,
    masks,
    own_dataset,
    table,
    table_source,
    text_source,
    torchvision_masks,
    torchvision_sets,
    transforms,
)
from expt.data.augment import Augmentation
from expt.data.classes import CLASS_NAMES
from expt.data.files import Arrays, DatasetConfig, load
from expt.data.image_folder import FolderDataset
from expt.data.image_folder_cache import decoded_folder
from expt.data.image_folder_files import list_parts
from expt.data.loading import Batch, Loader, LoaderOptions, Shard
from expt.data.memory import InMemoryLoader, place
from expt.data.source import NOTHING, Part, Source, of_images, streamed
from expt.data.synthetic import synthetic
from expt.data.tree import mapped
from expt.errors import ConfigError

# deviations from 0, beyond which a variance from sums of squares loses more than four digits
_FAR = 100.0


@dataclass(frozen=True)
class DataInfo:
    """What a model needs to know of its data."""

    shapes: Mapping[str, Any]
    """What a model may ask for, by keyword: of images their `channels` and `image_size` (height,
    width), and
    `num_classes`, the number of its outputs"""
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
    """samples of each class to train on; empty where the dataset does not tell before they are read
    """
    target_origin: float = 0.0
    """what targets that are numbers lie near, where that is far from 0 by their deviation"""

    @property
    def sizes(self) -> dict[str, int]:
        """The samples of each part."""
        return {name: getattr(self, name) for name in ("train_size", "val_size", "test_size")}

    @property
    def told(self) -> dict[str, Any]:
        """What a record has of it, as its `data`; `shapes_told` finds the shapes there again."""
        where_there_are = (
            "class_names",
            "standardised",
            "feature_names",
            "target_names",
            "target_origin",
        )
        more = {name: getattr(self, name) for name in where_there_are if getattr(self, name)}
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
    """The shapes in what `DataInfo.told` has told."""
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
        return checks.are_images(self.info.class_names, self.example)

    def blank(self, size: int) -> Batch:
        """A batch of `size` samples, all zeros."""
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
    """The loaders of `dataset` on one worker; `batch_size` is global, `num_workers` reads for this
    worker.

    A batch is a multiple of `batch_parts`, which is told where it is too large. The `task` says
    what targets of a table or of a person's own samples are. `mixup` and `cutmix` are
    of training alone: see Mixing, LoaderOptions.

    Raises DataError for the data, ConfigError for a dataset class or a mean and std that do not fit
    it."""
    task = task or kinds()["classification"]()
    source = found(dataset, task, device, num_workers)
    checks.check_image_keys(dataset, source)
    train_idx, val_idx = split(dataset, source)
    source = source.fitted(train_idx) if source.fitted else source
    checks.warn_of_limit(dataset, len(train_idx), tells=shard.rank == 0)
    if drop_last:
        checks.check_batch(len(train_idx), batch_size, batch_parts)
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
        balanced=checks.known_classes(dataset, source)[train_idx] if dataset.sampling else None,
        transforms=_transforms(dataset),
        mixing=checks.mixing_of(source, mixup, cutmix),
    )
    val, test = (
        source.val and source.val.whole(in_order),
        source.test and source.test.whole(in_order),
    )
    if len(val_idx):
        val = source.train.load(val_idx, in_order)
    return Data(
        info=_info(source, train_idx, task, val=val, test=test),
        example=mapped(lambda tensor: torch.zeros_like(tensor, device=device), source.example),
        train=source.train.load(train_idx, to_train),
        val=val,
        test=test,
    )


def _transforms(dataset: DatasetConfig) -> Sequence[Callable[[Any], Any]]:
    configured = dataset.transforms if isinstance(dataset, datasets.Images) else None
    return transforms.build(configured) if configured else ()


def _info(
    source: Source, train: Tensor, task: Any, *, val: Loader | None, test: Loader | None
) -> DataInfo:
    names = source.class_names
    counts = (
        torch.bincount(source.classes[train], minlength=len(names))
        if source.tells_classes
        else torch.empty(0)
    )
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
        target_origin=_origin(source, train) if task.TARGETS == "numbers" else 0.0,
    )


def _origin(source: Source, train: Tensor) -> float:
    """See DataInfo; alike on all workers, and in a run that resumes."""
    if source.targets_of is None:
        return 0.0
    values = source.targets_of(train).double()
    mean = float(values.mean())
    return mean if abs(mean) > _FAR * float(values.std(correction=0)) else 0.0


def split(dataset: DatasetConfig, source: Source) -> tuple[Tensor, Tensor]:
    """The training samples to train on, and those held out to validate [N]."""
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


def found(dataset: DatasetConfig, task: Any, device: torch.device, num_workers: int) -> Source:
    """The dataset as it lies there, before it is split and batched. Raises as `build`."""
    if isinstance(dataset, datasets.Synthetic):
        return _of_arrays(
            *synthetic(dataset), tuple(map(str, range(dataset.num_classes))), device, num_workers
        )
    if isinstance(dataset, datasets.Torchvision):
        if datasets.has_masks(dataset, task.TARGETS == "mask"):
            return torchvision_masks.source(dataset, num_workers, masks.values_of(dataset, task))
        return torchvision_sets.source(dataset, task, device, num_workers)
    if isinstance(dataset, datasets.HuggingFace):
        return huggingface.source(dataset, task, device, num_workers)
    if isinstance(dataset, datasets.ImageFolder):
        return _folder(dataset, device, num_workers)
    if isinstance(dataset, datasets.Text):
        return text_source.windows(dataset)
    if isinstance(dataset, datasets.TargetDataset):
        return own_dataset.source(dataset, num_workers, task)
    if isinstance(dataset, datasets.SegmentationFolder):
        return _mask_folder(dataset, num_workers, masks.values_of(dataset, task))
    if isinstance(dataset, table.TableConfig):
        return table_source.rows_in_memory(dataset, task, device)
    train, test = _tensors(load(dataset, "train")), _tensors(load(dataset, "test"))
    return _of_arrays(train, test, CLASS_NAMES[dataset.name], device, num_workers)


def _of_arrays(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    class_names: Sequence[str],
    device: torch.device,
    num_workers: int,
) -> Source:
    """Images and labels in random order."""
    channels, height, width = train[0].shape[1:]
    parts = _in_memory(train, device), _in_memory(test, device)
    shape = channels, height, width
    to_train = transforms.transformed(
        parts[0], transforms.Images(*train), shape, len(class_names), num_workers
    )
    return of_images(shape, class_names, to_train, parts[1], classes=train[1], in_random_order=True)


def _folder(dataset: datasets.ImageFolder, device: torch.device, num_workers: int) -> Source:
    """From memory where the driver has put the images into the cache, else read one by one."""
    listings = list_parts(dataset.root)
    decoded = {part: decoded_folder(listing, dataset) for part, listing in listings.items()}
    shape, names = (dataset.channels, *dataset.image_size), next(iter(listings.values())).classes
    if any(arrays is None for arrays in decoded.values()):
        images = {
            part: FolderDataset(listing, dataset.image_size, shape[0])
            for part, listing in listings.items()
        }
        parts = {part: streamed(images[part], shape, len(names), num_workers) for part in listings}
    else:
        parts = {
            part: _in_memory(_tensors(arrays), device)
            for part, arrays in decoded.items()
            if arrays is not None
        }
    others: Any = {"val": parts.get("val")}
    if "train" not in listings:  # in an evaluation
        return of_images(shape, names, NOTHING, parts.get("test"), classes=torch.empty(0), **others)
    classes, originals = (
        torch.tensor(listings["train"].labels),
        FolderDataset(listings["train"], None, shape[0]),
    )
    to_train = transforms.transformed(parts["train"], originals, shape, len(names), num_workers)
    return of_images(shape, names, to_train, parts.get("test"), classes=classes, **others)


def _mask_folder(
    dataset: datasets.SegmentationFolder, num_workers: int, values: masks.MaskValues
) -> Source:
    size, channels, parts = dataset.image_size, dataset.channels, dict[str, Part]()
    for part, pairs in mask_files.list_parts(dataset.root).items():
        folder = masks.MaskFolder(pairs, size, values, channels)
        parts[part] = Part(len(pairs), masks.loading(folder, num_workers, channels))
    return masks.of_masks(parts, (channels, *size), dataset.num_classes)


def _tensors(arrays: Arrays) -> tuple[Tensor, Tensor]:
    images, labels = (array if array.flags.writeable else np.array(array) for array in arrays)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _in_memory(samples: tuple[Tensor, Tensor], device: torch.device) -> Part:
    # Placed here, so that training and validation share one copy on the GPU.
    return Part(
        len(samples[0]), functools.partial(InMemoryLoader, place(samples[0], device), samples[1])
    )
