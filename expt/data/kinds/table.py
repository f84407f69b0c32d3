"""Tables: rows of numbers, of which some columns are to be predicted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key
from expt.data.cache import of_content, state_of
from expt.data.columns import (
    FIX,
    Column,
    check_labels,
    check_learnable,
    classes_of,
    columns_of,
    numbers_of,
)
from expt.data.kinds import DatasetConfig, HeldOut, Place, Standardise
from expt.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:  # it takes as long to import as Hydra, and many a run has no arrays in its driver
    import numpy as np
    import torch

    from expt.data.source import Source

Kind: TypeAlias = Literal["class", "label", "number"]
_LABELS = "a label is 0 or 1: give each a column of them, or use task=classification"
_KINDS: dict[str, Kind] = {"class": "class", "labels": "label"}
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
    """empty where the targets are no classes"""


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
        """See DatasetConfig."""
        return "row"

    @property
    def file(self) -> Path:
        """The table. Raise DataError where it is missing."""
        if not (path := Path(self.path)).is_file():
            raise DataError(f"dataset.path={path}: there is no such file")
        return path

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """See DatasetConfig."""
        self.load(task, learns=learns)

    def load(self, task: Any, *, learns: bool = True) -> Rows:
        """Return the rows, as the configured `task` takes their targets.

        Raise ConfigError for columns that are not there, DataError for a file or a cell that cannot
        be read, and where the task `learns` of them for classes of which nothing can be learned.
        """
        targets, features = names_of(self.targets), self.features
        kind = _KINDS.get(getattr(task, "TARGETS", ""), "number")
        rows = _load(self.file, tuple(state_of(self.file)), targets, features, kind)
        if learns and rows.class_names:
            check_learnable(self.file, targets[0], rows.targets, rows.class_names)
        return rows

    def open(
        self,
        task: Any,
        device: torch.device,
        num_workers: int,
        trained_on: Mapping[str, Any] | None = None,
    ) -> Source:
        """Return the rows, of which a part drawn alike for all runs is the test set."""
        from expt.data import memory

        table = self.load(task, learns=trained_on is None)
        parts = memory.drawn_parts(len(table.features), self.test_fraction)
        return memory.of_rows(self, table, parts, device, trained_on)

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return the file and the row, counted from 1."""
        from expt.data.memory import drawn_parts

        number = len(self.load(task, learns=False).features)
        parts = drawn_parts(number, self.test_fraction)
        chosen: list[int] = parts["test" if split == "test" else "train"].tolist()
        return lambda index: {"path": str(self.file), "row": chosen[index] + 1}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Table(_Table):
    """A custom table."""

    name: Literal["table"]
    path: Place
    targets: str | Annotated[tuple[str, ...], Field(min_length=1)]
    features: Annotated[Annotated[tuple[str, ...], Field(min_length=1)] | None, Key(evaluate=True)]

    TASKS = ("classification", "regression", "multilabel")

    def problems(self, task: Any) -> list[str]:
        """See DatasetConfig."""
        return problems_of_columns("targets", self.targets, self.standardise_targets, task)

    def fingerprint(self) -> str:
        """See DatasetConfig."""
        return of_content([self.file])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Diabetes(_Table):
    """442 real patients, in the package."""

    name: Literal["diabetes"]

    TASKS = ("regression",)
    path, targets, features = str(DIABETES), "progression", None


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
    features: tuple[str, ...] | None,
    kind: Kind,
) -> Rows:
    columns = columns_of(path)
    given, features = features, _chosen(path, columns, targets, features)
    if not len(columns[features[0]]):
        raise DataError(f"{path}: has no rows; give it some")
    fix = FIX if given else "name the columns of numbers, as in 'dataset.features=[a,b]', or fix it"
    found, feature_names = numbers_of(path, columns, features, fix)
    if kind == "class":
        answers, class_names = classes_of(path, targets[0], columns[targets[0]])
        return Rows(found, answers, feature_names, targets, class_names)
    answers, target_names = numbers_of(path, columns, targets, _LABELS if kind == "label" else FIX)
    if kind == "label":
        check_labels(path, target_names, answers)
    return Rows(found, answers, feature_names, target_names, ())


def _chosen(
    path: Path,
    columns: Mapping[str, Column],
    targets: Sequence[str],
    features: Sequence[str] | None,
) -> tuple[str, ...]:
    for name in (*targets, *(features or ())):
        if name not in columns:
            has = ", ".join(list(columns)[:20]) + (", ..." if len(columns) > 20 else "")
            raise ConfigError(
                f"dataset.{'targets' if name in targets else 'features'}={name}: {path} has no such"
                f" column, it has {has}.{did_you_mean(name, list(columns))}"
            )
    refuse_twice({"targets": targets, "features": features or ()})
    found = tuple(name for name in (features or columns) if name not in targets)
    if not found:
        raise ConfigError(f"dataset.features: {path} has no column beside the targets; give it one")
    return found


def refuse_twice(chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a column that is named twice, or is to be predicted from itself."""
    names = [name for each in chosen.values() for name in each]
    if twice := next((name for name in names if names.count(name) > 1), None):
        keys = " and ".join(f"dataset.{key}" for key, each in chosen.items() if twice in each)
        raise ConfigError(f"{keys}={twice}: is named twice; name it once")
