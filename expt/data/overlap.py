"""Find samples, or groups of samples, that lie in two parts of a dataset."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
UNLIKE = itertools.count()
"""Digests of samples that equal no other, such as files that were not read."""
_SOME = 1000
"""Rows that say how often two have equal cells."""
_BITS = 24
_FINE = 0.15
"""The share of different values in some column, below which rows may be equal by chance."""
_REPEATED, _DENSE = 0.9, 0.05
"""The most different values in a column with repeated ones, and the least of possible ones."""
COPIES = 8
"""The most equal rows, or texts, in train that are copies."""
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


class _Shared(NamedTuple):
    """Samples of a part that are in train."""

    number: int
    place: int
    """the place of the first in its part"""
    in_train: int
    """the place of one in train that equals it"""


_Parts: TypeAlias = Mapping[str, "tuple[str, np.ndarray]"]
"""The part of the source that each part of the run is of, and the places of its samples there."""


def digests_of_files(files: Iterable[str | None], sums: Checksums) -> Digests:
    """Return the digests of files by their checksums; one that was not read equals no other."""
    known = (path and sums.last_of(path) for path in files)
    found = [int(md5[-16:], 16) if md5 else next(UNLIKE) for md5 in known]
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
    return Digests(found, _chance(columns), COPIES)


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
    """Return how often two different rows have equal cells in all columns, by some of the rows.

    If columns were independent, it would be the product over columns of how often two cells are
    equal: at least the share of one step in the range of a column that lies in steps (a number that
    is rounded), at least one pair of those seen. Columns that follow from another one add nothing:
    where the finest column lies in few steps, those that never differ where it is equal are left
    out. Without a fine column nothing is known, and the chance is 1.
    """
    number = columns[0].shape[0]
    places = np.arange(0, number, max(1, number // _SOME))
    cells = np.concatenate([each[places] for each in columns], axis=1)
    rows = np.unique(cells, axis=0)
    values = [np.unique(column) for column in rows.T]
    sizes = np.array([*map(len, values)])
    if sizes.max() < _FINE * len(cells):
        return 1.0  # of columns that depend on one another the product says nothing
    is_repeated = sizes < _REPEATED * len(cells)
    steps = np.where(is_repeated, [*map(_step, values)], 0.0)
    finest = int(sizes.argmax())
    rows = rows[rows[:, finest].argsort()]
    is_same = np.diff(rows[:, finest]) == 0
    is_coarse = sizes[finest] * steps[finest] > _DENSE  # so that others may follow from it
    chance = 1.0
    for place, column in enumerate(rows.T):
        may_follow = is_coarse and steps[place] > 0 and place != finest
        if may_follow and not (is_same & (np.diff(column) != 0)).any():
            continue  # the finest column has said it
        chance *= max(steps[place], _repeated(column))
    return chance


def _repeated(column: np.ndarray) -> float:
    """Return the share of pairs of equal cells among all pairs, of one pair at least."""
    counts = np.unique(column, return_counts=True)[1]
    pairs = max(1, len(column) * (len(column) - 1))
    return float(max(1.0, (counts * (counts - 1)).sum()) / pairs)


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
        if of_name and of_name.size:
            parts[name] = name, np.arange(of_name.size)
    if len(val):
        parts["val"] = "train", val.numpy()

    at = dataset.label
    if source.digests and (shared := _shared(parts, source.digests)):
        drawn = {"val": len(val) > 0, "test": hasattr(dataset, "test_fraction")}
        fix = "remove copies"
        if any(map(drawn.get, shared)):
            fix += ", or keep them together by dataset.group"
        where = _first(dataset, task, parts, shared)
        warn(f"{at}: {_counted(parts, shared)} are trained on, too, such as {where}; {fix}")
    groups = {name: Digests(each.numpy().astype(np.uint64)) for name, each in source.groups.items()}
    if shared := _shared(parts, groups.get):
        fault = f"{_counted(parts, shared)} have their dataset.group in train, too"
        where = _first(dataset, task, parts, shared)
        warn(f"{at}: {fault}, such as {where}; move each group to one part")


def _counted(parts: _Parts, shared: Mapping[str, _Shared]) -> str:
    """Return how many samples of each part are shared."""
    found = []
    for part, each in shared.items():
        size = len(parts[part][1])
        found.append(f"{each.number} of {size} samples of {part} ({each.number / size:.1%})")
    return " and ".join(found)


def _first(dataset: DatasetConfig, task: Any, parts: _Parts, shared: Mapping[str, _Shared]) -> str:
    """Return where the first shared sample comes from, and the one in train."""
    part, each = next(iter(shared.items()))
    found = []
    for name, place in ((part, each.place), ("train", each.in_train)):
        origin = dataset.origin(task, name)(int(parts[name][1][place]))
        found.append(" ".join(f"{key} {origin[key]}" for key in origin) + f" ({name})")
    return " and ".join(found)


def _shared(parts: _Parts, digests: Callable[[str], Digests | None]) -> dict[str, _Shared]:
    """Return the samples of parts that are in train, if they are more than by chance."""
    known = {part: digests(part) for part in {part for part, _ in parts.values()}}
    chosen = {name: each.at(at) for name, (part, at) in parts.items() if (each := known[part])}
    train = chosen.pop("train", Digests(np.empty(0, np.uint64)))
    found = dict[str, _Shared]()
    for name, each in chosen.items():
        least = _TIMES * each.chance * len(train.values) * len(each.values)
        if least >= len(each.values):
            continue
        ours, theirs = _in_both(each.values, train.values)
        there, counts = np.unique(train.values[theirs], return_counts=True)
        ours = ours[counts[np.searchsorted(there, each.values[ours])] <= each.most]
        if len(ours) > least:
            like = theirs[(train.values[theirs] == each.values[ours[0]]).argmax()]
            found[name] = _Shared(len(ours), int(ours[0]), int(like))
    return found


def _in_both(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
