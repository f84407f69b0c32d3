"""Find samples, or groups of samples, that lie in two parts of a dataset."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from expt.data.checksums import Checksums
from expt.errors import warn

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.kinds import DatasetConfig
    from expt.data.rows import Chosen, Rows
    from expt.data.source import Source

_ODD = 0x9E3779B97F4A7C15
_PIECES, _PIECE = 32, 1024
"""Pieces of a buffer, and their bytes."""
_UNREAD = itertools.count()
"""Digests of files that were not read, no two equal."""
_SOME = 1000
"""Rows that say how often two have equal cells."""
_BITS = 24
_FINE = 0.15
"""The share of different values in some column, below which rows may be equal by chance."""
_REPEATED, _DENSE = 0.9, 0.05
"""The most different values in a column with repeated ones, and the least of possible ones."""
_COPIES = 8
"""The most equal rows in train that are copies."""
_TIMES = 10
"""How many more rows are to be equal than would be by chance."""


class Digests(NamedTuple):
    """Digests of the samples of a part, which are equal where these are."""

    values: np.ndarray
    """uint64 [N]"""
    chance: float = 0.0
    """the probability that two samples are equal by chance"""
    most: float = math.inf
    """the most equal samples in train; more are values that often occur, such as all zeros"""

    def at(self, index: np.ndarray) -> Digests:
        """Return those of the samples at `index`."""
        return self._replace(values=self.values[index])


def digests_of_files(files: Iterable[str | None], sums: Checksums) -> Digests:
    """Return the digests of files by their checksums; one that was not read equals no other."""
    known = (path and sums.last_of(path) for path in files)
    found = [int(md5[-16:], 16) if md5 else next(_UNREAD) for md5 in known]
    return Digests(np.array(found, np.uint64))


def digest_of_bytes(content: Any) -> int:
    """Return the digest of a buffer; of a large one its length and some of its bytes."""
    view = memoryview(content)
    found = hashlib.blake2b(str(len(view)).encode(), digest_size=8)
    if len(view) <= _PIECES * _PIECE:
        found.update(view)
    else:
        for start in range(0, len(view), len(view) // _PIECES):
            found.update(view[start : start + _PIECE])
    return int.from_bytes(found.digest(), "big")


def digests_of_rows(rows: Rows, index: np.ndarray) -> Digests:
    """Return the digests of the rows at `index`: of their features and targets."""
    columns, classes = [rows.features], np.zeros(len(index), np.uint64)
    if isinstance(rows.targets, np.ndarray):
        classes = rows.targets[index].astype(np.uint64)
    else:
        columns.append(rows.targets)
    found = sum((_digests(each, index) for each in columns), classes)
    return Digests(found, _chance(columns), _COPIES)


def _digests(columns: Chosen, index: np.ndarray) -> np.ndarray:
    # An odd factor for each column, so that cells count by their places.
    factors = np.arange(1, 2 * columns.shape[1], 2, dtype=np.uint64) * np.uint64(_ODD)
    found = [np.zeros(0, np.uint64)]
    for block in columns.blocks(index):
        bits = np.ascontiguousarray(block).view(np.uint64) * factors
        bits ^= bits >> np.uint64(40)
        found.append(bits.sum(1, dtype=np.uint64) * np.uint64(_ODD))
    return np.concatenate(found)


def _chance(columns: Sequence[Chosen]) -> float:
    """Return how often two different rows have equal cells in all columns."""
    number = columns[0].shape[0]
    places = np.arange(0, number, max(1, number // _SOME))
    cells = np.concatenate([each[places] for each in columns], axis=1)
    some = np.unique(cells, axis=0).T
    values = [np.unique(each) for each in some]
    sizes = np.array([*map(len, values)])
    if sizes.max() < _FINE * len(cells):
        return 1.0  # of columns that depend on one another the product says nothing
    finest, is_repeated = int(sizes.argmax()), sizes < _REPEATED * len(cells)
    steps = np.array([*map(_step, values)]) * is_repeated
    is_coarse = sizes[finest] * steps[finest] > _DENSE  # so that others may follow from it
    order = some[finest].argsort()
    is_same = np.diff(some[finest][order]) == 0
    found, pairs = 1.0, max(1, len(order) * (len(order) - 1))
    for place, each in enumerate(some):
        may_follow = is_coarse and steps[place] and place != finest
        if may_follow and not (is_same & (np.diff(each[order]) != 0)).any():
            continue  # the finest column has said it
        counts = np.unique(each, return_counts=True)[1]
        found *= max(steps[place], max(1.0, (counts * (counts - 1)).sum()) / pairs)
    return found


def _step(values: np.ndarray) -> float:
    """Return the share of a step in the range of values that lie in steps; 0 for others."""
    distances = np.diff(values[np.isfinite(values)])
    least = distances.min(initial=np.inf)
    if np.abs(distances / least - np.rint(distances / least)).max(initial=0) > 0.01:
        return 0.0
    return float(least / distances.sum()) if len(distances) else 1.0


def warn_of_shared(
    dataset: DatasetConfig, task: Any, source: Source, train: Tensor, val: Tensor
) -> None:
    """Warn of held-out samples that are trained on, and of groups that lie in two parts.

    `train` and `val` are the places of the samples to train on, and of those held out of train.
    """
    if source.digests is None and not source.groups:
        return
    parts = {"train": ("train", train.numpy())}
    for name, of_name in (("val", source.val), ("test", source.test)):
        size = of_name.size if of_name else None
        parts |= {name: (name, np.arange(size))} if size else {}
    parts |= {"val": ("train", val.numpy())} if len(val) else {}
    groups = {name: Digests(each.numpy().astype(np.uint64)) for name, each in source.groups.items()}
    drawn = {"val": len(val) > 0, "test": hasattr(dataset, "test_fraction")}
    for of, what, fix in (
        (source.digests, "are trained on, too", "remove copies"),
        (groups.get, "have their dataset.group in train, too", "move each group to one part"),
    ):
        known = {part: of(part) for part in {part for part, _ in parts.values()}} if of else {}
        chosen = {
            name: each.at(index)
            for name, (part, index) in parts.items()
            if (each := known.get(part))
        }
        if shared := _shared(chosen):
            name, (_, *first) = next(iter(shared.items()))
            told, such = list[str](), list[str]()
            for part, (number, *_) in shared.items():
                size = len(parts[part][1])
                told.append(f"{number} of {size} samples of {part} ({number / size:.1%})")
            for part, place in zip((name, "train"), first, strict=True):
                origin = dataset.origin(task, part)(int(parts[part][1][place]))
                such.append(" ".join(f"{key} {origin[key]}" for key in origin) + f" ({part})")
            together = any(map(drawn.get, shared)) and of is source.digests
            fix += ", or keep them together by dataset.group" * together
            said = f"{' and '.join(told)} {what}, such as {' and '.join(such)}"
            warn(f"{dataset.label}: {said}; {fix}")


def _shared(parts: Mapping[str, Digests]) -> dict[str, tuple[int, int, int]]:
    """Return how many samples of parts are in train, if more than by chance, and the first two."""
    found = dict[str, tuple[int, int, int]]()
    train = parts.get("train", Digests(np.empty(0, np.uint64)))
    for name, each in parts.items():
        least = _TIMES * each.chance * len(train.values) * len(each.values)
        if name == "train" or least >= len(each.values):
            continue
        ours, theirs = _alike(each.values, train.values)
        there, counts = np.unique(train.values[theirs], return_counts=True)
        ours = ours[counts[np.searchsorted(there, each.values[ours])] <= each.most]
        if len(ours) > least:
            like = theirs[(train.values[theirs] == each.values[ours[0]]).argmax()]
            found[name] = len(ours), int(ours[0]), int(like)
    return found


def _alike(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of digests that are in both."""

    def may_be(some: np.ndarray, others: np.ndarray) -> np.ndarray:
        # Most differ in the first bits: to compare these takes a tenth of the time of sorting.
        there = np.zeros(1 << _BITS, bool)
        there[others >> (64 - _BITS)] = True
        return np.flatnonzero(there[some >> (64 - _BITS)])

    mine = may_be(ours, theirs)
    its = may_be(theirs, ours[mine])
    mine = mine[np.isin(ours[mine], theirs[its])]
    return mine, its[np.isin(theirs[its], ours[mine])]
