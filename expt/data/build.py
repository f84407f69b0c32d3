"""From the dataset's configuration to the loaders of a run or an evaluation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expt.config.constraints import word
from expt.data import indexing
from expt.data.augment import Augmentation
from expt.data.checked_samples import build_transforms
from expt.data.images import look_at_all
from expt.data.kinds import DatasetConfig
from expt.data.loader import Loader
from expt.data.loading import Batch, LoaderOptions, is_double, mapped, of_type
from expt.data.source import (
    About,
    Source,
    are_images,
    as_evaluated,
    check_batch,
    majority_of,
    mixing_of,
    refuse_uncounted,
    warn_of_absent,
)
from expt.errors import ConfigError, did_you_mean, listed, type_name, warn
from expt.runs.request import Split

# deviations from 0, beyond which a variance from sums of squares loses more than four digits
_FAR = 100.0
_NO_FOLDS = "none can be held out of an IterableDataset; give it '+dataset.val={split: val}'"
NOTICEABLE = 0.05
"""The share of the training samples that `drop_last` leaves out without a warning."""


@dataclass(frozen=True, kw_only=True)
class DataInfo(About):
    """The facts about its data that a model needs."""

    train_size: int
    """samples to train on in an epoch, after validation is held out and train_limit applied"""
    val_size: int | None
    """None, as of the test, where they are not counted"""
    test_size: int | None
    is_uncounted: bool = False
    """whether those to train on are not counted"""
    sample: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """the shape and the dtype of one, if it is one tensor"""
    class_counts: tuple[int, ...] = ()
    """samples of each class to train on, if that is known before they are read"""
    majority: tuple[str, float] | tuple[()] = ()
    """the class of most training samples and its share, if that alone makes a good accuracy"""
    target_origin: float | tuple[float, ...] = 0.0
    """what targets that are numbers lie near, where that is far from 0 by their deviation; of a row
    of several each"""

    @property
    def sizes(self) -> dict[str, int | None]:
        """The samples of each part."""
        return {name: getattr(self, name) for name in ("train_size", "val_size", "test_size")}

    @property
    def told(self) -> dict[str, Any]:
        """The `data` of a record; `shapes_told` finds the shapes there again."""
        names = ("majority", "target_origin", "sample", "is_uncounted")
        more = {**_about(self), **{name: getattr(self, name) for name in names}}
        shapes = more.pop("shapes")
        return {**shapes, **self.sizes, **{name: one for name, one in more.items() if one}}


def _about(one: About) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(About)}


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
        """True if its samples are images, each of one class."""
        return are_images(self.info.class_names, self.example)

    def blank(self, size: int) -> Batch:
        """Return a batch of `size` samples, all zeros."""
        inputs, targets = mapped(
            lambda tensor: tensor.expand(size, *tensor.shape).clone(), self.example
        )
        return Batch(inputs, targets, size)

    def of_type(self, module: nn.Module) -> Data:
        """Return the same, with float64 left as it is where the model computes in it."""
        loaders = self.train, self.val, self.test
        if not keep_doubles(module, (each for each in loaders if each is not None)):
            return self
        return dataclasses.replace(self, example=of_type(module, self.example))


def keep_doubles(module: nn.Module, loaders: Iterable[Loader]) -> bool:
    """Have loaders leave float64 as it is for a model that computes in it; return whether it does.

    Call it before anything is read.
    """
    stays = is_double(module)
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
    processes read for this worker. The `task` says what targets are. `mixup` and `cutmix` are of
    training only. With `overfit_batches` each epoch has the first of these batches, which val has,
    too. Raise DataError for the data, ConfigError for keys that do not fit it.
    """
    given = LoaderOptions(mean=dataset.mean, std=dataset.std, **options)
    source = dataset.open(task, given.device, num_workers)
    check_image_keys(dataset, source)
    if given.shard.rank == 0 and dataset.looks_when_opened:
        look_at_all(dataset, source.pictures)
    train_idx, val_idx = split_samples(dataset, source)
    source = source.fitted(train_idx) if source.fitted else source
    if source.train.size is None:
        refuse_uncounted(dataset, given.epoch_steps, overfit_batches)
    elif given.drop_last:
        check_batch(len(train_idx), given.batch_size, given.batch_parts)
    if given.shard.rank == 0:
        fills = given.batch_size if given.drop_last else 1
        warn_of_samples(dataset, source, task, train_idx, fills)
    in_order = dataclasses.replace(given, seed=0, drop_last=False, epoch_steps=None)
    in_order = as_evaluated(dataset, in_order)
    to_train = dataclasses.replace(
        given,
        shuffle=dataset.shuffle,
        augment=Augmentation(**dataclasses.asdict(dataset.augment)),
        balanced=known_classes(dataset, source)[train_idx] if dataset.sampling else None,
        transforms=build_transforms(getattr(dataset, "transforms", None) or ()),
        mixing=mixing_of(source, mixup, cutmix),
    )
    val, test = (part and part.whole(in_order) for part in (source.val, source.test))
    if overfit_batches:
        order = source.train.load(train_idx, to_train).order(epoch=1)
        train_idx = val_idx = order[: overfit_batches * given.batch_size]
        to_train, test = dataclasses.replace(to_train, shuffle=False, balanced=None), None
        if given.shard.rank == 0:
            warn(f"overfit_batches: val is the {len(val_idx)} samples that are trained on")
    if len(val_idx):
        val = source.train.load(val_idx, in_order)
    train = source.train.load(train_idx, to_train)
    return Data(
        info=_info(source, train_idx, task, train=train, val=val, test=test),
        example=mapped(lambda one: torch.zeros_like(one, device=given.device), source.example),
        train=train,
        val=val,
        test=test,
    )


def warn_of_samples(
    dataset: DatasetConfig, source: Source, task: Any, train: Tensor, fills: int
) -> None:
    """Warn of what training samples lack, change or leave out; batches have `fills` of them."""
    there = len(train)
    warn_of_absent(dataset, source, task, train)
    for note in source.notes:
        warn(f"dataset{'._target_' * bool(dataset.custom_class)}={word(dataset)}: {note}")
    if dataset.train_limit and dataset.train_limit > there:
        warn(
            f"dataset.train_limit={dataset.train_limit}: there are {there} samples to train on, all"
            " are used"
        )
    if (dropped := there % fills) >= NOTICEABLE * there and dropped:
        warn(
            f"drop_last=true: each epoch leaves out {dropped} of {there} training samples, which"
            f" fill no batch of {fills}; use drop_last=false to train on all"
        )


def _info(
    source: Source,
    chosen: Tensor,
    task: Any,
    *,
    train: Loader,
    val: Loader | None,
    test: Loader | None,
) -> DataInfo:
    classes, is_of_numbers = source.counted, getattr(task, "TARGETS", None) == "numbers"
    counts: Any = ()
    inputs, sample = source.example[0], dict[str, Any]()
    if isinstance(inputs, Tensor):
        sample = {"shape": [*inputs.shape], "dtype": type_name(inputs)}
    if classes is not None:
        counts = classes[chosen].bincount(minlength=len(source.class_names)).tolist()
    return DataInfo(
        **_about(source),
        train_size=train.size,
        is_uncounted=source.train.size is None,
        val_size=0 if val is None else val.size or None,
        test_size=0 if test is None else test.size or None,
        sample=sample,
        class_counts=tuple(counts),
        majority=majority_of(source.class_names, counts),
        target_origin=_origin(source, chosen) if is_of_numbers else 0.0,
    )


def _origin(source: Source, train: Tensor) -> float | tuple[float, ...]:
    """Return the origin, see DataInfo: equal on all workers, and in a run that resumes."""
    if source.targets_of is None:
        return 0.0
    values, example = source.targets_of(train).double().flatten(), source.example[1]
    number = len(example) if isinstance(example, Tensor) and example.dim() == 1 else 1
    if number > 1 and len(values) % number == 0:
        return tuple(map(_near, values.view(-1, number).T))
    return _near(values)


def _near(values: Tensor) -> float:
    mean = float(values.mean())
    return mean if abs(mean) > _FAR * float(values.std(correction=0)) else 0.0


def split_samples(dataset: DatasetConfig, source: Source) -> tuple[Tensor, Tensor]:
    """Return the samples to train on, and those held out to validate [N]."""
    size = source.train.size
    if size is None:
        return torch.empty(0), torch.empty(0)
    counts = dataset.folds is not None or dataset.train_limit is not None
    strata = torch.zeros(size * counts) if source.classes is None else source.classes
    limited_by = None if source.in_random_order else strata
    if dataset.folds is None or dataset.fold is None:
        # Its places say nothing of a stream's samples, which may be shuffled anew in each pass.
        fraction = 0.0 if source.val or source.is_stream else dataset.val_fraction
        how = getattr(dataset, "val_split", "random")
        return indexing.split(size, fraction, dataset.train_limit, limited_by, how=how)
    if source.val or source.is_stream:
        why = "the dataset has a validation split (val) already" if source.val else _NO_FOLDS
        raise ConfigError(f"dataset.folds={dataset.folds}: {why}; use dataset.folds=null")
    if dataset.folds > size:
        raise ConfigError(
            f"dataset.folds={dataset.folds}: there are {size} training samples; use {size} or fewer"
        )
    return indexing.split_fold(strata, dataset.folds, dataset.fold, dataset.train_limit, limited_by)


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


def known_classes(dataset: DatasetConfig, source: Source) -> Tensor:
    """Return the class of each training sample, int64 [N].

    Raise ConfigError where it shows only once a sample is read.
    """
    if (classes := source.counted) is None:
        raise ConfigError(
            f"dataset.sampling={dataset.sampling}: needs the class of each sample before it is"
            " read; give the dataset an attribute `targets`, a list of them, or use"
            " dataset.sampling=null"
        )
    return classes


@dataclass(frozen=True)
class EvaluationData:
    """The data of an evaluation, on one worker."""

    class_names: tuple[str, ...]
    """The run's."""
    are_images: bool
    """True if its samples are images, each of one class."""
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
    trained_on: Mapping[str, Any],
    options: LoaderOptions,
    *,
    own: bool,
    num_workers: int = 0,
) -> EvaluationData:
    """Return the samples of a split, for the model of a run.

    Its record says `trained_on` of its data. `own` samples are those that it was trained and
    evaluated with. Raise ConfigError where the model does not take the samples, DataError for the
    data.
    """
    options = dataclasses.replace(options, mean=dataset.mean, std=dataset.std)
    options = as_evaluated(dataset, options)
    source = dataset.open(task, options.device, num_workers, trained_on)
    tells = options.shard.rank == 0
    if not own:
        _refuse_other_shapes(dataset, source, trained_on)
        for note in source.notes if tells and dataset.has_rows else ():
            warn(f"{dataset.label}: {note}")
    names = tuple(trained_on.get("class_names", ()))
    numbers = _numbers(dataset, source.class_names, names, trained_on, tells=tells)
    return EvaluationData(
        class_names=names or source.class_names,
        are_images=are_images(source.class_names, source.example),
        loaders=_loaders(dataset, source, split, options, tells=tells and not own),
        numbers=None if numbers is None else numbers.to(options.device),
    )


def _loaders(
    dataset: DatasetConfig, source: Source, split: Split, options: LoaderOptions, *, tells: bool
) -> list[Loader]:
    """Return the split's loaders. Raise ConfigError where the dataset has no such part."""
    if split == "all":
        parts = (source.train, source.val, source.test)
        return [part.whole(options) for part in parts if part and part.size != 0]
    if split == "test" and source.test:
        return [source.test.whole(options)]
    if split == "val" and source.val:
        return [source.val.whole(options)]
    if split == "train" and source.train.size is None:
        return [source.train.whole(options)]
    chosen = torch.empty(0)
    if split != "test" and source.train.size:
        train, val = split_samples(dataset, source)
        chosen = train if split == "train" else val
    if len(chosen):
        if split == "val" and tells:
            warn(f"split=val: is held out of the train of {dataset.label}")
        return [source.train.load(chosen, options)]
    sizes = {"train": source.train.size, "val": source.val, "test": source.test}
    there = [name for name, size in sizes.items() if size or (name == "train" and size is None)]
    raise ConfigError(
        f"split={split}: {dataset.label} has none; use split={' or split='.join([*there, 'all'])}"
    )


def _refuse_other_shapes(
    dataset: DatasetConfig, source: Source, trained_on: Mapping[str, Any]
) -> None:
    """Raise ConfigError for samples that the model was not built for.

    Classes have names, see `_numbers`.
    """
    keys = ["channels", "image_size", "vocab_size", "context"]
    if dataset.passes_as_is:  # the first sample's, and others may be larger
        keys.remove("image_size")
    keys += [] if source.class_names else ["num_classes"]
    for key in keys:
        has, wanted = (_shown(key, shapes.get(key)) for shapes in (source.shapes, trained_on))
        if has != wanted:
            raise ConfigError(
                f"{dataset.label}: has {has}, and the model takes {wanted}; use data like the run's"
            )


def _shown(key: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " x ".join(map(str, value))
    return f"no {key}" if value is None else f"{key} {value}"


def _numbers(
    dataset: DatasetConfig,
    names: Sequence[str],
    known: Sequence[str],
    trained_on: Mapping[str, Any],
    *,
    tells: bool,
) -> Tensor | None:
    """Return the run's number of each class, by its name; None where all are equal.

    Raise ConfigError for an unknown one.
    """
    if tuple(names) == tuple(known) or not (names or known):
        return None
    has, has_known = len(names), len(known) or trained_on.get("num_classes")
    if not known or _are_taken_by_number(dataset, names, known):
        if has != has_known:
            raise ConfigError(
                f"{dataset.label}: has {has} classes, and the run's model {has_known}; use"
                " data of its classes"
            )
        if tells:
            warn(
                f"{dataset.label}: its classes have other names than the run's, and are"
                " taken by their numbers"
            )
        return None
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"{dataset.label}: has the class {listed(unknown, 1)}, which the run does not"
            f" know; it has {listed(known)}."
            f"{did_you_mean(unknown[0], known)}"
        )
    if tells and (missing := [name for name in known if name not in names]):
        warn(f"{dataset.label}: lacks the run's classes {listed(missing)}")
    return torch.tensor([list(known).index(name) for name in names])


def _are_taken_by_number(
    dataset: DatasetConfig, names: Sequence[str], known: Sequence[str]
) -> bool:
    """Return whether names are missing on one side; a folder called 1 has a name."""
    if all(name.isdigit() for name in (*names, *known)):
        return _are_numbers(names) and not dataset.names_classes
    return _are_numbers(names) or _are_numbers(known)


def _are_numbers(names: Sequence[str]) -> bool:
    """Return whether they are what classes without names are called."""
    return [*names] == [str(number) for number in range(len(names))]
