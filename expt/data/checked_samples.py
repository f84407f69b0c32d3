"""Samples that are transformed and checked as they are read: a GPU reports no wrong target."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from expt.config import secrets, user_class
from expt.config.own_code import place_of
from expt.data import changes
from expt.data.pictures import in_mode
from expt.data.seeding import preserved_generators, seed_all
from expt.errors import MISTAKES, ConfigError, DataError, ExptError, RunFailed, described, listed
from expt.features.feature import labelled

Check = Callable[[Any], Any]
"""Returns a sample as it is to be used. Raise DataError for a wrong one."""


LIMIT_S = 0.2
"""Seconds in which samples are read, to see whether that changes anything."""
_LOOKED_AT = 400
"""Samples that are read for that, if there is time."""
_DRAW = (
    "draw from the global generators of torch, NumPy and Python, which are seeded for each sample"
)
WITHOUT_GPU = (
    "a reading process can't use a GPU: let the dataset return tensors of the CPU, or use"
    " dataset.num_workers=0"
)


def as_it_is(sample: Any) -> Any:
    """Return the sample, as a Check that accepts everything."""
    return sample


def checked(check: Check, index: int, sample: Any) -> Any:
    """Return the result of `check` on the sample. Raise DataError that names its index."""
    try:
        return check(sample)
    except DataError as error:
        raise DataError(f"sample {index}: {error}") from None


def read(dataset: Dataset[Any], index: int) -> Any:
    """Return a sample. Raise an error as `in_words` has it."""
    try:
        return dataset[index]
    except Exception as error:
        raise in_words(error, f"sample {index}: {type(dataset).__name__}.__getitem__") from error


def read_all(dataset: Dataset[Any], check: Check, indices: Sequence[int]) -> list[Any]:
    """Return the samples, checked. Raise an error as `in_words` has it."""
    return [checked(check, index, read(dataset, index)) for index in indices]


def without_gpu(message: str) -> str:
    """Return the fix for an error of CUDA in a reading process; empty for any other."""
    return WITHOUT_GPU if "CUDA" in message and get_worker_info() else ""


def in_words(error: Exception, whose: str) -> Exception:
    """Return the error of a custom dataset in one line, with its place there.

    It is a DataError for a mistake, which another try would raise again; RunFailed where the disk
    or the network may be the cause. Errors for a person, and of memory, stay as they are.
    """
    if isinstance(error, ExptError | MemoryError | torch.OutOfMemoryError):
        return error
    message, where = secrets.said(error), place_of(error)
    if fix := without_gpu(message):
        where += f"; {fix}"
    kind = DataError if type(error).__name__ in MISTAKES else RunFailed
    return kind(f"{whose} raised {message}{where}")


def to_tensor(image: Any) -> Tensor:
    """Return a PIL image, array HW or HWC, or tensor HW or CHW as a uint8 or float32 tensor CHW.

    Raise DataError for anything else.
    """
    if isinstance(image, Tensor):
        tensor = image
    else:
        if hasattr(image, "convert") and image.mode not in ("L", "RGB"):
            image = in_mode(image, "RGB")
        tensor = torch.empty(0)
        # Torch has no texts, objects and such, and no bytes in another order.
        with contextlib.suppress(TypeError, ValueError):
            if hasattr(image, "__array_interface__"):
                # A copy: arrays of PIL and of memory maps are read-only.
                tensor = torch.from_numpy(np.array(image))
        tensor = tensor.permute(2, 0, 1) if tensor.ndim == 3 else tensor
    if tensor.ndim not in (2, 3) or not (tensor.dtype == torch.uint8 or tensor.is_floating_point()):
        raise DataError(f"expected an image of uint8 or float, CHW, found {described(image)}")
    tensor = tensor[None] if tensor.ndim == 2 else tensor
    return tensor if tensor.dtype == torch.uint8 else tensor.float()


def checked_image(sample: Any, shape: tuple[int, ...], classes: Any) -> tuple[Tensor, int]:
    """Return a sample (image, label) as a tensor and a number. Raise DataError for another."""
    image, label = labelled(sample, "image")
    tensor = to_tensor(image)
    if tensor.shape != shape:
        raise DataError(
            f"its image is {tuple(tensor.shape)}, expected {shape} (channels, height, width) as in"
            " the first sample; resize the images to one size"
        )
    return tensor, classes.number(label)


def structure_of(sample: Any) -> Any:
    """Return its containers, with a dtype in place of a tensor, and a type of anything else.

    Lengths of tensors may differ, which torch reports.
    """
    if isinstance(sample, Tensor | np.ndarray):
        return str(sample.dtype)
    if isinstance(sample, Mapping):
        return {key: structure_of(below) for key, below in sample.items()}
    if isinstance(sample, list | tuple):
        return [structure_of(below) for below in sample]
    is_number = isinstance(sample, bool | int | float | np.number | np.bool_)
    return "number" if is_number else type(sample).__name__


def like(expected: Any, check: Check) -> Check:
    """Return a `check` that also refuses a sample of another structure than the first's.

    In a batch it would be lost, or cast, without a word.
    """
    # Without it a batch of 1,024 rows in memory takes twice as long: 5 in place of 3 us a sample.
    accepted = set[Any]()
    is_flat = isinstance(expected, list) and all(isinstance(each, str) for each in expected)

    def also(sample: Any) -> Any:
        kinds = None
        if is_flat and type(sample) is tuple:
            kinds = tuple([(type(each), getattr(each, "dtype", None)) for each in sample])
        if kinds not in accepted:
            if (found := structure_of(sample)) != expected:
                raise DataError(
                    f"it holds {found}, and the first training sample {expected}; make all alike,"
                    " or give the dataset a method collate(samples) -> batch"
                )
            if kinds is not None:
                accepted.add(kinds)
        return check(sample)

    return also


def telling(size: int, classes: Tensor | None = None) -> Iterator[int]:
    """Yield the number of the last sample, then of one of each class, then of some that are drawn.

    The rarest class comes first.
    """
    yield size - 1
    if classes is not None:
        _, members, counts = classes.unique(return_inverse=True, return_counts=True)
        places = torch.zeros(len(counts), dtype=torch.int64).scatter_(
            0, members, torch.arange(size)
        )
        yield from places[counts.argsort()].tolist()
    yield from np.random.default_rng(0).integers(0, size, _LOOKED_AT).tolist()


def unseeded(
    reads: Iterable[Callable[[], Any]], objects: Mapping[str, Any], *, again: bool = True
) -> Iterator[str]:
    """Yield a warning where `reads`, which read samples, change these objects or own code.

    Else yield one where a sample that is read `again` after the same seeds is another. As many are
    read as can be in LIMIT_S, one at least.
    """
    objects = {**changes.own_modules_and_classes(), **objects}
    watched = {where: changes.Watched(one, {}) for where, one in objects.items()}
    ends, drew, looked = time.monotonic() + LIMIT_S, 0, 0
    with preserved_generators():
        for seed, read_one in enumerate(reads):  # a seed each: a dataset may keep samples
            with contextlib.suppress(Exception):  # training reports the error
                found = set[str]()
                for _ in range(2 if again else 1):
                    seed_all(seed)
                    found.add(repr(changes.trace(read_one())))
                if len(found) > 1:
                    drew += 1
            looked += 1
            if time.monotonic() > ends:
                break
    lost = [f"{where}.{name}" for where, each in watched.items() for name in each.lost({})]
    if lost:
        yield (
            f"reading a sample changes {listed(lost)}, which no checkpoint holds and each reading"
            f" process has a copy of; {_DRAW}"
        )
    elif drew:
        yield (
            f"{drew} of {looked} samples that were read twice, after the same seeds, were others"
            f" the second time, so that no run can be repeated or resumed to the bit; {_DRAW}"
        )


Transform = Callable[[Any], Any]
# a resize may overshoot [0, 1] by this; pixels in 0..255 and normalised ones lie further out
_BEYOND = 0.5


def build_transforms(
    configured: Sequence[dict[str, Any]], key: str = "dataset.transforms"
) -> tuple[Transform, ...]:
    """Return an instance of each `{_target_: a.B, ...}`. Raise ConfigError where there is none."""
    try:
        return tuple(user_class.nested_built({"transforms": list(configured)})["transforms"])
    except ConfigError as error:
        raise ConfigError([f"{key}: {problem}" for problem in error.problems]) from error


class Transformed(Dataset[tuple[Tensor, Any]]):
    """A dataset of (image, label) with each image transformed to one `shape`, [C, H, W].

    Raise DataError for a sample that a transform does not take, or makes another shape of.
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Sequence[Transform],
        shape: tuple[int, int, int],
        key: str = "dataset.transforms",
    ) -> None:
        """`key` is the setting that names the transforms."""
        self._dataset, self._transforms, self._shape, self._key = dataset, transforms, shape, key

    def unseeded(self) -> Iterator[str]:
        """Yield a warning where reading a sample changes transforms."""
        named = {f"{self._key}.{at}": each for at, each in enumerate(self._transforms)}
        reads = (functools.partial(self.__getitem__, at) for at in telling(len(self)))
        return unseeded(reads, named)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, label = self._dataset[index]
        for place, transform in enumerate(self._transforms):
            try:
                image = transform(image)
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                message = secrets.said(error)
                name = type(transform).__name__
                raise DataError(
                    f"{self._key}.{place}: {name} does not take sample {index}: {message}"
                ) from error
        return self._checked(image, index), label

    def _checked(self, image: Any, index: int) -> Tensor:
        where = f"{self._key}: make of sample {index}"
        try:
            tensor = to_tensor(image)
        except DataError as error:
            raise DataError(f"{where} no image: {error}") from error
        if tuple(tensor.shape) != self._shape:
            raise DataError(
                f"{where} an image {tuple(tensor.shape)}, but evaluated images are {self._shape}"
                " (channels, height, width); let the last transform crop or resize to that"
            )
        if tensor.is_floating_point():
            low, high = (float(value) for value in torch.aminmax(tensor))
            if low < -_BEYOND or high > 1 + _BEYOND:
                raise DataError(
                    f"{where} pixels from {low:g} to {high:g}, expected [0, 1]; leave scaling to"
                    " dataset.mean and std, which evaluations use too"
                )
        return tensor
