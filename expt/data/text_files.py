"""The files of a text, and which of its bytes train, validate and test. Free of torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from expt.config import datasets
from expt.errors import DataError

VOCAB_SIZES = {"bytes": 256}
"""Of each kind of token."""


class Extent(NamedTuple):
    """Bytes `start` to `stop` of a text, its `files` one after the other."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    """of the files [bytes]"""
    start: int
    stop: int


class Parts(NamedTuple):
    """The parts of a text, which share no byte; None where a fraction is 0."""

    train: Extent
    val: Extent | None
    test: Extent | None


def parts_of(dataset: datasets.Text) -> Parts:
    """The beginning trains, what follows validates, the end tests.

    Raises DataError for a text that is missing, no plain one, or too short: a part must hold a token and its next.
    """
    files = _files(Path(dataset.root))
    sizes = tuple(_size(path) for path in files)
    total = sum(sizes)
    test = round(total * dataset.test_fraction)
    val = round(total * dataset.val_fraction)
    bounds = [0, total - val - test, total - test, total]
    extents = [Extent(files, sizes, *pair) for pair in itertools.pairwise(bounds)]
    wanted = (True, dataset.val_fraction > 0, dataset.test_fraction > 0)
    for name, extent, is_wanted in zip(Parts._fields, extents, wanted, strict=True):
        if is_wanted and extent.stop - extent.start < 2:
            raise DataError(
                f"dataset.root={dataset.root}: of its {total} bytes {extent.stop - extent.start} are left for {name}, "
                "which needs 2 or more; give a longer text"
            )
    if dataset.context > extents[0].stop - 1:
        trained_on = extents[0].stop
        raise DataError(f"dataset.context={dataset.context}: only {trained_on} bytes are left to train on; use less")
    train, val_part, test_part = (
        extent if is_wanted else None for extent, is_wanted in zip(extents, wanted, strict=True)
    )
    assert train
    return Parts(train, val_part, test_part)


def _files(root: Path) -> tuple[Path, ...]:
    if root.is_dir():
        found = tuple(sorted(path for path in root.rglob("*.txt") if path.is_file()))
        if not found:
            raise DataError(f"dataset.root={root}: no file *.txt lies below it; give a plain text, or a folder of them")
        return found
    if not root.exists():
        raise DataError(
            f"dataset.root={root}: there is no such file or folder; give a plain text, or a folder of *.txt"
        )
    return (root,)


def _size(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                raise DataError(f"{path}: is compressed; unpack it, as in gunzip --keep {path.name}")
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); mend its permissions") from error
