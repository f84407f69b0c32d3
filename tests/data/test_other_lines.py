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


def test_a_column_that_is_not_there_is_named_in_a_file_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(("a,b,y\n" + "1,2,u\n" * 20 + "1,2,é\n").encode("latin-1"))
    for target in ("y", "z"):
        with pytest.raises(ConfigError, match=r"t\.csv"):
            of(path, targets=target).load(CLASS)


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
    "a value like a total": "a,b,y\n"
    + "".join(f"{'xy'[n % 2] if n < 39 else 'total'},{n % 7}.5,{'uv'[n % 2]}\n" for n in range(40)),
    "doubling": "a,b,y\n" + "".join(f"{2**n},{3 * 2**n},{'uv'[n % 2]}\n" for n in range(40)),
    "many blank rows": lines(end=",,\n" * 1000 + "\n ,,"),
    "pauses": texts().replace("x,", "# x,"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_row_like_others_is_data(name: str, tmp_path: Path) -> None:
    rows = table(tmp_path / "t.csv", GOOD[name]).load(CLASS)
    assert rows.features.shape[0] in (40, 41, 42)


NUMBERS = np.random.default_rng(1).normal(size=(40, 3)).round(3)
STATISTICS = {
    "count": [40] * 3,
    "mean": NUMBERS.mean(0),
    "std": NUMBERS.std(0, ddof=1),
    "min": NUMBERS.min(0),
    "25%": np.quantile(NUMBERS, 0.25, axis=0).round(4),
    "50%": np.quantile(NUMBERS, 0.5, axis=0),
    "75%": np.quantile(NUMBERS, 0.75, axis=0),
    "max": NUMBERS.max(0),
    "Median": np.median(NUMBERS, 0).round(2),
    "All": NUMBERS.sum(0),
    "Total": NUMBERS.sum(0),
}


def numbers(*last: tuple[str, Any], names: Any = range(40), head: str = "") -> str:
    """A table of numbers with an index, whose last rows are others."""
    rows = [*zip(names, NUMBERS, strict=True), *last]
    lines = [",".join([str(name), *map(str, row)]) for name, row in rows]
    return "\n".join([f"{head},a,b,y", *lines])


def described(*words: str, **how: Any) -> str:
    return numbers(*((word, STATISTICS[word]) for word in words), **how)


PEOPLE = [f"p{number}" for number in range(40)]
AGGREGATES = {
    **{word: described(word) for word in STATISTICS},
    **{f"{word}, names": described(word, names=PEOPLE) for word in STATISTICS if word != "count"},
    "describe": described(*[*STATISTICS][:8]),
    "describe, names": described(*[*STATISTICS][:8], names=PEOPLE),
    "no word": numbers(("40", NUMBERS.sum(0))),
    "tabs": described("Total").replace(",", "\t"),
}


@pytest.mark.parametrize("features", [None, ("a", "b")])
@pytest.mark.parametrize("name", AGGREGATES)
def test_sums_and_statistics_of_the_rows_are_none_of_them(
    name: str, features: Any, tmp_path: Path
) -> None:
    """The index that names them is not read."""
    path = tmp_path / ("t.tsv" if name == "tabs" else "t.csv")
    path.write_text(AGGREGATES[name] + "\n")
    says = r"row 41 is (a total|the sum).*; remove line 42 \("
    with pytest.raises(ConfigError, match=says) as caught:
        of(path, features=features).load(NUMBER)
    assert ("and so are the 7 below it" in str(caught.value)) == name.startswith("describe")


def kinds(last: str, row: Any = NUMBERS[-1], others: str = "low") -> str:
    return numbers((last, row), names=[others] * 40, head="kind")


SORTED = np.sort(NUMBERS, 0)
LIKE_OTHERS = {
    **{f"kind {word}": kinds(word) for word in ("max", "min", "all", "Median", "25%")},
    "the largest, sorted": kinds("max", SORTED[-1] + 1),
    "the least, as another row": kinds("min", NUMBERS.min(0)).replace(
        ",".join(map(str, NUMBERS[3])), ",".join(map(str, NUMBERS.min(0)))
    ),
    "imputed by means": numbers(("40", NUMBERS.mean(0))),
    "a name": numbers(("max", NUMBERS[0]), names=PEOPLE),
    "cumulated": "\n".join(["a,b,y", *(",".join(map(str, x)) for x in NUMBERS.cumsum(0))]),
    "doubled": "\n".join(["a,b,y", *(f"{2.0**x},{x},{2.0**x}" for x in range(20))]),
    "doubled, its first rows repeated": "\n".join(
        ["a,b,y", *(f"{x},{3 * x},{x}" for x in (1, *(2**row for row in range(20))))]
    ),
    "a total that is the largest": numbers(("total", [9, 9, 9]), names=PEOPLE, head="name"),
    "a total that is the least": kinds("Total", np.array([-9, 0.5, 0])),
    "a sum of few": kinds("sum", np.array([9, 9, 9])),
    "a limit": numbers(("max", NUMBERS[0]), names=range(0, 400, 10), head="limit"),
    "a note, and a gap": numbers(("end", ["", 1, 2]), names=["", "x"] * 20, head="note"),
    "an end, and gaps": kinds("end", ["", 1, 2]).replace(str(NUMBERS[2][0]), "", 1),
}


@pytest.mark.parametrize("name", LIKE_OTHERS)
def test_a_word_is_a_value_if_its_numbers_are_like_others(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(LIKE_OTHERS[name] + "\n")
    rows = of(tmp_path / "t.csv", features=("a", "b")).load(NUMBER)
    assert rows.features.shape[0] == LIKE_OTHERS[name].count("\n")


@pytest.mark.parametrize("name", ["kind max", "kind all", "kind Median"])
def test_so_it_is_in_a_column_of_categories(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(LIKE_OTHERS[name] + "\n")
    assert len(of(tmp_path / "t.csv", features=("kind", "a")).load(NUMBER).texts["kind"]) == 2


def test_the_line_is_that_of_its_part(tmp_path: Path) -> None:
    head, rows = "a,b,y\n", [line.rpartition(",")[0] for line in ROWS]
    for number, few in ((2, rows[:20]), (10, rows[20:])):
        body = "".join(f"{row},{place}\n" for place, row in enumerate(few))
        (tmp_path / f"part-{number}.csv").write_text(f"{head}{'m,s,kg' * (number > 2)}\n{body}")
    with pytest.raises(ConfigError, match=r"row 1 of part-10.csv: 'kg' .* remove line 2 if"):
        of(tmp_path, features=None).load(NUMBER)
