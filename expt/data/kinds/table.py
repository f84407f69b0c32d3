"""Tables: rows of numbers, with some columns that are to be predicted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import IS_SET, STRICT, Count, Key, Name, typed
from expt.data.columns import may_be_ids
from expt.data.folders import files_below, left_out, report_left_out
from expt.data.kinds import (
    DatasetConfig,
    Group,
    HeldOut,
    OfTexts,
    Opening,
    Place,
    Standardise,
    TargetTransform,
    ValSplit,
)
from expt.data.rows import Rows, Wanted, differ_in_case, features_word, load, with_logs
from expt.data.table_files import files_of, fingerprint, open_table
from expt.errors import listed, warn_once
from expt.features import ROLES, Anything, Classes, Features, Labels, Numbers, Tokens

if TYPE_CHECKING:
    from expt.data.source import Source
    from expt.data.texts import Texts

DIABETES = Path(__file__).parents[1] / "diabetes.csv"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Table(DatasetConfig):
    if TYPE_CHECKING:
        path: Any
        targets: Any
        features: Any
        categories: Any
        max_categories: int
        group: str | None
    standardise: Standardise
    standardise_targets: Standardise
    test_fraction: HeldOut
    target_transform: TargetTransform = None
    val_split: ValSplit = "random"
    mean: None = None  # of images
    std: None = None

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """See DatasetConfig; another table that is evaluated has the columns of a run."""
        if (path := Path(self.path)).is_dir():
            paths = [x for x in files_below(path) if not _is_about(Path(x).relative_to(path))]
            report_left_out(path, left_out(paths, map(str, files_of(path))), "part of the table")
        if learns:
            for note in notes_of(self.load(task), are_chosen=self.features is not None):
                warn_once(f"{self.path}: {note}")
        else:
            files_of(path)

    def described(self, task: Any) -> str:
        rows = self.load(task)
        names, targets = rows.class_names, rows.target_names
        features = rows.feature_names or self.texts[1]
        held = f"; held out by {self.group}" if self.group else ""
        kind = f"{len(names)} classes: {listed(names)}" if names else "numbers"
        target = f"{listed(targets)} ({kind})" if targets else "the tokens that follow"
        left = listed([f"{name} ({why})" for name, why in rows.left_out.items()])
        name = Path(self.path).name
        return (
            f"{name}: {rows.features.shape[0]:,} rows; target {target};"
            f" features {listed(features, 12)}{held}{left and '; left out: '}{left}"
        )

    def measured(self) -> Literal["test", "all"]:
        return "all"

    def opening(self) -> Literal["at once", "slowly", "in turn"]:
        return "slowly" if self.texts[1] else "at once"

    def load(self, task: Any, trained_on: Features | None = None) -> Rows:
        """Return the rows, as the configured `task` takes their targets; see `rows.load`.

        If nobody names features, they are those that a run was `trained_on`, by its record.
        """
        columns = wanted_columns(self, self.targets, self.features, task, trained_on)
        rows = load(Path(self.path), columns)
        return with_logs(rows, self.target_transform, Path(self.path).name)

    def open(self, how: Opening) -> Source:
        """Return the rows; those of the test are drawn equally for all runs, or are the last."""
        from expt.data.table_source import of_rows, parts_of

        table = self.load(how.task, how.trained_on)
        if self.texts[1]:
            table = table._replace(read=self._texts(how.task))
        parts = parts_of(table, self.test_fraction, self.val_split)
        return of_rows(self, table, parts, how)

    def _texts(self, task: Any) -> Texts:
        from expt.data import texts

        path, is_causal = Path(self.path), self.is_causal(task)
        return texts.read(self, lambda: open_table(path), fingerprint(path), is_causal=is_causal)

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return the file and the row, counted from 1."""
        from expt.data.table_source import parts_of

        parts = parts_of(self.load(task), self.test_fraction, self.val_split)
        chosen: list[int] = parts["test" if split == "test" else "train"].tolist()
        return lambda index: {"path": str(self.path), "row": chosen[index] + 1}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Table(_Table, OfTexts):
    """A custom table."""

    name: Literal["table"]
    path: Place
    targets: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None
    features: Annotated[Annotated[tuple[Name, ...], Field(min_length=1)] | None, Key(evaluate=True)]
    categories: Annotated[tuple[Name, ...], Key(only_if={"dataset.categories": IS_SET})] = ()
    max_categories: Annotated[Count, Key(result="none")] = 100
    group: Group = None

    OFFERS = (Classes, Numbers, Labels, Tokens)

    def problems(self, task: Any) -> list[str]:
        standardises, transform = self.standardise_targets, self.target_transform
        found, is_causal = self.problems_of_texts(task), self.is_causal(task)
        if is_causal == (self.targets is not None):
            problem = "the texts' tokens are predicted; leave it out"
            if not is_causal:
                problem = "name the column to predict, or several"
                with contextlib.suppress(Exception):  # of a file, which is reported when it is read
                    problem += f": {self.path} has {listed(open_table(Path(self.path)).names, 30)}"
            found.append(f"dataset.targets={typed(self.targets)}: {problem}")
        if self.features is not None and self.texts[1]:
            found.append("dataset.features: the inputs are texts; leave it out")
        return found + problems_of_columns("targets", self.targets, standardises, task, transform)

    def fingerprint(self) -> str:
        return self.with_tokenizer(fingerprint(Path(self.path)))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Diabetes(_Table):
    """442 real patients, in the package."""

    name: Literal["diabetes"]

    OFFERS = (Numbers,)
    path, targets, features = str(DIABETES), "progression", None
    categories, max_categories, group = (), 100, None


def notes_of(rows: Rows, *, are_chosen: bool) -> Iterator[str]:
    """Yield warnings of lost input, odd classes, and odd features if nobody has chosen them."""
    yield from rows.notes
    texts: dict[str, Sequence[str]] = {"classes": rows.class_names}
    texts |= {f"column {name}: categories": each for name, each in rows.texts.items()}
    for where, each in texts.items():
        yield from differ_in_case(where, each)
    ids, others = list[str](), list[str]()
    for place, name in enumerate(rows.feature_names):
        is_number = name not in rows.texts and name not in rows.ways
        is_id = is_number and may_be_ids(rows.features.columns([place])[:][:, 0])
        (ids if is_id else others).append(name)
    if not are_chosen and ids and others:
        yield (
            f"column {listed(ids)} has a different integer in each row: if that is an ID, or gives"
            f" the rows' order away, leave it out ({features_word(others)}), or keep it"
            f" ({features_word(rows.feature_names)})"
        )


def wanted_columns(
    dataset: Any,
    targets: str | Sequence[str] | None,
    features: Sequence[str] | None,
    task: Any,
    trained_on: Features | None,
) -> Wanted:
    """Return the columns that the configured `task` takes of a table.

    If nobody names features, they are those that a run was `trained_on`, by its record.
    """
    run = trained_on and trained_on.inputs
    encoded, known = getattr(run, "encoded", {}), run.names if run else ()
    texts = [name for name, how in encoded.items() if "categories" in how]
    role, columns = dataset.texts
    if columns:
        features, targets = (), () if dataset.is_causal(task) else targets
    return Wanted(
        targets=names_of(targets),
        features=tuple(features) if features is not None else known or None,
        texts=tuple(zip(ROLES.get(role, ()), columns, strict=False)),
        takes=getattr(task, "takes", Numbers),
        categories=tuple(texts if run else dataset.categories),
        limit=None if run else dataset.max_categories,
        group=dataset.group,
        ways=tuple((name, how["way"]) for name, how in encoded.items() if "way" in how),
    )


def names_of(columns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that a key names: none, one or several."""
    return (columns,) if isinstance(columns, str) else tuple(columns or ())


def problems_of_columns(
    key: str,
    targets: str | Sequence[str] | None,
    standardises: bool,
    task: Any,
    transform: str | None = None,
) -> list[str]:
    """Return which of the keys of columns don't go with the task, one line each."""
    problems = []
    if task.takes is Classes and len(names := names_of(targets)) > 1:
        fault = f"dataset.{key} names {len(names)} columns, and a class is one"
        fix = "name one, or use task=multilabel or task=regression"
        problems.append(f"task=classification: {fault}; {fix}")
    is_regression = task.takes.has_unit or task.takes is Anything
    if standardises and not is_regression:
        fault = "is of numbers to predict; use false, or task=regression"
        problems.append(f"dataset.standardise_targets=true: {fault}")
    if transform and task.takes is not Numbers:
        problems.append(f"dataset.target_transform={transform}: is for task=regression; use null")
    return problems


def _is_about(path: Path) -> bool:
    """Return whether a file is about a table, as `_SUCCESS` or one in `_delta_log`."""
    return any(part.startswith("_") and "=" not in part for part in path.parts)
