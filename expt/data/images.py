"""Images, from memory or read one by one: each of one class, or with numbers to predict."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from expt.data import samples
from expt.data.checked_samples import Transformed, checked_image, to_tensor
from expt.data.image_files import decode, fit, in_mode
from expt.data.loading import Finish, Loader, LoaderOptions
from expt.data.memory import InMemoryLoader, place
from expt.data.samples import IterableLoader
from expt.data.source import Part, Source
from expt.data.stream import SampleLoader, StreamLoader, stacked
from expt.errors import DataError

Shape = tuple[int, int, int]
"""Channels, height, width."""
Scales = Mapping[str, Sequence[float]]
"""By the name of a target its mean and deviation, which it is given in units of."""


def of_images(
    shape: Shape, class_names: Sequence[str], train: Part, test: Part | None, **more: Any
) -> Source:
    """Return a source of images of one shape, each of one class."""
    shapes = {"channels": shape[0], "image_size": shape[1:], "num_classes": len(class_names)}
    example = torch.zeros(shape), torch.zeros((), dtype=torch.int64)
    return Source(shapes, tuple(class_names), example, train, test, **more)


def of_arrays(
    train: Sequence[Any],
    test: Sequence[Any],
    class_names: Sequence[str],
    device: torch.device,
    num_workers: int,
) -> Source:
    """Return a source of (images uint8 [N, C, H, W], labels) in random order."""
    images, labels = _tensors(train)
    shape = images.shape[1], images.shape[2], images.shape[3]
    part, originals = in_memory((images, labels), device), _InMemory(images, labels)
    to_train = transformed(part, originals, shape, len(class_names), num_workers)
    others: Any = {"classes": labels, "in_random_order": True}
    return of_images(shape, class_names, to_train, in_memory(test, device), **others)


def in_memory(arrays: Sequence[Any], device: torch.device) -> Part:
    """Return a part of (images, labels), placed here: all its loaders share one copy on a GPU."""
    images, labels = _tensors(arrays)
    return Part(len(images), functools.partial(InMemoryLoader, place(images, device), labels))


def _tensors(arrays: Sequence[Any]) -> tuple[Tensor, Tensor]:
    images, labels = (
        each
        if isinstance(each, Tensor)
        else torch.from_numpy(each if each.flags.writeable else np.array(each))
        for each in arrays
    )
    return images, labels


def streamed(
    dataset: Dataset[Any],
    shape: Shape,
    num_classes: int,
    num_workers: int,
    sample_s: float = math.inf,
) -> Part:
    """Return a part of a Dataset's images, read one by one while a run trains."""

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        if isinstance(dataset, IterableDataset):
            check = functools.partial(checked_image, shape=shape, num_classes=num_classes)
            how: Any = {"num_workers": num_workers, "finish": Finish(options, channels=shape[0])}
            return IterableLoader(dataset, indices, options, check=check, collate=stacked, **how)
        return StreamLoader(
            dataset,
            indices,
            options,
            shape=shape,
            num_classes=num_classes,
            num_workers=num_workers,
            sample_s=sample_s,
        )

    return Part(len(cast(Sized, dataset)), load)


def transformed(
    part: Part, originals: Dataset[Any], shape: Shape, num_classes: int, num_workers: int
) -> Part:
    """Return the same part, of which a loader with transforms reads the images `originals`.

    These may be of any size, and are read one by one.
    """

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        if not options.transforms:
            return part.load(indices, options)
        dataset = Transformed(originals, options.transforms, shape)
        return StreamLoader(
            dataset, indices, options, shape=shape, num_classes=num_classes, num_workers=num_workers
        )

    return part._replace(load=load)


class _InMemory(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index].clone(), int(self._labels[index])


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files as uint8 [channels, height, width], fitted to a size unless it is None.

    Raise DataError, when it is read, for a file that is no image.
    """

    def __init__(
        self,
        files: Sequence[str],
        labels: Sequence[int],
        image_size: tuple[int, int] | None,
        channels: int = 3,
    ) -> None:
        self._files, self._labels = files, labels
        self._image_size, self._channels = image_size, channels

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(decode(self._files[index], self._image_size, self._channels))
        return image.permute(2, 0, 1).contiguous(), self._labels[index]


class Pictures(Dataset[tuple[Tensor, Any]]):
    """A dataset of (Pillow's picture, target) as uint8 [C, H, W], in Pillow's `mode` L or RGB.

    With a size each is fitted to that; without one all must have `one_size`, where that is set.
    `target` makes the class, or another target. Raise DataError, when it is read, for a picture
    that is damaged, or of another size.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        mode: str,
        size: tuple[int, int] | None,
        target: Callable[[Any], Any] = int,
    ) -> None:
        self._dataset, self._mode, self._size, self._target = dataset, mode, size, target
        self.one_size: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        picture, target = read_picture(self._dataset, index, self._mode)
        if self._size is not None:
            picture = fit(picture, self._size)
        else:
            check_size(index, picture.size[::-1], self.one_size)
        try:
            return to_tensor(picture).contiguous(), self._target(target)
        except (TypeError, ValueError) as error:
            raise DataError(f"sample {index}: its target is {target!r} ({error})") from error

    def as_is(self) -> Pictures:
        """Return the same pictures, neither scaled nor all of one size."""
        return Pictures(self._dataset, self._mode, None, self._target)


def read_picture(dataset: Dataset[Any], index: int, mode: str) -> tuple[Any, Any]:
    """Return a sample's picture in a mode of Pillow's, and its target. Raise DataError."""
    try:
        picture, target = dataset[index]
        return in_mode(picture, mode), target
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"sample {index} cannot be read as an image ({error}); replace or remove it"
        ) from error


def check_size(index: int, size: tuple[int, int], first: tuple[int, int] | None) -> None:
    """Raise DataError for a picture of another height and width than the first's."""
    if first not in (None, size):
        one, other = (f"{height}x{width}" for height, width in (size, first or size))
        raise DataError(
            f"dataset.image_size=null: image {index} is {one}, and the first {other}; give one"
            " size, as in 'dataset.image_size=[224,224]'"
        )


def _shape_of(sets: Mapping[str, Pictures]) -> Shape:
    channels, height, width = sets["train"][0][0].shape
    for each in sets.values():
        each.one_size = height, width
    return channels, height, width


def of_pictures(
    sets: Mapping[str, Pictures],
    class_names: Sequence[str],
    labels: Tensor | None,
    num_workers: int,
    parts: Mapping[str, Part] | None = None,
) -> Source:
    """Return the parts `train`, and `val` and `test` if there are; `labels` are those of train.

    Without transforms the `parts` are taken, such as those in memory, where they are given.
    """
    originals, shape, number = sets["train"].as_is(), _shape_of(sets), len(class_names)
    parts = parts or {
        part: streamed(each, shape, number, num_workers) for part, each in sets.items()
    }
    train = transformed(parts["train"], originals, shape, number, num_workers)
    others: Any = {"val": parts.get("val")}
    others["classes"] = torch.zeros(train.size) if labels is None else labels
    return of_images(shape, class_names, train, parts.get("test"), **others)


def of_numbers(
    make: Callable[[Callable[[Tensor], Tensor]], Mapping[str, Pictures]],
    targets: Tensor,
    names: Sequence[str],
    num_workers: int,
    *,
    scales: Scales | None = None,
    standardises: bool = False,
) -> Source:
    """Return parts of pictures with numbers to predict, or labels of 0 and 1.

    `make` makes them with what scales a target float32 [T]; `targets` float32 [N, T] are those of
    train. They are in units of `scales`; or, where the source `standardises`, of what the training
    samples give, once these are chosen.
    """

    def found(by: Scales, **more: Any) -> Source:
        scale = _scaling(by, names)
        return _of_numbers(make(scale), scale(targets), names, num_workers, **more)

    def fitted(chosen: Tensor) -> Source:
        values = targets[chosen].double()
        mean, std = values.mean(0), values.std(0, correction=0)
        # else all are alike
        std = torch.where(std > 1e-12 * values.abs().amax(0), std, torch.ones_like(std))
        by = dict(zip(names, zip(mean.tolist(), std.tolist(), strict=True), strict=True))
        return found(by, standardised=by)

    if scales is not None:
        return found(scales)
    return found({}, fitted=fitted) if standardises else found({})


def _scaling(by: Scales, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
    if not by:
        return lambda target: target
    known = [tuple(by.get(name, (0.0, 1.0))) for name in names]
    mean, std = torch.tensor(known, dtype=torch.float64).T
    return lambda target: ((target.double() - mean) / std).float()


def _of_numbers(
    sets: Mapping[str, Pictures],
    targets: Tensor,
    names: Sequence[str],
    num_workers: int,
    **more: Any,
) -> Source:
    shape = _shape_of(sets)

    def part(pictures: Pictures) -> Part:
        def load(indices: Tensor, options: LoaderOptions) -> Loader:
            chosen: Dataset[Any] = pictures
            if options.transforms:
                chosen = Transformed(pictures.as_is(), options.transforms, shape)
            how: Any = {"num_workers": num_workers, "finish": Finish(options, channels=shape[0])}
            return SampleLoader(chosen, indices, options, collate=samples.collated, **how)

        return Part(len(pictures), load)

    parts = {name: part(each) for name, each in sets.items()}
    shapes = {"channels": shape[0], "image_size": shape[1:], "num_classes": targets.shape[1]}
    example, alike = (torch.zeros(shape), torch.zeros(targets.shape[1])), torch.zeros(len(targets))
    more |= {"val": parts.get("val"), "normalises": True, "target_names": tuple(names)}
    more |= {"targets_of": targets.__getitem__}
    return Source(shapes, (), example, parts["train"], parts.get("test"), alike, **more)
