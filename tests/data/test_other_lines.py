"""Lines that are no data, where programs and instruments write them into a table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expt.errors import ConfigError
from tests.data.test_table import CLASS, NUMBER, built, of
from tests.facade import dataset

ROWS = [
    f"{a:.3f},{b:.3f},{'uv'[int(a > 0)]}" for a, b in np.random.default_rng(0).normal(size=(40, 2))
]
TEXTS = [f"{'xyz'[row % 3]},{'pq'[row % 2]},{'uv'[row // 7 % 2]}" for row in range(40)]
HALF = 20


def lines(
    *above: str, header: str = "a,b,y", below: str = "", middle: str = "", end: str = ""
) -> str:
    """A table of 40 rows, and other lines at places in it."""
    rows = [below, *ROWS[:HALF], middle, *ROWS[HALF:], end]
    return "\n".join([*above, header, *filter(None, rows)])


def texts(*, middle: str = "", end: str = "") -> str:
    """A table without numbers, where any line could be a row."""
    return "\n".join(["a,b,y", *filter(None, [*TEXTS[:HALF], middle, *TEXTS[HALF:], end])])


BAD = {
    "title": (lines("My measurements"), "Line 2 has it: remove line 1,"),
    "title, blank line": (lines("Report", "", "by me"), "Line 4 has it: remove lines 1 to 3,"),
    "title with separators": (lines("Export,,", "Date:,2024-01-01,"), "remove lines 1 to 2,"),
    "title in quotes": (lines('"Of us, 2024"'), "remove line 1,"),
    "title of as many cells": (lines("Report,of,us"), "remove line 1,"),
    "sections": (lines("[Header]", "Name;x", "[Data]"), "remove lines 1 to 3,"),
    "#": (lines("# made by x, at 5, of y"), "remove line 1,"),
    ";": (lines("; made by x"), "remove line 1,"),
    "Excel": (lines("sep=,"), "Line 2 has it: remove line 1,"),
    "Excel in quotes, BOM": (lines('\ufeff"sep=,"'), "remove line 1,"),
    "units": (lines(below="m,s,kg"), "column a, row 1: 'm' is .* remove line 2 if it is no data"),
    "some units": (lines(below=",%,"), "column y, row 1: is empty, .* remove line 2 if it is no"),
    "types": (lines(below="float,float,u"), "column b, row 1: 'float' .* remove line 2 if"),
    "rule": (lines(below="---,---,---"), "row 1 is a rule; remove line 2"),
    "rule of one cell": (lines(below="------"), r"remove line 2 \('------'\) if it is no data"),
    "comment": (lines(middle="# pause"), r"row 21 has 1 .*; remove line 22 \('# pause'\)"),
    "comment of as many cells": (lines(middle="// pause, of x, v"), "row 21 is a comment; .*e 22"),
    "comment among texts": (texts(middle="# pause, of x, v"), "row 21 is a comment; .* line 22"),
    "page": (lines(middle="Page 1 of 2"), r"remove line 22 \('Page 1 of 2'\)"),
    "page with separators": (lines(middle="Page 1,,"), "column y, row 21: .* remove line 22 if"),
    "separators": (lines(middle=",,"), "column y, row 21: is empty, .* remove line 22 if"),
    "files joined": (lines(middle="a,b,y"), "row 21 repeats the header; remove line 22"),
    "texts joined": (texts(middle=' A,"b",y '), "row 21 repeats the header; remove line 22"),
    "total": (lines(end="Total,,12.5"), r"row 41 is a total, .*; remove line 42 \('Total,,12.5'\)"),
    "total in the last column": (lines(end="3,2,Sum"), "row 41 is a total, or an end"),
    "total of texts": (texts(end="Mean: 2,,u"), "row 41 is a total, or an end; remove line 42"),
    "sum alone": (lines(end=",,12.5"), "row 41 has a single cell .*; remove line 42"),
    "source": (lines(end="Source: us"), "row 41 has 1 .*; remove line 42"),
    "note in quotes": (lines(end='"A note, of us"'), "row 41 has 1 .*; remove line 42"),
    "blank lines, rows": (lines(end="\n\n(40 rows)"), r"remove line 44 \('\(40 rows\)'\)"),
    "END": (lines(end="END"), r"remove line 42 \('END'\)"),
    "EOF": (lines(end="EOF,,"), "remove line 42"),
    "DOS": (lines(end="\x1a"), "remove line 42"),
    "zero byte": (lines(end="\0\0"), "holds a zero byte at byte .*, in line 42; remove it"),
    "row that ends with a comma": (lines(middle="1,2,u,"), "line 22 .* ends with a ','"),
    "header that ends with a comma": (lines(header="a,b,y,"), "line 1 ends with a ','"),
    "after cells of several lines": (
        lines(below='1,2,"u\nv"', middle="# x"),
        r"row 22 .* remove line 24 \('# x'\)",
    ),
}


def table(path: Path, text: str) -> Any:
    path.write_text(text + "\n", encoding="utf-8")
    return of(path, features=None)


@pytest.mark.parametrize("name", BAD)
def test_a_line_that_is_no_data_is_named_with_its_number(name: str, tmp_path: Path) -> None:
    text, says = BAD[name]
    with pytest.raises(ConfigError, match=rf"(?s){says}") as caught:
        table(tmp_path / "t.csv", text).load(CLASS)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["Excel", "comment", "texts joined", "total of texts"])
def test_a_hugging_face_folder_of_texts_is_read_alike(name: str, tmp_path: Path) -> None:
    text, says = BAD[name]
    (folder := tmp_path / "set").mkdir()
    (folder / "train.csv").write_text(text + "\n", encoding="utf-8")
    chosen = dataset(f"dataset=huggingface dataset.path={folder}", input=("a", "b"), target="y")
    with pytest.raises(ConfigError, match=says):
        built(chosen, CLASS)


GOOD = {
    "BOM, and lines between": lines("\ufeff", below=" ", middle="\n", end=",,\n\n"),
    "commas at all ends": "\n".join(f"{line}," for line in lines().splitlines()),
    "names with a #": texts().replace("x,", "#x,").replace("a,", "#a,"),
    "names of totals": texts(middle="total,sum,v", end="z,sum,u"),
    "dashes for no value": texts(middle="--,*,v", end="--,p,u"),
    "a class like its column": texts(middle="a,p,y", end="x,b,y"),
    "a placeholder": texts(middle="-- none --,p,v", end="y,b,u"),
    "a value that may be an end": texts(middle="y,p,v", end="z,media,u"),
    "signs": "a,b,y\n++,--,v\n--,++,u\n" + "".join(texts().splitlines(keepends=True)[3:]),
    "a row of gaps": lines(middle="1,,v", end=",,u"),
    "pauses": texts().replace("x,", "# x,"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_row_like_others_is_data(name: str, tmp_path: Path) -> None:
    rows = table(tmp_path / "t.csv", GOOD[name]).load(CLASS)
    assert rows.features.shape[0] in (40, 41, 42)


def test_the_line_is_that_of_its_part(tmp_path: Path) -> None:
    head, rows = "a,b,y\n", [line.rpartition(",")[0] for line in ROWS]
    for number, few in ((2, rows[:20]), (10, rows[20:])):
        body = "".join(f"{row},{place}\n" for place, row in enumerate(few))
        (tmp_path / f"part-{number}.csv").write_text(f"{head}{'m,s,kg' * (number > 2)}\n{body}")
    with pytest.raises(ConfigError, match=r"row 1 of part-10.csv: 'kg' .* remove line 2 if"):
        of(tmp_path, features=None).load(NUMBER)
