"""Sources of images, each with a class, with numbers to predict, or with a mask."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.checked_samples import Transformed, checked_image
from expt.data.checksums import Checksums
from expt.data.encoding import Encoder
from expt.data.kinds import Opening
from expt.data.loader import Held, Loader, loading
from expt.data.loading import LoaderOptions
from expt.data.memory import InMemory
from expt.data.picture_sets import Kept, MaskPictures, Pictures
from expt.data.pictures import open_picture
from expt.data.samples import size_of
from expt.data.seeding import preserved_generators
from expt.data.source import NOTHING, Part, Source
from expt.errors import warn
from expt.features import Feature, Features, Image, Mask

Shape: TypeAlias = tuple[int, int, int]
"""Channels, height, width."""
Size: TypeAlias = tuple[int, int]
"""Height, width."""
Scales: TypeAlias = Mapping[str, tuple[float, float]]
"""The mean and deviation of each target, by its name; targets are given in these units."""


def of_parts(
    shape: Shape, targets: Feature, parts: Mapping[str, Part], target: Tensor | None = None
) -> Source:
    """Return a source of images of one shape, with `targets`: numbers like `target`, or classes."""
    features = Features(Image(channels=shape[0], image_size=shape[1:]), targets)
    if target is None:
        target = torch.zeros(shape[1:] if targets.each == "pixel" else (), dtype=torch.int64)
    return Source(
        features=features,
        example=(torch.zeros(shape), torch.zeros_like(target)),
        train=parts.get("train", NOTHING),
        val=parts.get("val"),
        test=parts.get("test"),
    )


def of_arrays(
    train: Sequence[Any], test: Sequence[Any], features: Features, opening: Opening
) -> Source:
    """Return a source of (images uint8 [N, C, H, W], labels) in random order."""
    parts, shape = dict[str, Part](), tuple(train[0].shape[1:])
    for part, arrays in (("test", test), ("train", train)):
        images, labels = map(_tensor, arrays)
        held = InMemory(images, labels, opening.device)
        parts[part] = image_part(held, shape, opening.num_workers, features.targets)
    found = of_parts(shape, features.targets, parts)
    return replace(found, classes=_tensor(train[1]), in_random_order=True)


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
    own: Any = {}
    if targets.has_one_class:
        check = functools.partial(checked_image, shape=shape, classes=targets)
        own = {"check": check, "collate": stacked}

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
        return loading(chosen, num_workers, channels=shape[0], **own)(indices, options)

    return Part(size_of(images), load)


def stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return images [b, C, H, W] and their labels [b]."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)


def pictures_of(
    pairs: Mapping[str, Any],
    channels: int | None,
    size: Size | None,
    needed: Size | None,
    sums: Checksums | None = None,
) -> dict[str, Pictures]:
    """Return the pictures of each part; without `channels` as many as the first one has."""
    number = channels or _channels(pairs)
    how = functools.partial(Pictures, channels=number, size=size, needed=needed, sums=sums)
    return {part: how(each) for part, each in pairs.items()}


def _channels(pairs: Mapping[str, Any]) -> int:
    first = open_picture(next(iter(pairs.values()))[0][0], name="sample 0")
    return 1 if first.image.mode in ("1", "L") else 3


def of_sets(
    sets: Mapping[str, Pictures],
    targets: Feature,
    num_workers: int,
    memory: Mapping[str, Held] | None = None,
    target: Tensor | None = None,
) -> Source:
    """Return the parts `train`, `val` and `test` that there are, each with such `targets`.

    Without transforms parts in `memory` are taken from there.
    """
    first, parts = next(iter(sets.values())), dict[str, Part]()
    held = memory or {}
    height, width = first.size or first.opened(0)[0].image.size[::-1]
    shape = first.channels, height, width
    for part, each in sets.items():
        images = held.get(part, replace(each, one_size=shape[1:]))
        originals = replace(each, size=None, one_size=None, needed=None)
        parts[part] = image_part(images, shape, num_workers, targets, originals)
    pictures = {part: each for part, each in sets.items() if part not in held}
    return replace(of_parts(shape, targets, parts, target), pictures=pictures)


def of_numbers(
    sets: Mapping[str, Pictures],
    takes: type[Feature],
    targets: Tensor,
    names: Sequence[str],
    scales: Scales | None,
    num_workers: int,
    memory: Mapping[str, Kept] | None = None,
) -> Source:
    """Return parts of pictures with numbers to predict, or labels of 0 and 1, as a task `takes`.

    `targets` float32 [N, T] are those of train. They are in units of `scales`; without these in
    deviations of the training samples, once they are chosen.
    """
    if scales is None:

        def of(scales: Scales) -> Source:
            return of_numbers(sets, takes, targets, names, scales, num_workers, memory)

        return replace(of({}), fitted=lambda chosen: of(_scales(targets[chosen], names)))
    encoder = Encoder(names, {}, scales)

    def scaled(target: Any) -> Tensor:
        return encoder(torch.as_tensor(target).float().reshape(-1, len(names))).float()

    values = scaled(targets)
    pictures = {part: replace(x, target=lambda one: scaled(one)[0]) for part, x in sets.items()}
    held = {
        part: replace(each, pictures=pictures[part], labels=scaled(each.labels))
        for part, each in (memory or {}).items()
    }
    feature = takes.of_columns(names, scales)
    found = of_sets(pictures, feature, num_workers, held, torch.zeros_like(values[0]))
    return replace(found, targets_of=values.__getitem__)


def _scales(targets: Tensor, names: Sequence[str]) -> Scales:
    """Return the mean and deviation of each target; a deviation of 1 where all are equal."""
    values = targets.double()
    mean, std = values.mean(0), values.std(0, correction=0)
    std = torch.where(std > 1e-12 * values.abs().amax(0), std, torch.ones_like(std))
    return dict(zip(names, zip(mean.tolist(), std.tolist(), strict=True), strict=True))


def of_masks(sets: Mapping[str, Pictures], values: Mask, num_workers: int) -> Source:
    """Return the parts of pictures whose targets are masks of such `values`."""
    masks = {
        part: MaskPictures(x.pairs, x.channels, x.size, needed=x.needed, sums=x.sums, values=values)
        for part, x in sets.items()
    }
    found = of_sets(masks, values, num_workers)
    return replace(found, targets_of=masks["train"].occurring) if "train" in masks else found
