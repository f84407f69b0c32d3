"""Samples for a run's weights, by its normalisation and classes: its own, or another dataset's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expt.data import build
from expt.data.iterable import refuse_shuffled
from expt.data.kind import DatasetConfig
from expt.data.loading import Batch, Loader, LoaderOptions
from expt.data.source import Source, are_images
from expt.errors import ConfigError, did_you_mean, warn
from expt.runs.request import Split


@dataclass(frozen=True)
class EvaluationData:
    """What is measured, on one worker."""

    class_names: tuple[str, ...]
    """The run's."""
    are_images: bool
    """Whether its samples are images, each of one class."""
    loaders: Sequence[Loader]
    numbers: Tensor | None
    """The run's number of each of the dataset's classes, where it counts them otherwise."""

    @property
    def size(self) -> int:
        """Samples over all workers."""
        return sum(loader.size for loader in self.loaders)

    def batches(self) -> Iterator[Batch]:
        """Yield this worker's samples, each once over all workers, in their order."""
        for batch in itertools.chain.from_iterable(loader.evaluation() for loader in self.loaders):
            yield (
                batch
                if self.numbers is None
                else batch._replace(targets=self.numbers[batch.targets])
            )


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

    Its record says `trained_on` of its data, and the mean and std of `options` are the run's. `own`
    samples are those that it was trained and evaluated with. Raise ConfigError where the model does
    not take the samples, DataError for the data.
    """
    source = dataset.open(task, options.device, num_workers, trained_on)
    tells = options.shard.rank == 0
    if not own:
        _refuse_other_shapes(dataset, source, trained_on)
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
        return [part.whole(options) for part in parts if part and part.size]
    if split == "test" and source.test:
        return [source.test.whole(options)]
    if split == "val" and source.val:
        return [source.val.whole(options)]
    chosen = torch.empty(0)
    if split != "test" and source.train.size:
        train, val = build.split(dataset, source)
        chosen = train if split == "train" else val
    if len(chosen):
        if split == "val" and tells:
            warn(f"split=val: is held out of the train of dataset={dataset.name}")
        loader = source.train.load(chosen, options)
        if split == "val" and options.shard.rank == 0:
            refuse_shuffled(dataset, loader, seed=0)
        return [loader]
    sizes = {"train": source.train.size, "val": source.val, "test": source.test}
    there = [name for name, size in sizes.items() if size]
    raise ConfigError(
        f"split={split}: dataset={dataset.name} has none; use"
        f" split={' or split='.join([*there, 'all'])}"
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
                f"dataset={dataset.name}: has {has}, and the model takes {wanted}; use data like"
                " the run's"
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
                f"dataset={dataset.name}: has {has} classes, and the run's model {has_known}; use"
                " data of its classes"
            )
        if tells:
            warn(
                f"dataset={dataset.name}: its classes have other names than the run's, and are"
                " taken by their numbers"
            )
        return None
    if unknown := [name for name in names if name not in known]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ConfigError(
            f"dataset={dataset.name}: has the class {unknown[0]}{more}, which the run does not"
            " know; it has "
            f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}."
            f"{did_you_mean(unknown[0], known)}"
        )
    if tells and (missing := [name for name in known if name not in names]):
        warn(f"dataset={dataset.name}: has none of the run's classes {', '.join(missing[:8])}")
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
