"""The rows of a table, read once and mapped from the cache. Free of torch."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from expt import progress
from expt.data.cache import digest, filled, of_content, state_of
from expt.data.columns import (
    FIX,
    Cells,
    base,
    check_labels,
    check_learnable,
    classes_of,
    counts_rows,
    refuse,
)
from expt.data.table_files import SMALL, Batch, TableFile, open_table
from expt.errors import ConfigError, DataError, did_you_mean, listed

if TYPE_CHECKING:  # it takes as long to import as Hydra, and many a run has no arrays in its driver
    import numpy as np

_LABELS = "a label is 0 or 1: give each a column of them, or use task=classification"
_INDEX, _COUNTER = "the index of pandas, or without a name", "counts the rows"
_EMPTY = "has no values"
_BLOCK = 1 << 16
"""Numbers that are computed with at a time."""
_COUNTED = 10_000
"""Different texts of a column that are counted, to say how many there are."""


class Chosen:
    """Some columns [N, F] of numbers [N, K], which may lie in a file and are read when needed."""

    def __init__(self, numbers: np.ndarray, places: Sequence[int] | None = None) -> None:
        self._numbers = numbers
        self._places = [*range(numbers.shape[1])] if places is None else [*places]
        self.shape = (len(numbers), len(self._places))

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return rows, float64; a slice of columns side by side is no copy."""
        first, last = min(self._places), max(self._places)
        found: np.ndarray = self._numbers[:, first : last + 1][rows]
        if self._places != [*range(first, last + 1)]:
            # By take they lie row by row, so that sums have the bits of those over all columns.
            found = found.take([place - first for place in self._places], axis=1)
        return found

    def blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield these rows, some at a time.

        A single column comes at once, as NumPy does not add up its numbers one after the other.
        """
        number = max(1, len(rows)) if self.shape[1] == 1 else _BLOCK // self.shape[1] + 1
        for start in range(0, len(rows), number):
            yield self[rows[start : start + number]]

    def columns(self, places: Sequence[int]) -> Chosen:
        """Return the columns at these places."""
        return Chosen(self._numbers, [self._places[place] for place in places])


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
    texts: Mapping[str, Sequence[str]] = {}
    """Of features that are texts, those that there are; a cell is the place of one."""
    gaps: Sequence[str] = ()
    """Features of which a row has no value, but nan."""
    flags: Mapping[str, Sequence[str]] = {}
    """Of features that are yes and no, or true and false, how they are written."""
    encoded: Mapping[str, Mapping[str, Any]] = {}
    """What features become that are texts or have gaps, see `memory.Encoder`."""
    scales: Mapping[str, tuple[float, float]] = {}
    """The mean and deviation that columns are standardised by."""


class Wanted(NamedTuple):
    """What is taken of a table."""

    targets: tuple[str, ...]
    features: tuple[str, ...]
    """empty: all other columns that are features"""
    kind: str
    """of the task's targets"""
    categories: tuple[str, ...] = ()
    """columns that are texts, whatever they hold"""
    limit: int | None = None
    """the most different texts in a column; any number where a run has learned what there are"""


def load(path: Path, wanted: Wanted) -> Rows:
    """Return the rows of a table, the first of what a run takes of its file.

    Raise ConfigError for columns that are not there, DataError for a file or a cell that cannot be
    read, and to learn from for classes of which nothing can be learned.
    """
    return _load(path, tuple(state_of(path)), wanted)


@functools.lru_cache(maxsize=1)  # the driver checks it for each run of a sweep
def _load(path: Path, state: tuple[int, ...], wanted: Wanted) -> Rows:
    if state[0] >= SMALL:
        words = str(path.resolve()), repr(wanted)
        name = f"table-{digest(words)}.{of_content([path])}"
        if found := filled(name, lambda folder: _save(path, state, wanted, folder), _entry):
            return found
    with open(os.memfd_create("table"), "w+b") as file:
        return _rows(*_read(path, state, wanted, file), file)


def _save(path: Path, state: tuple[int, ...], wanted: Wanted, folder: Path) -> None:
    import numpy as np

    with (folder / "numbers").open("w+b") as file:
        about, classes = _read(path, state, wanted, file)
        os.fsync(file.fileno())
    np.save(folder / "classes.npy", classes)
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _entry(folder: Path) -> Rows | None:
    import numpy as np

    with contextlib.suppress(OSError, ValueError, EOFError):
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        with (folder / "numbers").open("rb") as file:
            return _rows(about, np.load(folder / "classes.npy", mmap_mode="c"), file)
    return None


def _rows(about: Mapping[str, Any], classes: np.ndarray, file: IO[bytes]) -> Rows:
    numbers, names = _mapped(file, about["shape"]), tuple(about["class_names"])
    (target_places, targets), (places, features) = (
        zip(*about[kind], strict=True) for kind in ("targets", "features")
    )
    answers = classes if names else Chosen(numbers, target_places)
    more = {name: about[name] for name in ("left_out", "texts", "gaps", "flags")}
    return Rows(Chosen(numbers, places), answers, features, targets, names, **more)


def _mapped(file: IO[bytes], shape: Sequence[int], mode: Any = "c") -> np.ndarray:
    import numpy as np

    file.flush()
    return np.memmap(file, float, mode, shape=tuple(shape))


def _read(
    path: Path, state: tuple[int, ...], wanted: Wanted, file: IO[bytes]
) -> tuple[dict[str, Any], np.ndarray]:
    """Write the numbers of a table; return what they are, and the classes [N] if there are any."""
    import numpy as np

    table = open_table(path)
    columns, left_out = _candidates(table, wanted)
    texts = [*wanted.categories, *(wanted.targets if wanted.kind == "class" else ())]
    most = math.inf if wanted.limit is None else max(wanted.limit + 1, _COUNTED)
    targets = [Cells(x, are_texts=x in texts) for x in wanted.targets]
    features = [Cells(x, are_texts=x in wanted.categories, most=most) for x in columns]
    every = [*targets, *features]
    with progress.phase(f"reading {path}", table.size) as here:
        for batch in table.batches([*dict.fromkeys(each.name for each in every)], texts):
            _refuse_damaged(table, batch, here.done)
            found = [each.read(batch.columns[each.name]) for each in every]
            file.write(np.ascontiguousarray(np.concatenate(found, axis=1)).data)
            here.done += batch.size
    if not here.done:
        raise DataError(f"{path}: has no rows; give it some")
    if tuple(state_of(path)) != state:
        raise DataError(f"{path}: has changed while it was read; start again once it is written")
    parts = [(part, each.name) for each in every for part in each.parts]
    numbers, start = _mapped(file, (here.done, len(parts)), "r+"), 0
    for each in every:
        each.values = numbers[:, start : start + len(each.parts)]
        start += len(each.parts)
    classes, class_names = _answers(path, wanted, targets)
    left_out |= _left_out(path, wanted, features)
    number = sum(len(each.parts) for each in targets)
    places = [(place, part) for place, (part, name) in enumerate(parts) if name not in left_out]
    about = {"shape": numbers.shape, "class_names": class_names, "left_out": left_out}
    about |= {"targets": places[:number], "features": places[number:]}
    return about | _number(features), classes


def _number(features: Sequence[Cells]) -> dict[str, Any]:
    """Write numbers in place of texts, and return what these are and where gaps are, by name."""
    for each in features:
        each.number()
    parts = [(part, each) for each in features for part in each.parts]
    return {
        "texts": {part: each.categories for part, each in parts if each.categories},
        "flags": {part: each.flags for part, each in parts if each.flags},
        "gaps": [part for part, each in parts if each.has_gaps],
    }


def _candidates(table: TableFile, wanted: Wanted) -> tuple[list[str], dict[str, str]]:
    """Return the columns that may be features, and why others are none if nobody has named any."""
    path, names, targets = table.path, table.names, wanted.targets
    # A run's features may be the columns of an array.
    features = [*dict.fromkeys(x if x in names else base(x) for x in wanted.features)]
    named = {"targets": targets, "features": features}
    if wanted.limit is not None:
        named |= {"features": wanted.features, "categories": wanted.categories}
        refuse_twice({"targets": targets, "features": wanted.features})
    for key, chosen in named.items():
        for name in chosen:
            if name not in names:
                has = f"no such column, it has {listed(names)}.{did_you_mean(name, names)}"
                raise ConfigError(f"dataset.{key}={name}: {path} has {has}")
    if features:
        return features, {}
    index = table.index - {*targets}
    if found := [name for name in names if name not in {*index, *targets}]:
        return found, {name: _INDEX for name in names if name in index}
    raise ConfigError(f"dataset.features: {path} has only targets; give it other columns")


def _refuse_damaged(table: TableFile, batch: Batch, before: int = 0) -> None:
    """Raise DataError for rows with too few or too many cells; `before` rows came before these."""
    for place, why in batch.damaged.items():
        header, cause = ", ".join(table.names)[:60], f"a {table.sign!r} in a cell needs quotes"
        raise DataError(
            f"{table.path}: row {before + place + 1} {why}, which line 1 names ({header}); {cause},"
            " a decimal sign is a point"
        )


def _answers(
    path: Path, wanted: Wanted, targets: Sequence[Cells]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the classes [N] and their names, if any, and write the numbers of flags.

    Raise DataError for wrong targets.
    """
    import numpy as np

    if wanted.kind == "class":
        (target,) = targets
        classes, names = classes_of(path, target)
        if wanted.limit is not None:
            check_learnable(path, target.name, classes, names)
        return classes, names
    fix = _LABELS if wanted.kind == "labels" else f"{FIX}, or use task=classification for classes"
    refuse(path, {each.name: each.odd_rows(fix) for each in targets})
    for each in targets:
        each.number()
        if wanted.kind == "labels":
            check_labels(path, each.parts, each.values)
    return np.empty(0, np.int64), ()


def _left_out(path: Path, wanted: Wanted, features: Sequence[Cells]) -> dict[str, str]:
    """Return why columns that nobody chose are no features: they number the rows, or are empty.

    Raise where others can't be used, or there are no others.
    """
    wrong = {each.name: each.problem(wanted.limit) for each in features}
    empty = [each.name for each in features if each.is_empty]
    if wanted.features:
        learns = wanted.limit is not None
        refuse(path, wrong | dict.fromkeys(empty * learns, f" {_EMPTY}; leave it out"))
        return {}
    single = [each for each in features if len(each.parts) == 1 and not each.texts]
    counters = [each.name for each in single if counts_rows(each.values[:, 0])]
    left = dict.fromkeys(empty, _EMPTY) | dict.fromkeys(counters, _COUNTER)
    usable = [name for name in wrong if name not in left and not wrong[name]]
    refuse(path, wrong, f"; or leave it out: {word(usable)}" if usable else "")
    if not usable:
        raise ConfigError(
            f"dataset.features: {path} has only the targets and {listed(wrong)}"
            f" ({', '.join(left.values())}); if it is to be learned from: {word([*wrong])}"
        )
    return left


def word(features: Sequence[str]) -> str:
    """Return the override that chooses features."""
    from expt.runs.request import joined, literal  # late: it imports all kinds of datasets

    return joined([f"dataset.features={literal([*features])}"])


def refuse_twice(chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a column that is named twice, or is to be predicted from itself."""
    names = [name for each in chosen.values() for name in each]
    if twice := next((name for name in names if names.count(name) > 1), None):
        keys = " and ".join(f"dataset.{key}" for key, each in chosen.items() if twice in each)
        raise ConfigError(f"{keys}={twice}: is named twice; name it once")
