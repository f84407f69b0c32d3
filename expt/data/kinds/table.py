"""Tables: rows of numbers, of which some columns are to be predicted."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key, Name
from expt.data.cache import of_content, state_of
from expt.data.columns import (
    FIX,
    Columns,
    base,
    check_labels,
    check_learnable,
    classes_of,
    columns_of,
    counts_rows,
    is_feature,
    is_number,
    may_be_ids,
    numbers_of,
)
from expt.data.image_files import warn_once
from expt.data.kinds import DatasetConfig, HeldOut, Place, Standardise
from expt.errors import ConfigError, DataError, did_you_mean, listed

if TYPE_CHECKING:  # it takes as long to import as Hydra, and many a run has no arrays in its driver
    import numpy as np
    import torch

    from expt.data.source import Source

_LABELS = "a label is 0 or 1: give each a column of them, or use task=classification"
_TEXTS = "give it a number, or its texts a column each (pandas.get_dummies), or remove the row"
_INDEX, _COUNTER = "the index of pandas, or without a name", "counts the rows"
DIABETES = Path(__file__).parents[1] / "diabetes.csv"


class Rows(NamedTuple):
    """A table as a task takes it."""

    features: np.ndarray
    """float64 [N, F]"""
    targets: np.ndarray
    """float64 [N, T]; classes int64 [N]"""
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    class_names: tuple[str, ...]
    """empty where the targets are not classes"""
    left_out: Mapping[str, str] = {}
    """Why columns that nobody named are not features."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Table(DatasetConfig):
    if TYPE_CHECKING:
        path: Any
        targets: Any
        features: Any
    standardise: Standardise
    standardise_targets: Standardise
    test_fraction: HeldOut
    mean: None = None  # of images
    std: None = None

    default_split = "all"
    names_classes = True
    has_rows = True

    @classmethod
    def noun(cls, settings: Mapping[str, Any]) -> str:
        return "row"

    @property
    def file(self) -> Path:
        """The table. Raise DataError where it is missing."""
        if not (path := Path(self.path)).is_file():
            what = "is a folder; give one file" if path.is_dir() else "there is no such file"
            raise DataError(f"dataset.path={path}: {what}")
        return path

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """See DatasetConfig; what else is measured has the columns of a run, see `open`."""
        if learns:
            for note in _notes(self.load(task), are_chosen=self.features is not None):
                warn_once(f"{self.path}: {note}")
        else:
            assert self.file

    def described(self, task: Any) -> str:
        rows = self.load(task)
        names, targets, features = rows.class_names, rows.target_names, rows.feature_names
        kind = f"{len(names)} classes: {listed(names)}" if names else "numbers"
        left = listed([f"{name} ({why})" for name, why in rows.left_out.items()])
        return (
            f"{self.file.name}: {len(rows.features)} rows; target {listed(targets)} ({kind});"
            f" features {listed(features, 12)} (numbers){left and '; left out: '}{left}"
        )

    def load(self, task: Any, trained_on: Mapping[str, Any] | None = None) -> Rows:
        """Return the rows, as the configured `task` takes their targets.

        If nobody names features, they are those that a run was `trained_on`, by its record. Raise
        ConfigError for columns that are not there, DataError for a file or a cell that cannot be
        read, and without a run for classes of which nothing can be learned.
        """
        targets, known = names_of(self.targets), tuple((trained_on or {}).get("feature_names", ()))
        kind, state = getattr(task, "TARGETS", "numbers"), tuple(state_of(self.file))
        return _load(self.file, state, targets, self.features or (), known, kind)

    def open(
        self,
        task: Any,
        device: torch.device,
        num_workers: int,
        trained_on: Mapping[str, Any] | None = None,
    ) -> Source:
        """Return the rows, of which a part drawn alike for all runs is the test set."""
        from expt.data import memory

        table = self.load(task, trained_on)
        parts = memory.drawn_parts(len(table.features), self.test_fraction)
        return memory.of_rows(self, table, parts, device, trained_on)

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return the file and the row, counted from 1."""
        from expt.data.memory import drawn_parts

        number = len(next(iter(columns_of(self.file).values())))
        parts = drawn_parts(number, self.test_fraction)
        chosen: list[int] = parts["test" if split == "test" else "train"].tolist()
        return lambda index: {"path": str(self.file), "row": chosen[index] + 1}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Table(_Table):
    """A custom table."""

    name: Literal["table"]
    path: Place
    targets: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    features: Annotated[Annotated[tuple[Name, ...], Field(min_length=1)] | None, Key(evaluate=True)]

    TASKS = ("classification", "regression", "multilabel")

    def problems(self, task: Any) -> list[str]:
        return problems_of_columns("targets", self.targets, self.standardise_targets, task)

    def fingerprint(self) -> str:
        return of_content([self.file])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Diabetes(_Table):
    """442 real patients, in the package."""

    name: Literal["diabetes"]

    TASKS = ("regression",)
    path, targets, features = str(DIABETES), "progression", None


def _notes(rows: Rows, *, are_chosen: bool) -> Iterator[str]:
    """Yield what may not be meant of classes, and of features if nobody has chosen them."""
    spelled = sorted(("".join(name.split()).casefold(), name) for name in rows.class_names)
    number = Counter(plain for plain, _ in spelled)
    if alike := listed(repr(name) for plain, name in spelled if number[plain] > 1):
        yield f"classes differ only in case or spaces: {alike}; write those alike that are one"
    names = rows.feature_names
    ids = [name for name, each in zip(names, rows.features.T, strict=True) if may_be_ids(each)]
    if not are_chosen and 0 < len(ids) < len(names):
        yield (
            f"column {listed(ids)} has a different integer in each row: if that is an ID, or gives"
            f" the rows' order away, leave it out ({_word([x for x in names if x not in ids])}), or"
            f" keep it ({_word(names)})"
        )


def names_of(columns: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a key names, one or several."""
    return (columns,) if isinstance(columns, str) else tuple(columns)


def problems_of_columns(
    key: str, targets: str | Sequence[str], standardises: bool, task: Any
) -> list[str]:
    """Return which of the keys of columns don't go with the task, one line each."""
    problems, classifies = [], task.TARGETS == "class"
    if classifies and len(names_of(targets)) > 1:
        problems.append(
            f"task=classification: dataset.{key} names {len(targets)} columns, and a class is one;"
            " name one, or use task=multilabel or task=regression"
        )
    if standardises and classifies:
        problems.append(
            "dataset.standardise_targets=true: is of numbers to predict; use false, or"
            " task=regression"
        )
    return problems


@functools.lru_cache(maxsize=1)  # the driver checks it for each run of a sweep
def _load(
    path: Path,
    _state: tuple[int, ...],
    targets: tuple[str, ...],
    features: tuple[str, ...],
    known: tuple[str, ...],
    kind: str,
) -> Rows:
    columns = columns_of(path)
    for key, chosen in (("targets", targets), ("features", features)):
        _refuse_missing(path, columns, key, chosen)
    refuse_twice({"targets": targets, "features": features})
    if not len(columns[targets[0]]):
        raise DataError(f"{path}: has no rows; give it some")
    class_names = tuple[str, ...]()
    if kind == "class":
        (target,) = target_names = targets
        answers, class_names = classes_of(path, target, columns[target])
        if not known:
            check_learnable(path, target, answers, class_names)
    else:
        fix = _LABELS if kind == "labels" else FIX
        answers, target_names = numbers_of(path, columns, targets, fix)
        if kind == "labels":
            check_labels(path, target_names, answers)
    found, names, left_out = _features(path, columns, targets, features, known)
    return Rows(found, answers, names, target_names, class_names, left_out)


def _features(
    path: Path,
    columns: Columns,
    targets: Sequence[str],
    features: Sequence[str],
    known: Sequence[str],
) -> tuple[np.ndarray, tuple[str, ...], dict[str, str]]:
    """Return the features, their names, and why others are left out if nobody chose any."""
    if features or known:
        run = {*known, *map(base, known)}
        if chosen := [*features] or [name for name in columns if name in run]:
            return *numbers_of(path, columns, chosen, _TEXTS), {}
        raise ConfigError(
            f"dataset.features: {path} has none of the run's columns {listed(known)}; give it these"
        )
    left_out = {name: _INDEX for name in columns if name in columns.index - {*targets}}
    chosen = [name for name in columns if name not in (*targets, *left_out)]
    if not chosen:
        raise ConfigError(f"dataset.features: {path} has only targets; give it other columns")
    try:
        found, names = numbers_of(path, columns, chosen, _TEXTS)
    except DataError as error:
        numbers = [name for name in chosen if is_feature(columns[name])]
        more = f", or use the columns of numbers only: {_word(numbers)}" if numbers else ""
        raise DataError([f"{error.problems[0]}{more}", *error.problems[1:]]) from None
    numbered = zip(names, found.T, strict=True)
    counters = [name for name, each in numbered if name in columns and counts_rows(each)]
    if len(counters) == len(names):
        raise ConfigError(
            f"dataset.features: {path} has only the targets and {listed(names)}"
            f" ({_COUNTER}); if it is to be learned from: {_word(names)}"
        )
    kept = [place for place, name in enumerate(names) if name not in counters]
    left_out |= dict.fromkeys(counters, _COUNTER)
    return found[:, kept], tuple(names[place] for place in kept), left_out


def _word(features: Sequence[str]) -> str:
    from expt.runs.request import joined, literal  # late: it imports all kinds of datasets

    return joined([f"dataset.features={literal([*features])}"])


def _refuse_missing(path: Path, columns: Columns, key: str, names: Sequence[str]) -> None:
    """Raise ConfigError for a column that is not there, DataError where the names are numbers."""
    for name in names:
        if name in columns:
            continue
        if all(map(is_number, columns)):
            raise DataError(
                f"{path}: its first line is one of numbers ({listed([*columns])}), and none is"
                f" {name}; name the columns there"
            )
        raise ConfigError(
            f"dataset.{key}={name}: {path} has no such column, it has {listed([*columns])}"
            f".{did_you_mean(name, list(columns))}"
        )


def refuse_twice(chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a column that is named twice, or is to be predicted from itself."""
    names = [name for each in chosen.values() for name in each]
    if twice := next((name for name in names if names.count(name) > 1), None):
        keys = " and ".join(f"dataset.{key}" for key, each in chosen.items() if twice in each)
        raise ConfigError(f"{keys}={twice}: is named twice; name it once")
