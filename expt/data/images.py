"""Pictures and masks as datasets, and sources of images with classes, numbers or masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.cache import CachedImages
from expt.data.checked_samples import Transformed, as_it_is, checked_image, to_tensor
from expt.data.checksums import Checksums
from expt.data.kinds import OfPictures, Opening
from expt.data.loader import Loader, loading
from expt.data.loading import Held, LoaderOptions
from expt.data.memory import InMemory, eval_batch_size
from expt.data.pictures import (
    MODES,
    Picture,
    fit,
    look,
    look_at_pair,
    numbers_of_mask,
    open_picture,
    refuse_damaged,
    stretch,
)
from expt.data.rows import Chosen
from expt.data.samples import size_of
from expt.data.source import NOTHING, Part, Source
from expt.data.table_source import Encoder, Scale, scales_of
from expt.errors import DataError, warn
from expt.features import Classes, Feature, Features, Image, Mask

Shape: TypeAlias = tuple[int, int, int]
"""Channels, height, width."""


@dataclass(frozen=True, eq=False)
class Pictures(Dataset[tuple[Tensor, Any]]):
    """Pictures as uint8 [C, H, W], and their targets.

    Raise DataError, when it is read, for a picture that is damaged, or of another size.
    """

    pairs: Any
    """pairs of a picture, opened, as a path or as a stream, and its target"""
    channels: int
    size: tuple[int, int] | None
    """the height and width that each is fitted to; None: as it is"""
    targets: Tensor | None = None
    """classes [N], or numbers [N, T] in the units of a task, in place of those in `pairs`"""
    cached: CachedImages | None = None
    """the entry of the cache that has them, or room for them"""
    one_size: tuple[int, int] | None = None
    """without `size` the height and width that all must have, if any"""
    needed: tuple[int, int] | None = None
    """the height and width to decode at the least; see open_picture"""
    sums: Checksums | None = None
    """refuses files that have changed: the run's record names their content"""
    resize: Callable[[Any, tuple[int, int]], Any] = fit
    """makes a picture of the `size`"""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        picture, target = self.opened(index)
        self.check_size(index, picture.image)
        return self.pixels(picture.image), target if self.targets is None else self.targets[index]

    def opened(self, index: int) -> tuple[Picture, Any]:
        """Return a picture, and its target as `pairs` has it."""
        source, target = self.pair(index, name := f"sample {index}")
        return open_picture(source, MODES[self.channels], name, self.needed), target

    def look(self, index: int, name: str) -> Picture:
        """Return a picture for `look_at`. Raise DataError by its `name` where one is wrong."""
        return look(self.pair(index, name)[0], MODES[self.channels], name=name)

    def pair(self, index: int, name: str) -> tuple[Any, Any]:
        """Return a pair. Raise DataError if its files have changed."""
        with refuse_damaged(name):
            source, target = self.pairs[index]
        for file in (source, target):
            if self.sums and isinstance(file, str):
                self.sums.refuse_changed(file)
        return source, target

    def pixels(self, image: Any) -> Tensor:
        """Return a picture of Pillow's as uint8 [C, H, W], of the `size` if there is one."""
        if self.size not in (None, image.size[::-1]):
            image = self.resize(image, self.size)
        return to_tensor(image).contiguous()

    def check_size(self, index: int, image: Any) -> None:
        """Raise DataError for a picture of another height and width than the first's."""
        size, first = (image.height, image.width), self.one_size
        if self.size is None and first not in (None, size):
            sizes = f"image {index} is {size[0]}x{size[1]}, and the first {first[0]}x{first[1]}"
            fix = "give one size, e.g. 'dataset.image_size=[224,224]'"
            raise DataError(f"dataset.image_size=null: {sizes}; {fix}")


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPictures(Pictures):
    """Pictures as uint8 [C, H, W], and their masks int64 [H, W], both resized to `size`.

    Raise DataError, when it is read, also for a mask of another size than its picture, or one with
    other values.
    """

    values: Mask
    resize: Callable[[Any, tuple[int, int]], Any] = stretch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, source = self.opened(index)
        name = source if isinstance(source, str) else f"sample {index}: its mask"
        mask, _ = numbers_of_mask(open_picture(source, name=name), picture, name)
        self.values.check_values(mask, name)
        self.check_size(index, picture.image)
        return self.pixels(picture.image), _resized(mask, self.size or mask.shape)

    def look(self, index: int, name: str) -> Picture:
        """See Pictures; of the mask, too."""
        source, mask = self.pair(index, name)
        return look_at_pair(source, mask, MODES[self.channels], self.values, name)

    def occurring(self, indices: Tensor) -> Tensor:
        """Return the numbers in masks, of at most 512 that lie evenly, until all classes occur."""
        found, wanted = set[int](), {*range(self.values.num_classes)}
        places = torch.linspace(0, len(indices) - 1, min(len(indices), 512)).long()
        for index in indices[places].tolist():
            if wanted <= found:
                break
            _, source = self.pair(index, name := f"sample {index}")
            mask = open_picture(source, name=name)
            found |= {*np.unique(numbers_of_mask(mask, mask, name)[0]).tolist()}
        return torch.tensor(sorted(found))


def _resized(mask: np.ndarray, image_size: tuple[int, int]) -> Tensor:
    """Return a mask of another height and width; each pixel is that below its middle.

    Pillow's nearest does the same, but its modes do not hold all numbers.
    """
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int)
        for new, old in zip(image_size, mask.shape, strict=True)
    )
    return torch.from_numpy(np.ascontiguousarray(mask[rows][:, columns]))


@dataclass(frozen=True, eq=False)
class Kept(Held):
    """Pictures that are decoded once: taken from the cache, or put there by who reads them."""

    pictures: Pictures
    labels: Tensor
    """the class of each [N], or numbers [N, T]"""
    cached: CachedImages
    device: torch.device

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.cached.has(index):
            return torch.from_numpy(self.cached.images[index].copy()), self.labels[index]
        image, label = self.pictures[index]
        self.pictures.pair(index, f"sample {index}")  # refused if it has changed meanwhile
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
        return self._loaded() if all(map(self.cached.has, missing)) else None

    @functools.cached_property
    def _whole(self) -> InMemory:
        return self._loaded()  # one for all loaders

    def _loaded(self) -> InMemory:
        """Return all images on the device, as they are now."""
        return InMemory(torch.from_numpy(self.cached.images), self.labels, self.device)

    def evaluated_at_once(self, options: LoaderOptions) -> int | None:
        """See Held."""
        return eval_batch_size(options)


def of_arrays(
    train: Sequence[Any], test: Sequence[Any], features: Features, opening: Opening
) -> Source:
    """Return a source of (images uint8 [N, C, H, W], labels) in random order."""
    parts, shape = dict[str, Part](), tuple(train[0].shape[1:])
    for part, arrays in (("test", test), ("train", train)):
        images, labels = map(_tensor, arrays)
        held = InMemory(images, labels, opening.device)
        parts[part] = image_part(held, shape, opening.num_workers, features.targets)
    found = _source(shape, features.targets, parts, torch.zeros((), dtype=torch.int64))
    return replace(found, classes=_tensor(train[1]), in_random_order=True)


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def pictures_of(
    dataset: Any,
    pairs: Mapping[str, Any],
    targets: Mapping[str, Tensor],
    sums: Checksums | None = None,
    make: Callable[..., Pictures] = Pictures,
) -> dict[str, Pictures]:
    """Return the pictures of each part, with its `targets` if they are not in the `pairs`.

    They have as many channels as the first, if none are chosen.
    """
    if (channels := dataset.channels) is None:
        first = open_picture(next(iter(pairs.values()))[0][0], name="sample 0")
        channels = 1 if first.image.mode in ("1", "L") else 3
    how: Any = {"size": dataset.image_size, "needed": dataset.needed, "sums": sums}
    return {
        part: make(each, channels, targets=targets.get(part), **how) for part, each in pairs.items()
    }


def of_masks(
    dataset: OfPictures, pairs: Mapping[str, Any], how: Opening, sums: Checksums | None = None
) -> Source:
    """Return the parts of pairs of a picture and its mask."""
    values = dataset.mask(how.task)
    make = functools.partial(MaskPictures, values=values)
    masks: Mapping[str, Any] = pictures_of(dataset, pairs, {}, sums, make)
    found = _of_parts(masks, values, how)
    return replace(found, targets_of=masks["train"].occurring) if "train" in masks else found


def of_targets(
    dataset: Any,
    parts: Mapping[str, Pictures],
    class_names: Sequence[str],
    columns: Sequence[str],
    how: Opening,
) -> Source:
    """Return parts of pictures with their `targets`: of named classes, or numbers.

    The `columns` of a table have them, if any does.
    """
    train = parts.get("train", next(iter(parts.values()))).targets
    assert train is not None
    if class_names:
        column = columns[0] if columns else ""
        classes = Classes(names=tuple(class_names), are_names=True, column=column)
        known = train if "train" in parts else None
        return replace(_of_parts(parts, classes, how), classes=known)
    of_scales = functools.partial(_of_numbers, parts, columns, how)
    if how.trained_on is not None:
        return of_scales(how.trained_on.targets.scales)
    found = of_scales({})
    if not dataset.standardise_targets:
        return found
    numbers = Chosen(train.float().double().numpy())

    def fitted(chosen: Tensor) -> Source:
        return of_scales(scales_of(numbers, columns, chosen.numpy(), {}))

    return replace(found, fitted=fitted)


def _of_numbers(
    parts: Mapping[str, Pictures], names: Sequence[str], how: Opening, scales: Mapping[str, Scale]
) -> Source:
    """Return parts of pictures with numbers [N, T] to predict, or labels of 0 and 1."""
    encoder, scaled = Encoder(names, {}, scales), dict[str, Pictures]()
    for part, pictures in parts.items():
        assert pictures.targets is not None
        scaled[part] = replace(pictures, targets=encoder(pictures.targets.float()).float())
    train = scaled.get("train", next(iter(scaled.values()))).targets
    assert train is not None
    found = _of_parts(scaled, how.task.takes.of_columns(names, scales), how)
    return replace(found, targets_of=train.__getitem__)


def _of_parts(parts: Mapping[str, Pictures], targets: Feature, how: Opening) -> Source:
    """Return the parts `train`, `val` and `test` that there are, each with such `targets`.

    Without transforms those that are `cached` are taken from there.
    """
    first = next(iter(parts.values()))
    height, width = first.size or first.opened(0)[0].image.size[::-1]
    shape, found = (first.channels, height, width), dict[str, Part]()
    for part, pictures in parts.items():
        images: Dataset[Any] = replace(pictures, one_size=shape[1:])
        if pictures.cached is not None and pictures.targets is not None:
            images = Kept(pictures, pictures.targets, pictures.cached, how.device)
        originals = replace(pictures, size=None, one_size=None, needed=None)
        found[part] = image_part(images, shape, how.num_workers, targets, originals)
    numbers = torch.zeros(shape[1:] if targets.each == "pixel" else (), dtype=torch.int64)
    target = numbers if first.targets is None else torch.zeros_like(first.targets[0])
    read = {part: pictures for part, pictures in parts.items() if pictures.cached is None}
    return replace(_source(shape, targets, found, target), pictures=read)


def _source(shape: Shape, targets: Feature, parts: Mapping[str, Part], target: Tensor) -> Source:
    """Return a source of images of one shape, with `targets` like `target`."""
    return Source(
        features=Features(Image(channels=shape[0], image_size=shape[1:]), targets),
        example=(torch.zeros(shape), target),
        train=parts.get("train", NOTHING),
        val=parts.get("val"),
        test=parts.get("test"),
    )


def image_part(
    images: Dataset[Any],
    shape: Shape,
    num_workers: int,
    targets: Feature,
    originals: Dataset[Any] | None = None,
) -> Part:
    """Return a part of images; transforms get the `originals`, which may be of any size."""
    check, collate = as_it_is, None
    if targets.has_one_class:
        check = functools.partial(checked_image, shape=shape, classes=targets)
        collate = stacked

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        chosen = images
        if options.transforms:
            chosen = _transformed(images if originals is None else originals, shape, options)
        if targets.each == "pixel":  # logits of many classes are as large as an image
            share = max(1, options.batch_size // options.shard.world_size)
            options = replace(options, eval_batch_size=options.eval_batch_size or share)
        make = loading(chosen, num_workers, check, collate=collate, channels=shape[0])
        return make(indices, options)

    return Part(size_of(images), load)


def _transformed(images: Dataset[Any], shape: Shape, options: LoaderOptions) -> Dataset[Any]:
    """Return images with their transforms. Warn where these can't be repeated."""
    found = Transformed(images, options.transforms, shape, options.transforms_key)
    if options.shard.rank == 0:
        for problem in found.unseeded():
            warn(problem)
    return found


def stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return images [b, C, H, W] and their labels [b]."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)
