"""Images, from memory or read one by one: each of one class, with numbers to predict, or a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.cache import CachedImages
from expt.data.checked_samples import Transformed, checked_image, to_tensor
from expt.data.checksums import Checksums, sampled
from expt.data.image_files import (
    MODES,
    fit,
    look,
    look_at,
    look_at_pair,
    mask_of,
    numbers_of_mask,
    open_picture,
    refuse_damaged,
    report_found,
    stretch,
)
from expt.data.kinds import DatasetConfig, Opening
from expt.data.loader import Held, Loader, loading
from expt.data.loading import LoaderOptions
from expt.data.memory import Encoder, InMemory, eval_batch_size
from expt.data.samples import size_of
from expt.data.seeding import preserved_generators
from expt.data.source import NOTHING, Part, Source
from expt.errors import DataError, warn
from expt.features import Feature, Features, Image, Mask
from expt.machine import usable_cpus

Shape = tuple[int, int, int]
"""Channels, height, width."""
Scales = Mapping[str, tuple[float, float]]
"""The mean and deviation of each target, by its name; targets are given in these units."""


def of_parts(
    shape: Shape,
    targets: Feature,
    parts: Mapping[str, Part],
    target: Tensor | None = None,
    **more: Any,
) -> Source:
    """Return a source of images of one shape, with `targets`: numbers like `target`, or classes."""
    features = Features(Image(channels=shape[0], image_size=shape[1:]), targets)
    if target is None:
        target = torch.zeros(shape[1:] if targets.each == "pixel" else (), dtype=torch.int64)
    more |= {"train": NOTHING, **parts}
    example = torch.zeros(shape), torch.zeros_like(target)
    return Source(features=features, example=example, **more)


def of_arrays(
    train: Sequence[Any], test: Sequence[Any], features: Features, opening: Opening
) -> Source:
    """Return a source of (images uint8 [N, C, H, W], labels) in random order."""
    parts, shape = dict[str, Part](), tuple(train[0].shape[1:])
    for part, arrays in (("test", test), ("train", train)):
        images, labels = map(_tensor, arrays)
        held = InMemory(images, labels, opening.device)
        parts[part] = image_part(held, shape, opening.num_workers, features.targets)
    classes = _tensor(train[1])
    return of_parts(shape, features.targets, parts, classes=classes, in_random_order=True)


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def image_part(
    images: Dataset[Any],
    shape: Shape,
    num_workers: int,
    targets: Feature,
    originals: Dataset[Any] | None = None,
) -> Part:
    """Return a part of images; transforms get the `originals`, which may be of any size."""
    how: Any = {}
    if targets.has_one_class:
        check = functools.partial(checked_image, shape=shape, classes=targets)
        how = {"check": check, "collate": stacked}

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        chosen = images
        if options.transforms:
            of = originals or images
            chosen = Transformed(of, options.transforms, shape, options.transforms_key)
            if options.shard.rank == 0:
                with preserved_generators():
                    for problem in chosen.unseeded():
                        warn(problem)
        if targets.each == "pixel":  # logits of many classes are as large as an image
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

    Raise DataError for a file that has changed: the run's record names its content.
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
    """Pictures as uint8 [C, H, W], and their targets by `target`.

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
    resize: Callable[[Any, tuple[int, int]], Any] = fit
    """makes a picture of the `size`"""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        picture, target = self.opened(index)
        self.check_size(index, picture)
        try:
            return self.pixels(picture), self.target(target)
        except (TypeError, ValueError) as error:
            raise DataError(f"sample {index}: its target is {target!r} ({error})") from error

    def opened(self, index: int) -> tuple[Any, Any]:
        """Return a picture of Pillow's, and the source of its target."""
        name = f"sample {index}"
        with refuse_damaged(name):
            source, target = self.pairs[index]
        return open_picture(source, MODES[self.channels], name, self.needed), target

    def pixels(self, picture: Any) -> Tensor:
        """Return a picture as uint8 [C, H, W], of the `size` if there is one."""
        if self.size not in (None, picture.size[::-1]):
            picture = self.resize(picture, self.size)
        return to_tensor(picture).contiguous()

    def look(self, index: int, name: str) -> Any:
        """Return a picture for `look_at`. Raise DataError by its `name` where one is wrong."""
        with refuse_damaged(name):
            source, _ = self.pairs[index]
        return look(source, MODES[self.channels], name=name)

    def check_size(self, index: int, picture: Any) -> None:
        """Raise DataError for a picture of another height and width than the first's."""
        size = picture.height, picture.width
        first = self.one_size
        if self.size is None and first not in (None, size):
            raise DataError(
                f"dataset.image_size=null: image {index} is {size[0]}x{size[1]}, and the first"
                f" {first[0]}x{first[1]}; give one size, e.g. 'dataset.image_size=[224,224]'"
            )


def look_at_all(dataset: DatasetConfig, pictures: Mapping[str, Pictures]) -> None:
    """Look at the pictures of each part, of very many at some, once for a content.

    Raise DataError for all that is wrong.
    """
    if not pictures:
        return
    parts = ([f"{part} {index}" for index in range(len(each))] for part, each in pictures.items())
    samples = [(name,) for names in parts for name in sampled(names)]
    chosen = [getattr(dataset, key, None) for key in ("input", "target", "set", "options")]
    first = next(iter(pictures.values()))
    how = f"{chosen} {first.channels} {getattr(first, 'values', None)}"

    def look_at_one(name: str) -> Any:
        part, index = name.split()
        return pictures[part].look(int(index), f"{part}: sample {index}")

    with Checksums(f"pictures-{dataset.fingerprint()}") as sums:
        found = look_at(sums, how, samples, look_at_one, usable_cpus(), fitted=first.size, key=str)
    report_found(dataset.label, found)


@dataclass(frozen=True, eq=False)
class Kept(Held):
    """Pictures that are decoded once: taken from the cache, or put there by who reads them."""

    pictures: Pictures
    labels: Any
    """the class of each, or numbers [N, T]"""
    cached: CachedImages
    device: torch.device

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.cached.has(index):
            return torch.from_numpy(self.cached.images[index].copy()), self.labels[index]
        image, label = self.pictures[index]
        _ = self.pictures.pairs[index]  # refused if it has changed while it was read
        self.cached.put(index, image.numpy())
        return image, label

    def held(self, indices: Tensor, options: LoaderOptions) -> Held | None:
        """See Held: they are in memory once the cache has all, where a batch may still lack."""
        if self.cached.are_whole:
            return self._whole
        missing = [index for index in indices.tolist() if not self.cached.has(index)]
        if len(missing) <= options.batch_size:  # an epoch drops less
            for index in missing:
                self[index]
        return self._placed() if all(map(self.cached.has, missing)) else None

    @functools.cached_property
    def _whole(self) -> InMemory:
        return self._placed()  # one for all loaders

    def _placed(self) -> InMemory:
        """Return all images on the device, as they are now."""
        labels = torch.as_tensor(self.labels)
        return InMemory(torch.from_numpy(self.cached.images), labels, self.device)

    def evaluated_at_once(self, options: LoaderOptions) -> int | None:
        """See Held."""
        return eval_batch_size(options)


def pictures_of(
    pairs: Mapping[str, Any], dataset: Any, kind: type[Pictures] = Pictures, **more: Any
) -> dict[str, Any]:
    """Return the pictures of each part, grey ones if the first is and nothing else is said."""
    channels = dataset.channels
    if channels is None:
        first = open_picture(next(iter(pairs.values()))[0][0], name="sample 0")
        channels = 1 if first.mode in ("1", "L") else 3
    how: Any = {"channels": channels, "size": dataset.image_size, "needed": dataset.needed}
    return {part: kind(each, **how, **more) for part, each in pairs.items()}


def of_sets(
    sets: Mapping[str, Pictures],
    targets: Feature,
    num_workers: int,
    memory: Mapping[str, Held] | None = None,
    **more: Any,
) -> Source:
    """Return the parts `train`, `val` and `test` that there are, each with such `targets`.

    Without transforms parts in `memory` are taken from there.
    """
    first, parts = next(iter(sets.values())), dict[str, Part]()
    held = memory or {}
    height, width = first.size or first.opened(0)[0].size[::-1]
    shape = first.channels, height, width
    for part, each in sets.items():
        images = held.get(part, replace(each, one_size=shape[1:]))
        originals = replace(each, size=None, one_size=None, needed=None)
        parts[part] = image_part(images, shape, num_workers, targets, originals)
    more["pictures"] = {part: each for part, each in sets.items() if part not in held}
    return of_parts(shape, targets, parts, **more)


def of_numbers(
    sets: Mapping[str, Pictures],
    takes: type[Feature],
    targets: Tensor,
    names: Sequence[str],
    num_workers: int,
    *,
    memory: Mapping[str, Kept] | None = None,
    scales: Scales | None = None,
    standardises: bool = False,
    **also: Any,
) -> Source:
    """Return parts of pictures with numbers to predict, or labels of 0 and 1, as a task `takes`.

    `targets` float32 [N, T] are those of train. They are in units of `scales`; or, where the source
    `standardises`, in deviations of the training samples, once these are chosen.
    """

    def in_units(by: Mapping[str, Any], **more: Any) -> Source:
        scale = Encoder(names, {}, by)
        values = scale(targets).float()

        def scaled(target: Any) -> Tensor:
            return scale(torch.as_tensor(target).float().reshape(1, -1))[0].float()

        pictures = {part: replace(each, target=scaled) for part, each in sets.items()}
        held = {
            part: replace(
                each, pictures=pictures[part], labels=scale(torch.tensor(each.labels)).float()
            )
            for part, each in (memory or {}).items()
        }
        more |= {"targets_of": values.__getitem__, "target": torch.zeros_like(values[0]), **also}
        return of_sets(pictures, takes.of_columns(names, by), num_workers, held, **more)

    def fitted(chosen: Tensor) -> Source:
        values = targets[chosen].double()
        mean, std = values.mean(0), values.std(0, correction=0)
        # else all are equal
        std = torch.where(std > 1e-12 * values.abs().amax(0), std, torch.ones_like(std))
        by = dict(zip(names, zip(mean.tolist(), std.tolist(), strict=True), strict=True))
        return in_units(by)

    if scales is not None:
        return in_units(scales)
    return in_units({}, fitted=fitted) if standardises else in_units({})


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPictures(Pictures):
    """Pictures as uint8 [C, H, W], and their masks int64 [H, W], both resized to `size`.

    Raise DataError, when it is read, also for a mask of another size than its picture, or one with
    other values.
    """

    values: Mask
    resize: Callable[[Any, tuple[int, int]], Any] = stretch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, source = self.opened(index)
        name = source if isinstance(source, str) else f"sample {index}: its mask"
        mask = self._numbers(source, name, image)
        self.values.check_values(mask, name)
        self.check_size(index, image)
        return self.pixels(image), _resized(mask, self.size or mask.shape)

    def look(self, index: int, name: str) -> Any:
        """See Pictures; of the mask, too."""
        with refuse_damaged(name):
            source, mask = self.pairs[index]
        return look_at_pair(source, mask, MODES[self.channels], self.values, name)

    def _numbers(self, source: Any, name: str, image: Any = None) -> np.ndarray:
        mask = open_picture(source, name=name)
        return numbers_of_mask(mask, image or mask, name)

    def occurring(self, indices: Tensor) -> Tensor:
        """Return the numbers in masks, of at most 512 that lie evenly, until all classes occur."""
        found, wanted = set[int](), {*range(self.values.num_classes)}
        places = torch.linspace(0, len(indices) - 1, min(len(indices), 512)).long()
        for index in indices[places].tolist():
            if wanted <= found:
                break
            found |= {*np.unique(self._numbers(self.pairs[index][1], f"sample {index}")).tolist()}
        return torch.tensor(sorted(found))


def _resized(mask: np.ndarray, image_size: tuple[int, int]) -> Tensor:
    """Return a mask of a height and width.

    As Pillow's nearest, whose modes do not hold all numbers: a pixel is that in whose middle the
    new one's lies.
    """
    if mask.shape != image_size:
        rows, columns = (
            ((np.arange(new) + 0.5) * old / new).astype(int)
            for new, old in zip(image_size, mask.shape, strict=True)
        )
        mask = np.ascontiguousarray(mask[rows][:, columns])
    return torch.from_numpy(mask)


def of_masks(pairs: Mapping[str, Any], dataset: Any, opening: Opening) -> Source:
    """Return the parts of pictures and masks."""
    values = mask_of(dataset, opening.task)
    sets = pictures_of(pairs, dataset, MaskPictures, values=values)
    more: dict[str, Any] = {"targets_of": sets["train"].occurring} if "train" in sets else {}
    return of_sets(sets, values, opening.num_workers, **more)
