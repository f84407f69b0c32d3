"""What a person's files hold, a batch at a time, as a run's model takes it."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from expt import machine
from expt.data.image_files import read_image
from expt.data.loading import to_device
from expt.data.windows import NO_TARGET
from expt.errors import DataError
from expt.inference.arrays import Samples
from expt.inference.preprocess import Preprocess
from expt.inference.table_rows import Features

T = TypeVar("T")
U = TypeVar("U")
About = dict[str, "str | int"]
_AHEAD = 2
"""Batches that are read while one is computed."""


class Chunk(NamedTuple):
    """Some samples, in order; none where all of a batch could not be read."""

    about: Sequence[About]
    """of each sample where it is from: a path, and of a file with several which one"""
    inputs: Any
    """on the device, as the model takes them"""
    targets: Any = None
    """on the device, where they are known"""
    sizes: Sequence[tuple[int, int]] = ()
    """of pictures: height and width as they lie"""
    skipped: Sequence[str] = ()
    """what could not be read, a line each"""


class _Picture(NamedTuple):
    path: str
    pixels: Tensor
    size: tuple[int, int]


def pictures(
    files: Sequence[str], preprocess: Preprocess, device: torch.device, size: int
) -> Iterator[Chunk]:
    """Threads decode ahead of the model: Pillow lets them run side by side."""

    def read(path: str) -> _Picture | str:
        try:
            picture = read_image(path)
            return _Picture(path, preprocess.picture(picture), (picture.height, picture.width))
        except DataError as error:
            return str(error)
        except Exception as error:  # what a decoder raises of a damaged file is of many kinds
            return (
                f"{path} cannot be read as an image ({type(error).__name__}: {error}); replace or"
                " remove it"
            )

    for read_ones in _ahead(read, files, size):
        good = [each for each in read_ones if isinstance(each, _Picture)]
        bad = [each for each in read_ones if isinstance(each, str)]
        if not good:
            yield Chunk([], None, skipped=bad)
            continue
        pixels = to_device(torch.stack([each.pixels for each in good]), device)
        about: list[About] = [{"path": each.path} for each in good]
        yield Chunk(about, preprocess(pixels), sizes=[each.size for each in good], skipped=bad)


def _ahead(read: Callable[[T], U], items: Iterable[T], size: int) -> Iterator[list[U]]:
    """What `read` gives of each, `size` at a time, in order; the next batches are being read
    meanwhile.
    """
    remaining = iter(items)
    pending = collections.deque[list[Future[U]]]()
    with ThreadPoolExecutor(min(machine.usable_cpus(), 16)) as threads:
        try:
            while True:
                while len(pending) < _AHEAD and (batch := list(itertools.islice(remaining, size))):
                    pending.append([threads.submit(read, item) for item in batch])
                if not pending:
                    return
                yield [future.result() for future in pending.popleft()]
        finally:  # whoever stops early waits for what has begun alone
            for future in itertools.chain.from_iterable(pending):
                future.cancel()


def arrays(several: Sequence[Samples], preprocess: Preprocess, size: int) -> Iterator[Chunk]:
    """Of each array its samples."""
    for path, array, arranged in several:
        for start in range(0, len(array), size):
            piece = np.array(
                arranged(np.asarray(array[start : start + size]))
            )  # a copy: files are mapped read-only
            about: list[About] = [
                {"path": path, "index": start + place} for place in range(len(piece))
            ]
            yield Chunk(about, preprocess(torch.from_numpy(piece)))


def rows(
    files: Sequence[str], features: Features, preprocess: Preprocess, size: int
) -> Iterator[Chunk]:
    """Of each table its rows, which count from 1."""
    for path in files:
        for first, values, wrong in features.read(path, size):
            good = [place for place in range(len(values)) if place not in wrong]
            about: list[About] = [{"path": path, "row": first + place} for place in good]
            bad = [f"{path}: row {first + place}: {why}" for place, why in sorted(wrong.items())]
            yield Chunk(about, preprocess(values[good]) if good else None, skipped=bad)


def texts(files: Sequence[str], device: torch.device, context: int, size: int) -> Iterator[Chunk]:
    """Of each file its lines, which count from 1, without those that are blank, in windows as an
    evaluation has them.

    A line's windows come one after the other, and say the same of where they are from.
    """
    windows = ((about, window) for path in files for about, window in _windows(path, context))
    while several := list(itertools.islice(windows, size)):
        longest = max(len(window) for _, window in several) - 1
        inputs, targets = (
            np.zeros((len(several), longest), np.int64),
            np.full((len(several), longest), NO_TARGET),
        )
        for place, (_, window) in enumerate(several):
            inputs[place, : len(window) - 1], targets[place, : len(window) - 1] = (
                window[:-1],
                window[1:],
            )
        on_device, following = (
            to_device(torch.from_numpy(each), device) for each in (inputs, targets)
        )
        yield Chunk([about for about, _ in several], on_device, following)


def _windows(path: str, context: int) -> Iterator[tuple[About, np.ndarray]]:
    with _explained(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            tokens = np.frombuffer(line.rstrip(b"\r\n"), np.uint8)
            about: About = {"path": path, "line": number}
            if len(tokens) == 1:
                yield (
                    about,
                    np.array([tokens[0], NO_TARGET]),
                )  # nothing follows that could be likely
            for start in range(0, len(tokens) - 1, context):
                yield about, tokens[start : start + context + 1].astype(np.int64)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); mend its permissions"
        ) from error
