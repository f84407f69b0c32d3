"""From the dataset's configuration to the loaders of a run or an evaluation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from expt.data import indexing, overlap
from expt.data.augment import Augmentation, Mixing
from expt.data.checked_samples import build_transforms
from expt.data.kinds import DatasetConfig, Opening
from expt.data.loader import IndexLoader, Loader
from expt.data.loading import ROWS, Batch, LoaderOptions, PerSample, mapped
from expt.data.source import Source
from expt.errors import ConfigError, DataError, counted, described, listed, warn
from expt.features import Features
from expt.runs.request import Split

_NO_FOLDS = "none can be held out of an IterableDataset; give it '+dataset.val={split: val}'"
UNEVEN = 0.1
"""The least by which a class's share exceeds an even one if it is reported."""
NOTICEABLE = 0.05
"""The share of the training samples that `drop_last` leaves out without a warning."""


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The facts about its data that a model needs."""

    features: Features
    train_size: int
    """samples to train on in an epoch, after validation is held out and train_limit applied"""
    val_size: int | None
    """None, as of the test, where they are not counted"""
    test_size: int | None
    is_uncounted: bool = False
    """whether those to train on are not counted"""
    class_counts: tuple[int, ...] = ()
    """samples of each class to train on, if that is known before they are read"""
    majority: tuple[str, float] | tuple[()] = ()
    """the class of most training samples and its share, if that alone makes a good accuracy"""

    @property
    def sizes(self) -> dict[str, int | None]:
        """The samples of each part."""
        return {name: getattr(self, name) for name in ("train_size", "val_size", "test_size")}

    @property
    def record(self) -> dict[str, Any]:
        """The `data` of a record."""
        more = {"majority": self.majority, "is_uncounted": self.is_uncounted}
        some = {name: one for name, one in more.items() if one}
        return {**self.features.record, **self.sizes, **some}


@dataclass(frozen=True)
class Data:
    """The loaders of a run, on one worker; `val` and `test` where there is such a set."""

    info: DataInfo
    example: tuple[Any, Any]
    """inputs and targets of one sample on the device: the first of a custom dataset, else zeros"""
    train: Loader
    val: Loader | None
    test: Loader | None

    def blank(self, size: int) -> Batch:
        """Return a batch of `size` times the example."""

        def several(one: Tensor | PerSample) -> Tensor | PerSample:
            if isinstance(one, Tensor):
                return one.expand(size, *one.shape).clone()
            return PerSample(mapped(torch.clone, size * one))

        inputs, targets = mapped(several, self.example, ROWS)
        return Batch(inputs, targets, size)

    def evaluated(self, split: str | None) -> Loader | None:
        """Return the loader of the split that is evaluated, if there is one."""
        return {"val": self.val, "test": self.test}.get(split or "")

    def of_type(self, module: nn.Module) -> Data:
        """Return the same, with float64 left as it is where the model computes in it."""
        loaders = self.train, self.val, self.test
        if not keep_doubles(module, (each for each in loaders if each is not None)):
            return self
        return dataclasses.replace(self, example=in_its_type(module, self.example))


def in_its_type(module: nn.Module, tree: Any) -> Any:
    """Return tensors, with numbers in float64 where the model computes in it."""
    if not _is_double(module):
        return tree
    return mapped(lambda one: one.double() if one.is_floating_point() else one, tree)


def _is_double(module: nn.Module) -> bool:
    return any(one.dtype == torch.float64 for one in module.parameters())


def keep_doubles(module: nn.Module, loaders: Iterable[Loader]) -> bool:
    """Have loaders leave float64 as it is for a model that computes in it; return whether it does.

    Call it before anything is read.
    """
    stays = _is_double(module)
    for loader in loaders:
        loader.stay_double = stays
    return stays


def build(
    dataset: DatasetConfig,
    task: Any = None,
    *,
    num_workers: int = 0,
    mixup: float | None = None,
    cutmix: float | None = None,
    overfit_batches: int | None = None,
    **options: Any,
) -> Data:
    """Return the loaders of `dataset` on one worker.

    `options` are those of LoaderOptions that the dataset does not give, of training; `num_workers`
    processes read for this worker. The `task` takes its targets. `mixup` and `cutmix` are of
    training only. With `overfit_batches` each epoch has the first of these batches, as has val.
    Raise DataError for the data, ConfigError for keys that do not fit it.
    """
    given = LoaderOptions(mean=dataset.mean, std=dataset.std, **options)
    source = dataset.open(Opening(task, given.device, num_workers))
    check_image_keys(dataset, source)
    if given.shard.rank == 0:
        dataset.look(source)
    train_idx, val_idx = split_samples(dataset, source)
    if given.shard.rank == 0 and source.train.size:
        overlap.warn_of_shared(dataset, task, source, train_idx, val_idx)
    source = source.fit(train_idx)
    if source.train.size is None:
        refuse_uncounted(dataset, given.epoch_steps, overfit_batches)
    elif given.drop_last:
        check_batch(len(train_idx), given.batch_size, given.batch_parts)
    if given.shard.rank == 0:
        fills = given.batch_size if given.drop_last else 1
        warn_of_samples(dataset, source, train_idx, fills)
    in_order = dataclasses.replace(given, seed=0, drop_last=False, epoch_steps=None)
    in_order = as_evaluated(dataset, in_order)
    to_train = dataclasses.replace(
        given,
        shuffle=dataset.shuffle,
        augment=Augmentation(**dataclasses.asdict(dataset.augment)),
        **drawn_by(dataset, source, train_idx),
        transforms=build_transforms(getattr(dataset, "transforms", None) or ()),
        mixing=mixing_of(source, mixup, cutmix),
    )
    val, test = (part and part.whole(in_order) for part in (source.val, source.test))
    if overfit_batches:
        order = cast(IndexLoader, source.train.load(train_idx, to_train)).order(epoch=1)
        train_idx = val_idx = order[: overfit_batches * given.batch_size]
        to_train, test = dataclasses.replace(to_train, shuffle=False, balanced=None), None
        if given.shard.rank == 0:
            warn(f"overfit_batches: val is the {len(val_idx)} samples that are trained on")
    if len(val_idx):
        val = source.train.load(val_idx, in_order)
    train = source.train.load(train_idx, to_train)
    return Data(
        info=_info(source, train_idx, to_train, train, val, test),
        example=mapped(lambda one: one.to(given.device), source.example),
        train=train,
        val=val,
        test=test,
    )


def drawn_by(dataset: DatasetConfig, source: Source, train: Tensor) -> dict[str, Any]:
    """Return the classes or the lengths of training samples by which their order is drawn."""
    groups = source.lengths is not None and getattr(dataset, "group_by_length", False)
    return {
        "balanced": known_classes(dataset, source)[train] if dataset.sampling else None,
        "lengths": source.lengths[train] if groups else None,  # type: ignore[index]
    }


def with_padding(text: Any, lengths: Tensor, options: LoaderOptions) -> Any:
    """Return the feature of texts, and how much of the first epoch is padding."""
    size, seed = options.batch_size, options.seed
    order = indexing.permutation(len(lengths), seed, epoch=1)
    grouped = indexing.by_length(order, lengths, size, seed, epoch=1)
    shares = tuple(indexing.padding(each, lengths, size) for each in (order, grouped))
    return dataclasses.replace(text, padding=shares, is_grouped=options.lengths is not None)


def majority_of(names: Sequence[str], counts: Sequence[int]) -> tuple[str, float] | tuple[()]:
    """Return the class of most samples and its share, if that alone makes a good accuracy."""
    most = max(counts, default=0)
    share = most / sum(counts) if most else 0.0
    return (names[counts.index(most)], share) if share > UNEVEN + 1 / max(1, len(counts)) else ()


def warn_of_absent(dataset: DatasetConfig, source: Source, train: Tensor) -> None:
    """Warn of classes that no training sample has; if a few are read, of a single class only."""
    targets = source.features.targets
    absent = targets.absent(lambda: source.known_targets(train))
    number = targets.shapes.get("num_classes", 0)
    if targets.has_one_class and number == 1:
        warn(f"{dataset.label}: all samples are of one class; nothing can be learned of it")
    if absent and not (source.sees_few and len(absent) < number - 1):
        warn(
            f"{dataset.label}: no training sample has the class {listed(absent)}, which can't be"
            f" learned; {targets.absent_fix}"
        )


def refuse_uncounted(
    dataset: DatasetConfig, epoch_steps: int | None, overfit_batches: int | None
) -> None:
    """Raise ConfigError for keys that samples without a number can't have, or need."""
    given = {"dataset.train_limit": dataset.train_limit, "dataset.folds": dataset.folds}
    for key, value in {**given, "overfit_batches": overfit_batches}.items():
        if value is not None:
            raise ConfigError(f"{key}={value}: needs a dataset with __len__; use {key}=null")
    if not epoch_steps:
        raise ConfigError(
            f"{dataset.label}: has no __len__ that says where an epoch ends; give epoch_steps, or"
            " max_steps for a run of one epoch"
        )


def check_batch(num_samples: int, batch_size: int, parts: int) -> None:
    """Raise DataError where there is no whole batch, which is to be a multiple of `parts`."""
    if num_samples < batch_size:
        fits = num_samples // parts * parts
        smaller = f"batch_size={fits}, or " if fits else ""
        has = f"the training set has {num_samples} samples, fewer than batch_size={batch_size}"
        raise DataError(f"{has}; use {smaller}drop_last=false")


def mixing_of(source: Source, mixup: float | None, cutmix: float | None) -> Mixing | None:
    """Return the mixing of samples, if there is any. Raise ConfigError if they can't be mixed."""
    inputs = source.example[0]
    for key, value, least in (("mixup", mixup, 1), ("cutmix", cutmix, 3)):
        if value and not (isinstance(inputs, Tensor) and least <= inputs.dim() <= 3):
            effect = "cuts images" if key == "cutmix" else "adds tensors"
            fault = f"{effect}, and a sample's inputs are {described(inputs)}"
            raise ConfigError(f"{key}={value}: {fault}; use {key}=null")
    number = source.features.shapes.get("num_classes", 0)
    return Mixing(number, mixup, cutmix) if mixup or cutmix else None


def as_evaluated(dataset: DatasetConfig, options: LoaderOptions) -> LoaderOptions:
    """Return the options with the transforms of evaluations."""
    key, chosen = "dataset.eval_transforms", getattr(dataset, "eval_transforms", None) or ()
    transforms = build_transforms(chosen, key)
    return dataclasses.replace(options, transforms=transforms, transforms_key=key)


def warn_of_samples(dataset: DatasetConfig, source: Source, train: Tensor, fills: int) -> None:
    """Warn of absent classes and samples; a batch has `fills` samples."""
    there = len(train)
    warn_of_absent(dataset, source, train)
    for note in source.notes:
        warn(f"{dataset.label}: {note}")
    if dataset.train_limit and dataset.train_limit > there:
        fault = f"there are {there} samples to train on, all are used"
        warn(f"dataset.train_limit={dataset.train_limit}: {fault}")
    if (dropped := there % fills) >= NOTICEABLE * there and dropped:
        warn(
            f"drop_last=true: each epoch leaves out {dropped} of {there} training samples, which"
            f" fill no batch of {fills}; use drop_last=false to train on all"
        )


def _info(
    source: Source,
    chosen: Tensor,
    options: LoaderOptions,
    train: Loader,
    val: Loader | None,
    test: Loader | None,
) -> DataInfo:
    features, counts = source.features, list[int]()
    if source.lengths is not None and options.shard.rank == 0:
        inputs = with_padding(features.inputs, source.lengths[chosen], options)
        features = features._replace(inputs=inputs)
    if (classes := source.counted) is not None:
        number = features.shapes["num_classes"]
        counts = classes[chosen].bincount(minlength=number).tolist()
    targets = features.targets.seen(lambda: source.known_targets(chosen))
    return DataInfo(
        features=features._replace(targets=targets),
        train_size=train.size,
        is_uncounted=source.train.size is None,
        val_size=0 if val is None else val.size or None,
        test_size=0 if test is None else test.size or None,
        class_counts=tuple(counts),
        majority=majority_of(targets.names, counts),
    )


def split_samples(dataset: DatasetConfig, source: Source) -> tuple[Tensor, Tensor]:
    """Return the samples to train on, and those held out to validate [N]."""
    size = source.train.size
    if size is None:
        return torch.empty(0), torch.empty(0)
    strata, groups = source.classes, source.groups.get("train")
    if strata is None and (dataset.folds is not None or dataset.train_limit is not None):
        strata = torch.zeros(size)
    limited_by = None if source.in_random_order else strata
    if dataset.folds is None or dataset.fold is None:
        # The samples of a stream may come in another order in each pass.
        fraction = 0.0 if source.val or source.is_stream else dataset.val_fraction
        if getattr(dataset, "val_split", "random") == "last":  # which goes with no groups
            return indexing.split_last(size, fraction, dataset.train_limit)
        if groups is not None and fraction:
            check_groups(dataset, groups, 2)
        return indexing.split(size, fraction, dataset.train_limit, limited_by, groups)
    if source.val or source.is_stream:
        why = "the dataset has a validation split (val) already" if source.val else _NO_FOLDS
        raise ConfigError(f"dataset.folds={dataset.folds}: {why}; use dataset.folds=null")
    if dataset.folds > size:
        raise ConfigError(
            f"dataset.folds={dataset.folds}: there are {size} training samples; use {size} or fewer"
        )
    if groups is not None:
        check_groups(dataset, groups, dataset.folds)
    assert strata is not None
    return indexing.split_fold(
        strata, dataset.folds, dataset.fold, dataset.train_limit, limited_by, groups
    )


def check_groups(dataset: DatasetConfig, groups: Tensor, parts: int) -> None:
    """Raise ConfigError where the training samples are of fewer groups than `parts`."""
    if (number := len(groups.unique())) < parts:
        key, none = f"dataset.folds={dataset.folds}", "null"
        if not dataset.folds:
            key, none = "dataset.val_fraction", "0"
        fix = f"use {number} or fewer" if number > 1 else f"use another group, or {none}"
        raise ConfigError(
            f"{key}: the training samples are of {counted(number, 'group')} by"
            f" dataset.group={getattr(dataset, 'group', '')}; {fix}"
        )


def check_image_keys(dataset: DatasetConfig, source: Source) -> None:
    """Raise ConfigError where a mean, std or augmentation does not fit the samples."""
    augment, problems = dataset.augment, []
    if not source.features.inputs.is_image:
        if dataset.mean or dataset.std or augment.is_set:
            problems = ["dataset.mean, std and augment: are of images; leave them out here"]
    else:
        shapes = source.features.shapes
        channels, (height, width) = shapes["channels"], shapes["image_size"]
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


def known_classes(dataset: DatasetConfig, source: Source) -> Tensor:
    """Return the class of each training sample, int64 [N].

    Raise ConfigError where it shows only once a sample is read.
    """
    if (classes := source.counted) is None:
        fault = "needs the class of each sample before it is read"
        fix = (
            "give the dataset an attribute `targets`, a list of them, or use dataset.sampling=null"
        )
        raise ConfigError(f"dataset.sampling={dataset.sampling}: {fault}; {fix}")
    return classes


@dataclass(frozen=True)
class EvaluationData:
    """The data of an evaluation, on one worker."""

    features: Features
    """Those that it is evaluated with: the run's inputs and classes."""
    loaders: Sequence[Loader]
    numbers: Tensor | None
    """The run's number of each of the dataset's classes, where it counts them otherwise."""

    @property
    def size(self) -> int:
        """Samples over all workers."""
        return sum(loader.size for loader in self.loaders)

    def evaluation(self) -> Iterator[Batch]:
        """Yield this worker's samples, each once over all workers, in their order."""
        for batch in itertools.chain.from_iterable(loader.evaluation() for loader in self.loaders):
            if self.numbers is not None:
                batch = batch._replace(targets=self.numbers[batch.targets])
            yield batch


def load(
    dataset: DatasetConfig,
    task: Any,
    split: Split,
    trained_on: Features,
    options: LoaderOptions,
    *,
    own: bool,
    num_workers: int = 0,
) -> EvaluationData:
    """Return the samples of a split, for the model of a run.

    Its record has the features that it was `trained_on`. `own` samples are those that it was
    trained and evaluated with. Raise ConfigError where the model does not take the samples,
    DataError for the data.
    """
    options = dataclasses.replace(options, mean=dataset.mean, std=dataset.std)
    options = as_evaluated(dataset, options)
    source = dataset.open(Opening(task, options.device, num_workers, trained_on))
    tells = options.shard.rank == 0
    source.features.inputs.fit(trained_on.inputs, dataset.label)
    places, note = source.features.targets.fit(trained_on.targets, dataset.label)
    for each in filter(None, [note, *([] if own else source.notes)] if tells else ()):
        warn(f"{dataset.label}: {each}")
    return EvaluationData(
        features=trained_on,
        loaders=_loaders(dataset, source, split, options, tells=tells and not own),
        numbers=None if places is None else torch.tensor(places, device=options.device),
    )


def _loaders(
    dataset: DatasetConfig, source: Source, split: Split, options: LoaderOptions, *, tells: bool
) -> list[Loader]:
    """Return the split's loaders. Raise ConfigError where the dataset has no such part."""
    if not (source.train.size or source.is_stream or source.val or source.test):
        raise ConfigError(f"split={split}: {dataset.label} has nothing to evaluate; give another")
    if split == "all":
        parts = (source.train, source.val, source.test)
        return [part.whole(options) for part in parts if part and part.size != 0]
    train = source.train if source.train.size is None else None  # a counted one is split below
    if part := {"train": train, "val": source.val, "test": source.test}.get(split):
        return [part.whole(options)]
    chosen = torch.empty(0)
    if split != "test" and source.train.size:
        chosen = split_samples(dataset, source)[0 if split == "train" else 1]
    if len(chosen):
        if split == "val" and tells:
            warn(f"split=val: is held out of the train of {dataset.label}")
        return [source.train.load(chosen, options)]
    sizes = {"train": source.train.size, "val": source.val, "test": source.test}
    there = [name for name, size in sizes.items() if size or (name == "train" and size is None)]
    raise ConfigError(
        f"split={split}: {dataset.label} has none; use split={' or split='.join([*there, 'all'])}"
    )
