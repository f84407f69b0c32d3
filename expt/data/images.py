"""Images, from memory or read one by one: each of one class, or with numbers to predict."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.cache import SAMPLED, Checksums, Rows
from expt.data.checked_samples import Transformed, checked_image, to_tensor
from expt.data.image_files import (
    MODES,
    fit,
    look,
    look_at,
    open_picture,
    refuse_damaged,
    report_found,
)
from expt.data.kinds import DatasetConfig
from expt.data.loader import Held, Loader, loading
from expt.data.loading import LoaderOptions
from expt.data.memory import InMemory, eval_batch_size
from expt.data.samples import size_of
from expt.data.seeding import preserved_generators
from expt.data.source import NOTHING, Part, Source
from expt.errors import DataError, warn
from expt.features import Feature, Features, Image
from expt.machine import usable_cpus

Shape = tuple[int, int, int]
"""Channels, height, width."""
Scales = Mapping[str, Sequence[float]]
"""The mean and deviation of each target, by its name; targets are given in these units."""


LABEL = torch.zeros((), dtype=torch.int64)


def of_parts(
    shape: Shape, targets: Feature, parts: Mapping[str, Part], target: Tensor = LABEL, **more: Any
) -> Source:
    """Return a source of images of one shape, with `targets` that are like `target`."""
    features = Features(Image(channels=shape[0], image_size=shape[1:]), targets)
    more |= {"train": NOTHING, **parts}
    return Source(features=features, example=(torch.zeros(shape), target), **more)


def of_arrays(
    train: Sequence[Any],
    test: Sequence[Any],
    features: Features,
    device: torch.device,
    num_workers: int,
) -> Source:
    """Return a source of (images uint8 [N, C, H, W], labels) in random order."""
    images, labels = map(_tensor, train)
    shape = images.shape[1], images.shape[2], images.shape[3]
    sets = {"train": InMemory(images, labels, device), "test": in_memory(test, device)}
    parts = {part: image_part(x, shape, num_workers, features.targets) for part, x in sets.items()}
    return of_parts(shape, features.targets, parts, classes=labels, in_random_order=True)


def in_memory(arrays: Sequence[Any], device: torch.device) -> InMemory:
    """Return (images, labels), placed here."""
    images, labels = map(_tensor, arrays)
    return InMemory(images, labels, device)


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def image_part(
    images: Dataset[Any],
    shape: Shape,
    num_workers: int,
    classes: Feature | None = None,
    *,
    originals: Dataset[Any] | None = None,
    eval_as_training: bool = False,
) -> Part:
    """Return a part of images, each of a class if there are `classes`.

    Transforms get the `originals`, which may be of any size. With `eval_as_training` an evaluation
    takes no more of them at a time than a step.
    """
    how: Any = {}
    if classes is not None:
        check = functools.partial(checked_image, shape=shape, classes=classes)
        how = {"check": check, "collate": stacked}

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        chosen = images
        if options.transforms:
            of = originals or images
            chosen = Transformed(of, options.transforms, shape, options.transforms_key)
            with preserved_generators():
                for told in chosen.unseeded() if options.shard.rank == 0 else []:
                    warn(told)
        if eval_as_training:
            share = max(1, options.batch_size // options.shard.world_size)
            options = replace(options, eval_batch_size=options.eval_batch_size or share)
        return loading(chosen, num_workers, channels=shape[0], **how)(indices, options)

    return Part(size_of(images), load)


def stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return images [b, C, H, W] and their labels [b]."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)


@dataclass(frozen=True)
class Unchanged:
    """A folder's files: pairs of a picture and its label, or mask.

    Raise DataError for a file that has changed, for the run's record names what it was.
    """

    pairs: Sequence[tuple[Any, ...]]
    sums: Checksums

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        pair = self.pairs[index]
        for file in pair:
            if isinstance(file, str):
                self.sums.refuse_changed(file)
        return pair


@dataclass(frozen=True, eq=False)
class Pictures(Dataset[tuple[Tensor, Any]]):
    """Pictures as uint8 [C, H, W], and what `target` makes of their targets.

    `pairs` holds them, opened, as paths or as streams. With a `size` each is fitted to it; without
    one all must have `one_size`, where that is set. Raise DataError, when it is read, for a picture
    that is damaged, or of another size.
    """

    pairs: Any
    channels: int
    size: tuple[int, int] | None
    target: Callable[[Any], Any] = int
    one_size: tuple[int, int] | None = None
    needed: tuple[int, int] | None = None
    """the height and width to decode at the least; see open_picture"""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        picture, target = self.opened(index)
        if self.size is not None:
            picture = fit(picture, self.size)
        else:
            self.check_size(index, picture)
        try:
            return to_tensor(picture).contiguous(), self.target(target)
        except (TypeError, ValueError) as error:
            raise DataError(f"sample {index}: its target is {target!r} ({error})") from error

    def opened(self, index: int) -> tuple[Any, Any]:
        """Return a picture of Pillow's, and what its target is made of."""
        name = f"sample {index}"
        with refuse_damaged(name):
            source, target = self.pairs[index]
        return open_picture(source, MODES[self.channels], name, self.needed), target

    def look(self, index: int, name: str) -> Any:
        """Return a picture for `look_at`. Raise DataError by its `name` where one is wrong."""
        with refuse_damaged(name):
            source, _ = self.pairs[index]
        return look(source, MODES[self.channels], name=name)

    def check_size(self, index: int, picture: Any) -> None:
        """Raise DataError for a picture of another height and width than the first's."""
        size = picture.height, picture.width
        if self.one_size not in (None, size):
            one, other = (f"{height}x{width}" for height, width in (size, self.one_size or size))
            raise DataError(
                f"dataset.image_size=null: image {index} is {one}, and the first {other}; give one"
                " size, e.g. 'dataset.image_size=[224,224]'"
            )

    def as_is(self) -> Pictures:
        """Return the same pictures, neither scaled nor all of one size."""
        return replace(self, size=None, one_size=None, needed=None)


def look_at_all(dataset: DatasetConfig, pictures: Mapping[str, Pictures]) -> None:
    """Look at the pictures of each part, of very many at some, once for a content.

    Raise DataError for all that is wrong.
    """
    if not pictures:
        return
    samples = [
        (f"{part} {index}",) for part, each in pictures.items() for index in _some(len(each))
    ]
    chosen = [getattr(dataset, key, None) for key in ("input", "target", "set", "options")]
    first = next(iter(pictures.values()))
    how = f"{chosen} {first.channels} {getattr(first, 'values', None)}"

    def look_at_one(name: str) -> Any:
        part, index = name.split()
        return pictures[part].look(int(index), f"{part}: sample {index}")

    with Checksums(f"pictures-{dataset.fingerprint()}") as sums:
        found = look_at(sums, how, samples, look_at_one, usable_cpus(), fitted=first.size, key=str)
    report_found(dataset.label, found)


def _some(number: int) -> Sequence[int]:
    """Return the places of the samples of a part that are looked at: SAMPLED at most."""
    places = range(number)
    return places if number <= SAMPLED else random.Random(number).sample(places, SAMPLED)


@dataclass(frozen=True, eq=False)
class Kept(Held):
    """Pictures that are decoded once: taken from the cache, or put there by who reads them."""

    pictures: Pictures
    labels: Sequence[int]
    rows: Rows
    device: torch.device

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.rows.has(index):
            return torch.from_numpy(self.rows.images[index].copy()), self.labels[index]
        image, label = self.pictures[index]
        _ = self.pictures.pairs[index]  # refused if it has changed while it was read
        self.rows.put(index, image.numpy())
        return image, label

    def held(self, indices: Tensor, options: LoaderOptions) -> Held | None:
        """See Held: they are in memory once the cache has all, where a batch may still lack."""
        if self.rows.are_whole:
            return self._whole
        missing = [index for index in indices.tolist() if not self.rows.has(index)]
        for index in missing if len(missing) <= options.batch_size else ():  # an epoch drops less
            self[index]
        return self._placed() if all(map(self.rows.has, missing)) else None

    @functools.cached_property
    def _whole(self) -> InMemory:
        return self._placed()  # one for all loaders

    def _placed(self) -> InMemory:
        """Return all images on the device, as they are now."""
        labels = torch.tensor(self.labels)
        return InMemory(torch.from_numpy(self.rows.images), labels, self.device)

    def evaluated_at_once(self, options: LoaderOptions) -> int | None:
        """See Held."""
        return eval_batch_size(options)


Sets = TypeVar("Sets", bound=Pictures)


def of_one_shape(sets: Mapping[str, Sets]) -> tuple[Shape, dict[str, Sets]]:
    """Return the shape of all images, and what refuses those of another."""
    first = next(iter(sets.values()))
    height, width = first.size or first.opened(0)[0].size[::-1]
    shape = first.channels, height, width
    return shape, {part: replace(each, one_size=shape[1:]) for part, each in sets.items()}


def pictures_of(pairs: Mapping[str, Any], dataset: Any) -> dict[str, Pictures]:
    """Return the pictures of each part, grey ones if the first is and nothing else is said."""
    channels = dataset.channels
    if channels is None:
        first = open_picture(next(iter(pairs.values()))[0][0], name="sample 0")
        channels = 1 if first.mode in ("1", "L") else 3
    how: Any = {"channels": channels, "size": dataset.image_size, "needed": dataset.needed}
    return {part: Pictures(each, **how) for part, each in pairs.items()}


def of_pictures(
    sets: Mapping[str, Pictures],
    classes: Feature,
    labels: Tensor | None,
    num_workers: int,
    memory: Mapping[str, Held] | None = None,
) -> Source:
    """Return the parts `train`, `val` and `test` that there are; `labels` are those of train.

    Without transforms what is in `memory` is taken from there.
    """
    shape, sets = of_one_shape(sets)
    how: Any = (shape, num_workers, classes)
    parts = {
        part: image_part((memory or {}).get(part, each), *how, originals=each.as_is())
        for part, each in sets.items()
    }
    read = {part: each for part, each in sets.items() if part not in (memory or {})}
    return of_parts(shape, classes, parts, classes=labels, pictures=read)


def row(target: Any) -> Tensor:
    """Return numbers as float32 [T]."""
    return torch.as_tensor(target).float().reshape(-1)


def of_numbers(
    sets: Mapping[str, Pictures],
    takes: type[Feature],
    targets: Tensor,
    names: Sequence[str],
    num_workers: int,
    *,
    scales: Scales | None = None,
    standardises: bool = False,
) -> Source:
    """Return parts of pictures with numbers to predict, or labels of 0 and 1, as a task `takes`.

    `targets` float32 [N, T] are those of train. They are in units of `scales`; or, where the source
    `standardises`, of what the training samples give, once these are chosen.
    """
    shape, sets = of_one_shape(sets)

    def found(by: Mapping[str, Any], **more: Any) -> Source:
        scale = _scaling(by, names)
        parts = dict[str, Part]()
        for part, each in sets.items():
            scaled = replace(each, target=lambda target: scale(row(target)))
            parts[part] = image_part(scaled, shape, num_workers, originals=scaled.as_is())
        feature, values = takes.of_columns(names, by), scale(targets)
        more |= {"targets_of": values.__getitem__, "pictures": sets}
        return of_parts(shape, feature, parts, torch.zeros(targets.shape[1]), **more)

    def fitted(chosen: Tensor) -> Source:
        values = targets[chosen].double()
        mean, std = values.mean(0), values.std(0, correction=0)
        # else all are alike
        std = torch.where(std > 1e-12 * values.abs().amax(0), std, torch.ones_like(std))
        by = dict(zip(names, zip(mean.tolist(), std.tolist(), strict=True), strict=True))
        return found(by)

    if scales is not None:
        return found(scales)
    return found({}, fitted=fitted) if standardises else found({})


def _scaling(by: Scales, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
    if not by:
        return lambda target: target
    known = [tuple(by.get(name, (0.0, 1.0))) for name in names]
    mean, std = torch.tensor(known, dtype=torch.float64).T
    return lambda target: ((target.double() - mean) / std).float()
