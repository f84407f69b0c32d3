"""Predictions in the columns and the order of a template, such as a competition's submission."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expt.data.columns import are_numbers, texts_of
from expt.data.label_list import Pictures
from expt.data.table_files import open_table
from expt.errors import ConfigError, listed, warn
from expt.features import Answers, Classes, Feature
from expt.inference.inputs import ARRAYS
from expt.inference.plan import Plan
from expt.inference.writing import Write, csv_cells, new_file


class Template:
    """A table whose other columns are filled by predictions, matched by a column of ids."""

    def __init__(self, path: Path, plan: Plan) -> None:
        """Read it. Pictures are matched by their names, rows of tables by a column.

        Raise ConfigError where no column names the pictures.
        """
        files = plan.inputs.files if plan.inputs.pictures else ()
        if plan.split or plan.form.each == "pixel" or (files and files[0].endswith(ARRAYS)):
            raise ConfigError("--template: is for pictures and tables in files, and no masks")
        if path.suffix.lower() != ".csv" or not path.is_file():
            raise ConfigError(f"--template {path}: name a .csv that is there")
        table = open_table(path)
        batches = [*table.batches(table.names)]
        self.path, self.separator = path, table.separator
        self.columns = {
            name: [text for batch in batches for text in texts_of(batch.column(name))]
            for name in table.names
        }
        self._pictures: Pictures | None = None
        self.id = ""
        if files:
            root = os.path.commonpath([os.path.dirname(os.path.abspath(x)) for x in files])
            self._pictures = Pictures(root, [*map(os.path.abspath, files)])
            counts = {
                name: sum(len(self._pictures.find(x)) == 1 for x in texts if x)
                for name, texts in self.columns.items()
            }
            self.id = max(counts, key=counts.__getitem__)
            if not counts[self.id]:
                raise ConfigError(f"--template {path}: no column names the pictures to predict for")

    def key(self, about: Mapping[str, Any]) -> str:
        """Return the id of a sample. Raise ConfigError where a table has no such column."""
        if self._pictures is not None:
            return os.path.abspath(str(about["path"]))
        if not self.id:
            names = [name for name in self.columns if name in about]
            if not names:
                has = listed(name for name in about if name not in ("path", "row"))
                fault = f"no column is one of the table's that are no features ({has or 'none'})"
                raise ConfigError(f"--template {self.path}: {fault}; add the column of ids")
            self.id = names[0]
        return str(about[self.id])

    def keys(self) -> Iterator[str | None]:
        """Yield the id of each row, None for a picture that is not there."""
        for text in self.columns[self.id]:
            if self._pictures is None:
                yield text
            else:
                places = self._pictures.find(text) if text else []
                yield self._pictures.files[places[0]] if len(places) == 1 else None

    def fills(self, form: Feature, cells: Mapping[str, Any]) -> dict[str, Any]:
        """Return a function for each other column. Raise ConfigError for unknown columns."""
        found, others = dict[str, Any](), list[str]()
        for name in self.columns:
            cell = name if name in cells else f"p_{name}"
            if name == self.id:
                continue
            if cell in cells:
                found[name] = lambda answer, cells, cell=cell: cells[cell]
            else:
                others.append(name)
        if len(others) == 1 and (fill := self._only(form, others[0], cells)):
            found[others[0]] = fill
        elif others:
            known = [name for name in cells if name not in ("path", "row", self.id)]
            raise ConfigError(
                f"--template {self.path}: nothing fills {listed(others)}; predictions have"
                f" {listed(known)}, and a class or label fills the column of its name"
            )
        return {name: found[name] for name in self.columns if name in found}

    def _only(self, form: Feature, name: str, cells: Mapping[str, Any]) -> Any:
        """Return the function of a column of any name: a class as the template's examples are."""
        examples, names = [text for text in self.columns[name] if text], form.names
        if not isinstance(form, Classes):
            first = "labels" if "labels" in cells else names[0] if len(names) == 1 else ""
            return (lambda answer, cells: cells[first]) if first in cells else None
        if not examples or not are_numbers(examples) or {*examples} <= {*names}:
            return lambda answer, cells: answer["class"]
        if len(names) == 2 and not all(float(text).is_integer() for text in examples):
            return lambda answer, cells: cells[f"p_{names[1]}"]
        return lambda answer, cells: names.index(answer["class"])


@contextlib.contextmanager
def to_template(template: Template, output: Path, *, force: bool) -> Iterator[Write]:
    """Yield a function that collects answers, which are then written as the template has them.

    Warn of ids without a prediction, whose cells are empty, and of predictions that it has no row
    for. Raise ConfigError where it has other columns.
    """
    rows, fills = dict[str, list[Any]](), dict[str, Any]()

    def write(answers: Answers, form: Feature) -> None:
        for about, answer in zip(answers.about, form.answers(answers), strict=True):
            key, cells = template.key(about), csv_cells(form, answer)
            if not fills:
                fills.update(template.fills(form, cells))
            rows[key] = [fill(answer, cells) for fill in fills.values()]

    with new_file(output, force=force) as file:
        yield write
        keys, names = [*template.keys()], [*fills]
        missing = [
            text
            for text, key in zip(template.columns[template.id], keys, strict=True)
            if key not in rows
        ]
        surplus = [key for key in rows if key not in {*keys}]
        for ids, fault in ((missing, "have no prediction"), (surplus, "have no row there")):
            if ids:
                warn(f"--template {template.path}: {len(ids)} ids {fault}: {listed(ids, 5)}")
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, delimiter=template.separator, lineterminator="\n")
        writer.writerow(template.columns)
        for place, key in enumerate(keys):
            filled = dict(zip(names, rows.get(key or "", ()), strict=False))
            writer.writerow(
                template.columns[name][place] if name == template.id else filled.get(name, "")
                for name in template.columns
            )
        text.detach()
