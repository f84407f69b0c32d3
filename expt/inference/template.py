"""Predictions in the columns and the order of a template, such as a competition's submission."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expt.data.columns import are_numbers, texts_of
from expt.data.picture_tables import NamedPictures, separator_of
from expt.data.table_files import Uses, open_table
from expt.errors import ConfigError, absent, did_you_mean, listed, warn
from expt.features import Answers, Classes, Feature, Labels, Numbers
from expt.features.feature import apart
from expt.inference.inputs import ARRAYS
from expt.inference.plan import Plan
from expt.inference.writing import Write, csv_cells, new_file

_COMMA = re.compile(r"-?(0,\d+|[\d.]+,(\d\d?|\d{4,}))")
"""A number with a decimal comma; that of 1,234 may be between thousands."""


class Fill(NamedTuple):
    """The part of a prediction that fills a column."""

    words: str
    cell: Callable[[Any, Mapping[str, Any]], Any]
    """Return a cell, by an answer and its cells."""


class Template:
    """A table whose other columns are filled by predictions, matched by a column of ids."""

    def __init__(self, path: Path, plan: Plan) -> None:
        """Read it. Pictures are matched by their names, rows of tables by a column's cells.

        Raise ConfigError where no column names the pictures, DataError where one is named twice.
        """
        files = [*dict.fromkeys(map(os.path.abspath, plan.inputs.files))]
        if path.suffix.lower() != ".csv" or not path.is_file():
            raise ConfigError(f"--template {path}: {absent(path, '.csv')}")
        if plan.form.each == "pixel" or not files or files[0].endswith(ARRAYS):
            raise ConfigError("--template: is for pictures and tables in files, and no masks")
        self.path, self.table = path, open_table(path)
        batches = [*self.table.batches(self.table.names, uses=Uses(kept=self.table.names))]
        self.columns = {
            name: [text for batch in batches for text in texts_of(batch.column(name))]
            for name in self.table.names
        }
        self.id, self.keys, self._own = "", list[str](), plan.inputs.columns
        self.kept: Sequence[str] = ()
        """Columns that stay as they are."""
        self.filled: dict[str, Fill] = {}
        """The fill of each column, once there are predictions."""
        self.by_pictures = bool(plan.inputs.pictures)
        if self.by_pictures:
            known = NamedPictures(os.path.commonpath([*map(os.path.dirname, files)]), files)
            others = {x: cells for x, cells in self.columns.items() if x not in plan.form.columns}
            if (column := known.column_in(others, f"--template {path}")) is None:
                raise ConfigError(f"--template {path}: no column names the pictures to predict for")
            self.id, self.keys = column, [""] * len(self.columns[column])
            for place, row in known.rows_of(self.columns[column], f"--template {path}")[0].items():
                self.keys[row] = files[place]

    def key(self, about: Mapping[str, Any]) -> str:
        """Return the id of a sample. Raise ConfigError where a table has no such column."""
        if self.by_pictures:
            return os.path.abspath(str(about["path"]))
        names = {x: y if y in about else f"table.{y}" for x, y in self._own.items()}  # named apart
        cells = {**about, **{x: about[y] for x, y in names.items() if y in about}}
        if not self.id:
            there = [name for name in self.columns if name in cells]
            if not there:
                fault = "no column is one of the table's that are no features"
                near = next(filter(None, (did_you_mean(x, self._own) for x in self.columns)), "")
                has = f"({listed(self._own) or 'none'}); add the column of ids{near and '.'}{near}"
                raise ConfigError(f"--template {self.path}: {fault} {has}")
            self.id = next((name for name in there if name in self._own), there[0])
            self.keys = self.columns[self.id]
        return str(cells[self.id])

    def fills(self, form: Feature, cells: Mapping[str, Any]) -> dict[str, Fill]:
        """Return a function for each other column. Raise ConfigError for unknown columns.

        A prediction has the `cells`. A single column is filled by its examples, unless it has the
        name of a class, a label or a target.
        """
        found, others = dict[str, Fill](), list[str]()
        rest = [name for name in self.columns if name != self.id]
        if not rest:
            raise ConfigError(f"--template {self.path}: has no column but {self.id}; add one")
        own = {*form.names, *(f"p_{name}" for name in form.names)}
        if len(rest) == 1 and rest[0] not in own and (fill := self._only(form, rest[0], cells)):
            return {rest[0]: fill}
        for name in rest:
            if name == "labels" and isinstance(form, Labels):
                found[name] = self._labels(name)
            elif cell := next((x for x in (name, apart(name), f"p_{name}") if x in cells), ""):
                found[name] = _cell(cell)
            elif name in form.columns and (fill := self._only(form, name, cells)):
                found[name] = fill
            else:
                others.append(name)
        whole = {"class", "labels", *([] if isinstance(form, Numbers) else form.columns)}
        has_each = all({name, f"p_{name}"} & found.keys() for name in form.names)
        if found and (has_each or whole & found.keys()):  # all that is predicted has a column
            self.kept = others
        elif not found and len(others) == 1 and (fill := self._only(form, others[0], cells)):
            found[others[0]] = fill
        elif others:
            fix = f"predictions have {listed(cells)}; a class or label fills the column of its name"
            raise ConfigError(f"--template {self.path}: nothing fills {listed(others)}; {fix}")
        return found

    def _only(self, form: Feature, name: str, cells: Mapping[str, Any]) -> Fill | None:
        """Return the function of a column of any name: written as the template's examples are."""
        examples, names = {*map(_with_point, self.columns[name])} - {""}, form.names
        if isinstance(form, Labels):
            return self._labels(name)
        if not isinstance(form, Classes):
            own = apart(names[0]) if len(names) == 1 else ""
            return _cell(own) if own in cells else None
        of_numbers = bool(examples) and are_numbers(examples)
        has_fractions = of_numbers and not all(float(x).is_integer() for x in examples)
        is_number = isinstance(cells.get(name), float)  # of the predictions
        if len(names) == 2 and (is_number or has_fractions):
            return _cell(f"p_{names[1]}") if f"p_{names[1]}" in cells else None
        if is_number:
            return _cell(name)
        if of_numbers and not are_numbers(names) and not examples <= {*names}:
            return Fill("the class's number", lambda answer, _: names.index(answer["class"]))
        return _cell("class")

    def _labels(self, name: str) -> Fill:
        """Return the function of a column of labels, with the sign that is between its examples."""
        examples = self.columns[name]
        sign = separator_of(examples) or (" " if any(" " in x for x in examples) else ";")
        return Fill(f"labels, {sign!r} between", lambda answer, _: sign.join(answer["labels"]))


def _with_point(text: str) -> str:
    return text.replace(".", "").replace(",", ".") if _COMMA.fullmatch(text) else text


def _cell(name: str) -> Fill:
    return Fill(name, lambda _, cells: cells.get(name, ""))


@contextlib.contextmanager
def to_template(template: Template, output: Path, *, force: bool) -> Iterator[Write]:
    """Yield a function that collects answers, which are then written as the template has them.

    Warn of ids without a prediction, whose cells are empty, and of predictions that it has no row
    for. Raise ConfigError where it has other columns.
    """
    rows, fills, columns = dict[str, dict[str, Any]](), template.filled, template.columns
    commas = {name for name, texts in columns.items() if any(map(_COMMA.fullmatch, texts))}
    if commas and template.table.separator != ",":  # else other columns show points
        commas |= {name for name, texts in columns.items() if not any("." in x for x in texts)}

    def written(name: str, cell: Any) -> Any:
        return str(cell).replace(".", ",") if name in commas and type(cell) is float else cell

    def write(answers: Answers, form: Feature) -> None:
        for about, answer in zip(answers.about, form.answers(answers), strict=True):
            key = template.key(about)
            cells = csv_cells(form, {x: answer[x] for x in answer if x not in about})
            if not fills:
                fills.update(template.fills(form, cells))
            found = {name: fill.cell(answer, cells) for name, fill in fills.items()}
            if rows.setdefault(key, found) != found:
                fault = f"several rows have the {template.id} {key!r}, and other predictions"
                fix = "if another column has the ids, put it first"
                raise ConfigError(f"--template {template.path}: {fault}; {fix}")

    with new_file(output, force=force) as file:
        yield write
        ids = zip(columns[template.id], template.keys, strict=True)
        missing = [text for text, key in ids if key not in rows]
        surplus = sorted({*rows}.difference(template.keys))
        if rows and not template.keys:
            raise ConfigError(f"--template {template.path}: has no rows; write one for each id")
        if rows and len(missing) == len(template.keys):
            pair = f"{missing[0]!r}, and predictions are of {surplus[0]!r}"
            fault = f"its column {template.id} has none of the ids: it has {pair}"
            raise ConfigError(f"--template {template.path}: {fault}; write them in the same way")
        for names, fault in ((missing, "have no prediction"), (surplus, "have no row there")):
            if names:
                warn(f"--template {template.path}: {len(names)} ids {fault}: {listed(names, 5)}")
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, delimiter=template.table.separator, lineterminator="\n")
        writer.writerow(columns)
        for place, key in enumerate(template.keys):
            kept = {name: columns[name][place] for name in (*template.kept, template.id)}
            filled = {**rows.get(key, {}), **kept}
            writer.writerow(written(name, filled.get(name, "")) for name in columns)
        text.detach()
