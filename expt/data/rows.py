"""The rows of a table, read once and mapped from the cache. Free of torch."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from expt import progress
from expt.data.cache import digest, read_or_fill
from expt.data.checksums import state_of
from expt.data.columns import (
    Column,
    are_numbers,
    base,
    check_labels,
    check_learnable,
    classes_of,
    counts_rows,
    refuse,
)
from expt.data.table_files import Table, Uses, files_of, fingerprint, open_table
from expt.data.written import LOCAL, is_date
from expt.errors import ConfigError, DataError, did_you_mean, listed
from expt.features import Classes, Encoding, Feature, Labels
from expt.late import np

Read: TypeAlias = "tuple[dict[str, Any], np.ndarray]"
"""The description of rows that were read, and their classes [N], if there are any."""
_LABELS = "a label is 0 or 1: give each a column of them, or use task=classification"
_INDEX, _COUNTER = "the index of pandas, or without a name", "counts the rows"
_IDS = "another text in each row"
_EMPTY = "has no values"
_BLOCK = 1 << 16
"""Numbers that are computed with at a time."""
_COUNTED = 10_000
"""Different texts of a column that are counted, to say how many there are."""


class Chosen:
    """Some columns [N, F] of numbers [N, K], which may lie in a file and are read when needed."""

    def __init__(
        self, numbers: np.ndarray, places: Sequence[int] | None = None, transform: str | None = None
    ) -> None:
        """Take the logarithm of each number where the `transform` is log or log1p."""
        self._numbers, self.transform = numbers, transform
        self._places = [*range(numbers.shape[1])] if places is None else [*places]
        self.shape = (len(numbers), len(self._places))

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return rows, float64; a slice of columns side by side is no copy."""
        first, last = min(self._places, default=0), max(self._places, default=-1)
        found: np.ndarray = self._numbers[:, first : last + 1][rows]
        if self._places != [*range(first, last + 1)]:
            # By take they lie row by row, so that sums have the bits of those over all columns.
            found = found.take([place - first for place in self._places], axis=1)
        return getattr(np, self.transform)(found) if self.transform else found

    def blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield these rows, some at a time.

        A single column comes at once, as NumPy does not add up its numbers one after the other.
        """
        number = max(1, len(rows)) if self.shape[1] == 1 else _BLOCK // max(1, self.shape[1]) + 1
        for start in range(0, len(rows), number):
            yield self[rows[start : start + number]]

    def columns(self, places: Sequence[int], transform: str | None = None) -> Chosen:
        """Return the columns at these places."""
        how = transform or self.transform
        return Chosen(self._numbers, [self._places[place] for place in places], how)


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
    """The texts of each feature that has texts; a cell is the index of one."""
    gaps: Sequence[str] = ()
    """Features with a gap in some row, which is nan."""
    flags: Mapping[str, Sequence[str]] = {}
    """The spellings of features that are yes and no, or true and false."""
    ways: Mapping[str, str] = {}
    """The ways in which numbers and dates are written, see `written.WAYS`."""
    encoded: Mapping[str, Encoding] = {}
    """The encodings of features that are texts or have gaps, see `table_source.Encoder`."""
    means: Mapping[str, float] = {}
    """The means of columns that are not standardised, for gaps in other rows."""
    scales: Mapping[str, tuple[float, float]] = {}
    """The mean and deviation that columns are standardised by."""
    parts: Mapping[str, int] = {}
    """The number of rows in train, val and test, if the table comes in parts."""
    groups: np.ndarray | None = None
    """The number of each row's group, int64 [N]."""
    notes: Sequence[str] = ()
    """Warnings of parts of the table that are not read."""
    read: Any = None
    """The `texts.Texts` that are inputs in place of features."""

    def places(self) -> dict[str, np.ndarray]:
        """Return where the rows of each part are."""
        ends = np.cumsum([*self.parts.values()])
        return dict(zip(self.parts, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))


class Wanted(NamedTuple):
    """The columns of a table that a run takes."""

    targets: tuple[str, ...]
    features: tuple[str, ...] | None
    """None: all other columns that are features"""
    takes: type[Feature]
    """the task's targets"""
    categories: tuple[str, ...] = ()
    """columns that are texts, whatever they hold"""
    limit: int | None = None
    """the most different texts in a column; any number where a run has learned them"""
    group: str | None = None
    """the column that says which rows are held out together"""
    ways: tuple[tuple[str, str], ...] = ()
    """the ways in which a run has read columns that are not written plainly"""
    texts: tuple[tuple[str, str], ...] = ()
    """keys and columns of texts, which are inputs in place of features"""

    @property
    def learns(self) -> bool:
        """False where a run is evaluated on the table."""
        return self.limit is not None


def load(path: Path, wanted: Wanted) -> Rows:
    """Return the rows of a table in a file or folder.

    Raise ConfigError for columns that are not there, DataError for a file or a cell that cannot be
    read, and, to learn from, for classes that can't be learned.
    """
    return _load(path, _state(path), wanted)


def _state(path: Path) -> tuple[object, ...]:
    return tuple((str(each), *state_of(each)) for each in files_of(path))


@functools.lru_cache(maxsize=1)  # the driver checks it for each run of a sweep
def _load(path: Path, state: tuple[object, ...], wanted: Wanted) -> Rows:
    def read(file: IO[bytes]) -> Read:
        found = read_rows(open_table(path), wanted, file)
        if _state(path) != state:
            fix = "start again once it is written"
            raise DataError(f"{path}: has changed while it was read; {fix}")
        return found

    words = digest((str(path.resolve()), repr(wanted)))
    return cached_rows(f"table-{words}.{fingerprint(path)}", read)


def cached_rows(name: str, read: Callable[[IO[bytes]], Read]) -> Rows:
    """Return the rows that `read` writes into a file, mapped from the cache if that can be."""

    def write(folder: Path) -> None:
        with (folder / "numbers").open("w+b") as file:
            about, classes = read(file)
            os.fsync(file.fileno())
        np.save(folder / "classes.npy", classes)
        (folder / "columns.json").write_text(json.dumps(about), encoding="utf-8")

    def map_entry(folder: Path) -> Rows:
        about = json.loads((folder / "columns.json").read_text(encoding="utf-8"))
        with (folder / "numbers").open("rb") as file:
            return rows_of(about, np.load(folder / "classes.npy", mmap_mode="c"), file)

    if found := read_or_fill(name, write, map_entry):
        return found
    with open(os.memfd_create("table"), "w+b") as file:
        return rows_of(*read(file), file)


def targets_as_trained(trained: Feature, rows: Rows, key: str) -> Rows:
    """Return rows with the targets of a run, in its order; a single one may have another name.

    Raise ConfigError where one is missing among those that a `key` names.
    """
    own, names = rows.target_names, tuple(trained.columns) or rows.target_names
    own = names if len(own) == len(names) == 1 else own
    if not isinstance(rows.targets, Chosen):
        return rows._replace(target_names=own)
    targets = rows.targets.columns(places_of(names, own, key))
    return rows._replace(targets=targets, target_names=names)


def places_of(names: Sequence[str], there: Sequence[str], key: str) -> list[int]:
    """Return the places of a run's columns. Raise ConfigError where one is missing."""
    if missing := [name for name in names if name not in there]:
        fault = f"there is no {missing[0]}, which the run was trained with"
        raise ConfigError(f"{key}: {fault}.{did_you_mean(missing[0], there)}")
    return [*map(there.index, names)]


def with_logs(rows: Rows, how: str | None, at: str) -> Rows:
    """Return rows with the logarithms of targets. Raise DataError for the first that has none."""
    if how is None or not isinstance(targets := rows.targets, Chosen):
        return rows
    if (wrong := targets[:] <= (-1 if how == "log1p" else 0)).any():
        row, place = np.argwhere(wrong)[0].tolist()
        where = f"{at}: column {rows.target_names[place]}, row {row + 1}"
        fault = f"{targets[row][place]:g} has no {how}; use log1p (above -1), or null"
        raise DataError(f"dataset.target_transform={how}: {where}: {fault}")
    return rows._replace(targets=targets.columns(range(targets.shape[1]), how))


def rows_of(about: Mapping[str, Any], classes: np.ndarray, file: IO[bytes]) -> Rows:
    """Return the rows that were read into a file, which they map."""
    numbers, names = _mapped(file, about["shape"]), tuple(about["class_names"])
    (target_places, targets), (places, features) = (
        zip(*about[each], strict=True) if about[each] else ((), ())
        for each in ("targets", "features")
    )
    answers = classes if names else Chosen(numbers, target_places)
    group = about["group"]
    groups = None if group is None else numbers[:, group].astype(int)
    keys = ("left_out", "texts", "gaps", "flags", "ways", "parts", "notes")
    same = {each: about[each] for each in keys}
    chosen = Chosen(numbers, places)
    return Rows(chosen, answers, features, targets, names, groups=groups, **same)


def _mapped(file: IO[bytes], shape: Sequence[int], mode: Any = "c") -> np.ndarray:
    file.flush()
    if 0 in shape:  # an empty file can't be mapped
        return np.empty(tuple(shape))
    return np.memmap(file, float, mode, shape=tuple(shape))


def read_rows(table: Table, wanted: Wanted, file: IO[bytes]) -> Read:
    """Write the numbers of a table; return their description, and the classes [N] if any."""
    names, left_out = _candidates(table, wanted)
    plain = () if wanted.takes is Classes else wanted.targets
    known = {x: each for x, each in table.classes.items() if x not in plain}
    uses = Uses(wanted.targets, [*dict(wanted.texts).values()], known)
    targets, features, groups = _columns(table, wanted, names, known)
    numbers = _write(table, [*targets, *features, *groups], uses, file)
    if wanted.learns:
        _refuse_either(table, [*targets, *features])
    for group in groups:
        _refuse_groups(table, group)
        group.texts_as(range(len(group.texts)))
    classes, class_names = _answers(table, wanted, targets)
    left_out |= _left_out(table, wanted, features)
    for each in features:
        each.number()
    parts = [(each.name, part) for each in (*targets, *features) for part in each.parts]
    places = [(place, part) for place, (name, part) in enumerate(parts) if name not in left_out]
    number = sum(len(each.parts) for each in targets)
    called = [part for _, part in places[number:]]
    if len({*called}) < len(called):
        twice = next(part for part in called if called.count(part) > 1)
        raise DataError(f"{table.path}: two columns become {twice}; rename one")
    of_part = {part: each for each in features for part in each.parts}
    about = {
        "shape": numbers.shape,
        "class_names": class_names,
        "left_out": left_out,
        "parts": table.parts,
        "notes": [*table.notes],
        "targets": places[:number],
        "features": places[number:],
        "group": len(parts) if groups else None,
        "texts": {part: each.categories for part, each in of_part.items() if each.categories},
        "flags": {part: each.flags for part, each in of_part.items() if each.flags},
        "ways": {
            **{each.name: each.way for each in targets if each.way},
            **{part: each.way for part, each in of_part.items() if each.way},
        },
        "gaps": [part for part, each in of_part.items() if each.has_gaps],
    }
    return about, classes


def _columns(
    table: Table, wanted: Wanted, names: Sequence[str], known: Mapping[str, Sequence[str]]
) -> tuple[list[Column], ...]:
    """Return the columns of targets, of features, which have the `names`, and of groups, if any."""
    are_texts, texts = wanted.takes is Classes, {*wanted.categories}
    texts.update(name for name in names if name in known and are_numbers(known[name]))
    most = math.inf if wanted.limit is None else max(wanted.limit + 1, _COUNTED)
    ways = {base(x, way) if is_date(way) else x: way for x, way in wanted.ways}
    targets = [
        Column(x, are_texts=are_texts or x in texts, known=known.get(x, ()), way=ways.get(x))
        for x in wanted.targets
    ]
    features = [
        Column(x, are_texts=x in texts, most=most, way=None if wanted.learns else ways.get(x, ""))
        for x in names
    ]
    # Another table that a run is evaluated on need not have groups.
    if not wanted.group or not (wanted.learns or wanted.group in table.names):
        return targets, features, []
    return targets, features, [Column(wanted.group, are_texts=True)]


def _write(table: Table, columns: Sequence[Column], uses: Uses, file: IO[bytes]) -> np.ndarray:
    """Write the numbers of the columns, which have them as their values; return all [N, K].

    Without columns there are as many rows as in those of texts.
    """
    names = [*dict.fromkeys(each.name for each in columns)] or [*uses.texts]
    with progress.phase(f"reading {table.path}", table.size) as here:
        for batch in table.batches(names, uses=uses):
            if found := [each.read(batch.column(each.name)) for each in columns]:
                file.write(np.ascontiguousarray(np.concatenate(found, axis=1)).data)
            here.done += batch.num_rows
    if not here.done:
        raise DataError(f"{table.path}: has no rows; give it some")
    numbers = _mapped(file, (here.done, sum(len(each.parts) for each in columns)), "r+")
    start = 0
    for each in columns:
        each.values = numbers[:, start : start + len(each.parts)]
        start += len(each.parts)
    return numbers


def _candidates(table: Table, wanted: Wanted) -> tuple[list[str], dict[str, str]]:
    """Return the columns that may be features, and why others are none if nobody has named any."""
    path, names, targets = table.path, table.names, wanted.targets
    # A run's features may be the columns of an array.
    ways = dict(wanted.ways)
    named_by = (x if x in names else base(x, ways.get(x, "")) for x in wanted.features or ())
    features = [*dict.fromkeys(named_by)]
    texts = {key: (column,) for key, column in wanted.texts}
    named = {"targets": targets, "features": features, **texts}
    group = (wanted.group,) if wanted.group else ()
    if wanted.learns:
        chosen = {"targets": targets, "features": wanted.features or (), "group": group, **texts}
        refuse_twice(chosen)
        named |= {**chosen, "categories": wanted.categories}
    for key, of_key in named.items():
        for name in of_key:
            if name not in names:
                has = f"no such column, it has {listed(names)}.{did_you_mean(name, names)}"
                has += "" if wanted.learns or key != "targets" else " `expt predict` needs none."
                has += table.header_below(name)
                raise ConfigError(f"dataset.{key}={name}: {path} has {has}")
    if wanted.features is not None:
        return features, {}
    index = table.index - {*targets, *group}
    others = {*index, *targets, *group}
    if found := [name for name in names if name not in others]:
        return found, {name: _INDEX for name in names if name in index}
    raise ConfigError(f"dataset.features: {path} has only targets; give it other columns")


def _answers(
    table: Table, wanted: Wanted, targets: Sequence[Column]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the classes [N] and their names, if any, and write the numbers of flags.

    Raise DataError for wrong targets.
    """
    path = table.path
    if wanted.takes is Classes:
        (target,) = targets
        classes, names = classes_of(path, target, table)
        if wanted.learns and (wanted.texts or wanted.features != ()):
            check_learnable(path, target.name, classes, names, table.key_of_targets)
        return classes, names
    more = "or remove the row, or use task=classification for classes"
    fixes = {x: _LABELS if wanted.takes is Labels else f"{x.remedy}, {more}" for x in targets}
    dates = {x.name: " holds dates, which are no targets" for x in targets if is_date(x.way)}
    refuse(path, {**{x.name: x.odd_rows(fix, table) for x, fix in fixes.items()}, **dates})
    for each in targets:
        each.number()
        if wanted.takes is Labels:
            check_labels(path, each, table)
    return np.empty(0, np.int64), ()


def _refuse_either(table: Table, columns: Sequence[Column]) -> None:
    """Raise DataError for numbers such as 1.234 where another column has 1.234,5."""
    local = next((each.name for each in columns if each.way == LOCAL), None)
    for each in columns if local else ():
        if text := each.may_be_local:
            whole = text.replace(".", "")
            why = f"may also be {whole}, for column {local} is written as {LOCAL}"
            fix = f"write {whole}"
            if text.count(".") == 1:
                fix += f" or {text.replace('.', ',')}"
            raise DataError(f"{table.path}: column {each.name}: {text} {why}; {fix}")


def _refuse_groups(table: Table, column: Column) -> None:
    """Raise DataError for rows without a group, or if there is only one."""
    at, problem = f"{table.path}: column {column.name}", ""
    if column.has_gaps:
        row = table.row(int((column.codes[:, 0] < 0).argmax()))
        raise DataError(f"{at}, {row}: has no group; give it one, or remove the row")
    if len(column.parts) > 1:
        problem = "holds lists"
    elif len(column.texts) < 2:
        problem = f"all rows are of {listed(column.texts)}"
    if problem:
        raise DataError(f"{at}: {problem}; groups are two or more; use another dataset.group")


def _left_out(table: Table, wanted: Wanted, features: Sequence[Column]) -> dict[str, str]:
    """Return why columns that nobody chose are no features: they name the rows, or are empty.

    Raise where others can't be used, or there are no others.
    """
    path = table.path
    wrong = {each.name: each.problem(wanted.limit, table) for each in features}
    empty = [each.name for each in features if not (each.has_numbers or each.texts)]
    if wanted.features is not None:
        if wanted.learns:
            wrong |= dict.fromkeys(empty, f" {_EMPTY}; leave it out")
        refuse(path, wrong)
        return {}
    single = [each for each in features if len(each.parts) == 1 and not each.texts]
    counters = [each.name for each in single if counts_rows(each.values[:, 0])]
    ids = [x.name for x in features if x.names_rows and not x.problem(None, table)]
    wrong |= dict.fromkeys(ids, "")
    left = dict.fromkeys(empty, _EMPTY) | dict.fromkeys(counters, _COUNTER)
    left |= dict.fromkeys(ids, _IDS)
    usable = [name for name in wrong if name not in left and not wrong[name]]
    refuse(path, wrong, f"; or leave it out: {features_word(usable)}" if usable else "")
    if not usable:
        texts = "; sentences are named as dataset.text" if ids else ""
        raise ConfigError(
            f"dataset.features: {path} has only the targets and {listed(wrong)}"
            f" ({', '.join(dict.fromkeys(left.values()))}); if it is to be learned from:"
            f" {features_word([*wrong])}{texts}"
        )
    return left


def features_word(features: Sequence[str]) -> str:
    """Return the word of a command line that chooses features."""
    from expt.config.constraints import typed
    from expt.runs.overrides import joined  # late: it imports all kinds of datasets

    return joined([f"dataset.features={typed([*features])}"])


def refuse_twice(chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a column that is named twice, or is to be predicted from itself."""
    names = [name for each in chosen.values() for name in each]
    if twice := next((name for name in names if names.count(name) > 1), None):
        keys = " and ".join(f"dataset.{key}" for key, each in chosen.items() if twice in each)
        raise ConfigError(f"{keys}={twice}: is named twice; name it once")


def differ_in_case(where: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a warning of names that differ in nothing but case or spaces, if there are some."""
    spelled = sorted(("".join(name.split()).casefold(), name) for name in names)
    number = Counter(plain for plain, _ in spelled)
    if several := listed(repr(name) for plain, name in spelled if number[plain] > 1):
        yield f"{where} differ only in case or spaces: {several}; write those alike that are one"
