"""The rows of a table, read once and mapped from the cache. Free of torch."""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from expt.data.cache import digest, mapped, of_content, state_of
from expt.data.columns import (
    FIX,
    Classes,
    Wrong,
    base,
    check_labels,
    check_learnable,
    counts_rows,
    is_number,
    numbers_of,
    parts_of,
    refuse,
)
from expt.data.table_files import SMALL, TableFile, open_table
from expt.errors import ConfigError, DataError, did_you_mean, listed

if TYPE_CHECKING:  # it takes as long to import as Hydra, and many a run has no arrays in its driver
    import numpy as np

_LABELS = "a label is 0 or 1: give each a column of them, or use task=classification"
_TEXTS = "give it a number, or its texts a column each (pandas.get_dummies), or remove the row"
_INDEX, _COUNTER = "the index of pandas, or without a name", "counts the rows"
_BLOCK = 1 << 16
"""Numbers that are computed with at a time."""


class Chosen:
    """Some columns [N, F] of numbers [N, K], which may lie in a file and are read when needed."""

    def __init__(self, numbers: np.ndarray, places: Iterable[int] | None = None) -> None:
        self._numbers = numbers
        self._places = [*range(numbers.shape[1])] if places is None else [*places]
        self._scales: tuple[np.ndarray, np.ndarray] | None = None
        self.shape = (len(numbers), len(self._places))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return rows, float64."""
        first, last = min(self._places), max(self._places)
        found: np.ndarray = self._numbers[:, first : last + 1][rows]
        if self._places != [*range(first, last + 1)]:
            # By take they lie row by row, so that sums have the bits of those over all columns.
            found = found.take([place - first for place in self._places], axis=1)
        if self._scales is None:
            return found
        mean, std = self._scales
        scaled: np.ndarray = (found - mean) / std
        return scaled

    def blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield these rows, some at a time.

        A single column comes at once, as NumPy does not add up its numbers one after the other.
        """
        number = len(rows) if self.shape[1] == 1 else _BLOCK // self.shape[1] + 1
        for start in range(0, len(rows), number):
            yield self[rows[start : start + number]]

    def columns(self, places: Sequence[int]) -> Chosen:
        """Return the columns at these places; they have no scales."""
        return Chosen(self._numbers, [self._places[place] for place in places])

    def scaled(self, scales: Sequence[tuple[float, float]]) -> Chosen:
        """Return the columns less their means, by their deviations."""
        import numpy as np

        found = self.columns(range(self.shape[1]))
        mean, std = np.array(scales).T
        found._scales = mean, std
        return found


class Rows(NamedTuple):
    """A table as a task takes it."""

    features: Chosen
    targets: Chosen | np.ndarray
    """classes int64 [N]"""
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    class_names: tuple[str, ...]
    """empty where the targets are not classes"""
    left_out: Mapping[str, str] = {}
    """Why columns that nobody named are not features."""


class Wanted(NamedTuple):
    """What is taken of a table."""

    targets: tuple[str, ...]
    features: tuple[str, ...]
    """empty: those that are `known`, else all other columns that are features"""
    known: tuple[str, ...]
    """a run's"""
    kind: str
    """of the task's targets"""


def load(path: Path, wanted: Wanted) -> Rows:
    """Return the rows of a table, the first of what a run takes of its file.

    Raise ConfigError for columns that are not there, DataError for a file or a cell that cannot be
    read, and without a run for classes of which nothing can be learned.
    """
    return _load(path, tuple(state_of(path)), wanted)


@functools.lru_cache(maxsize=1)  # the driver checks it for each run of a sweep
def _load(path: Path, state: tuple[int, ...], wanted: Wanted) -> Rows:
    if state[0] >= SMALL:
        words = str(path.resolve()), repr(wanted)
        name = f"table-{digest(words)}.{of_content([path])}"
        if found := mapped(name, _entry, lambda folder: _save(path, wanted, folder)):
            return found
    file = io.BytesIO()
    about, classes = _read(path, wanted, file)
    return _rows(about, _numbers_in(file, about["shape"]), classes)


def _save(path: Path, wanted: Wanted, folder: Path) -> None:
    import numpy as np

    with (folder / "numbers").open("wb") as file:
        about, classes = _read(path, wanted, file)
        os.fsync(file.fileno())
    np.save(folder / "classes.npy", classes)
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _entry(folder: Path) -> Rows | None:
    import numpy as np

    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        with (folder / "numbers").open("rb") as file:
            numbers = _numbers_in(file, about["shape"])
        return _rows(about, numbers, np.load(folder / "classes.npy", mmap_mode="c"))
    except (OSError, ValueError, EOFError):
        return None


def _numbers_in(file: IO[bytes], shape: Sequence[int]) -> np.ndarray:
    import numpy as np

    file.flush()
    if isinstance(file, io.BytesIO):
        return np.frombuffer(file.getbuffer()).reshape(shape)
    return np.memmap(file.name, float, "c").reshape(shape)


def _rows(about: Mapping[str, Any], numbers: np.ndarray, classes: np.ndarray) -> Rows:
    (target_places, targets), (places, features) = (
        zip(*about[kind], strict=True) for kind in ("targets", "features")
    )
    names = tuple(about["class_names"])
    answers = classes if names else Chosen(numbers, target_places)
    return Rows(Chosen(numbers, places), answers, features, targets, names, about["left_out"])


class _Found(NamedTuple):
    """What the numbers of a table are that were written."""

    targets: list[str]
    """the first of each row"""
    features: list[str]
    """the others"""
    size: int
    extents: np.ndarray
    """of each column: its largest number less its smallest"""
    wrong: dict[str, Wrong]
    """by column"""


def _read(path: Path, wanted: Wanted, file: IO[bytes]) -> tuple[dict[str, Any], np.ndarray]:
    """Write the numbers of a table; return what they are, and the classes [N] if there are any."""
    import numpy as np

    table, targets, kind = open_table(path), wanted.targets, wanted.kind
    columns, left_out = _candidates(table, wanted)
    classes = Classes(path, targets[0]) if kind == "class" else None
    found = _numbers(table, wanted, columns, classes, file)
    if not found.size:
        raise DataError(f"{path}: has no rows; give it some")
    answers = {name: why for name, why in found.wrong.items() if name in targets}
    refuse(path, answers, fix=_LABELS if kind == "labels" else FIX)
    numbers, names = classes.named() if classes else (np.empty(0, np.int64), ())
    if classes and not wanted.known:
        check_learnable(path, targets[0], found.size, names)
    about: dict[str, Any] = {"shape": (found.size, len(found.extents)), "class_names": names}
    counters = set[str]()
    if not (wanted.features or wanted.known):
        counters = _counters(path, found, columns, _numbers_in(file, about["shape"]))
    refuse(path, found.wrong, fix=_TEXTS)
    features = enumerate(found.features, len(found.targets))
    about |= {
        "targets": [*enumerate(found.targets or targets)],
        "features": [(place, name) for place, name in features if name not in counters],
        "left_out": left_out | dict.fromkeys(filter(counters.__contains__, columns), _COUNTER),
    }
    return about, numbers


def _candidates(table: TableFile, wanted: Wanted) -> tuple[list[str], dict[str, str]]:
    """Return the columns that may be features, and why others are none if nobody has named any."""
    path, (targets, features, known, _) = table.path, wanted
    if not {*table.names}.issuperset(targets + features):
        next(table.batches(table.names[:1]), None)  # the first line may not be that of the names
    for key, chosen in (("targets", targets), ("features", features)):
        _refuse_missing(path, table.names, key, chosen)
    refuse_twice({"targets": targets, "features": features})
    run = {*known, *map(base, known)}
    if found := [*features] or [name for name in table.names if name in run]:
        return found, {}
    if known:
        raise ConfigError(
            f"dataset.features: {path} has none of the run's columns {listed(known)}; give it these"
        )
    index = table.index - {*targets}
    if found := [name for name in table.names if name not in {*index, *targets}]:
        return found, {name: _INDEX for name in table.names if name in index}
    raise ConfigError(f"dataset.features: {path} has only targets; give it other columns")


def _numbers(
    table: TableFile,
    wanted: Wanted,
    columns: Sequence[str],
    classes: Classes | None,
    file: IO[bytes],
) -> _Found:
    """Write the numbers of the targets and the `columns`, all read to their ends."""
    import numpy as np

    wrong, size, low, high = dict[str, Wrong](), 0, np.array(np.inf), np.array(-np.inf)
    answers, texts = ((), wanted.targets) if classes else (wanted.targets, ())
    targets, features = list[str](), list[str]()
    for cells, number, _ in table.batches([*wanted.targets, *columns], texts):
        targets, features = parts_of(cells, answers), parts_of(cells, columns)
        found = numbers_of(cells, [*answers, *columns], wrong, size)
        if wanted.kind == "labels" and wrong.keys().isdisjoint(answers):
            check_labels(table.path, targets, found[:, : len(targets)], size)
        if classes:
            classes.add(cells[wanted.targets[0]])
        file.write(found.data)
        low, high = np.minimum(low, found.min(0)), np.maximum(high, found.max(0))
        size += number
    return _Found(targets, features, size, high - low, wrong)


def _counters(path: Path, found: _Found, columns: Sequence[str], numbers: np.ndarray) -> set[str]:
    """Return those of columns that nobody chose which number the rows.

    Raise where others are no numbers, or there are no others.
    """
    may_count = {*columns} & {*found.features}  # one number in each row
    counters = {
        name
        for place, name in enumerate(found.features, len(found.targets))
        if name in may_count
        and found.extents[place] == found.size - 1
        and counts_rows(numbers[:, place])
    }
    usable = [name for name in columns if name not in counters and name not in found.wrong]
    more = f", or use the columns of numbers only: {word(usable)}" if usable else ""
    refuse(path, found.wrong, more, _TEXTS)
    if not usable:
        raise ConfigError(
            f"dataset.features: {path} has only the targets and {listed(columns)}"
            f" ({_COUNTER}); if it is to be learned from: {word(columns)}"
        )
    return counters


def word(features: Sequence[str]) -> str:
    """Return the override that chooses features."""
    from expt.runs.request import joined, literal  # late: it imports all kinds of datasets

    return joined([f"dataset.features={literal([*features])}"])


def _refuse_missing(path: Path, columns: Sequence[str], key: str, names: Sequence[str]) -> None:
    """Raise ConfigError for a column that is not there, DataError where the names are numbers."""
    for name in names:
        if name in columns:
            continue
        if all(map(is_number, columns)):
            raise DataError(
                f"{path}: its first line is one of numbers ({listed(columns)}), and none is"
                f" {name}; name the columns there"
            )
        raise ConfigError(
            f"dataset.{key}={name}: {path} has no such column, it has {listed(columns)}"
            f".{did_you_mean(name, columns)}"
        )


def refuse_twice(chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a column that is named twice, or is to be predicted from itself."""
    names = [name for each in chosen.values() for name in each]
    if twice := next((name for name in names if names.count(name) > 1), None):
        keys = " and ".join(f"dataset.{key}" for key, each in chosen.items() if twice in each)
        raise ConfigError(f"{keys}={twice}: is named twice; name it once")
