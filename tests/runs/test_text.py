"""Times and sizes as a person reads them."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

import expt
from expt.runs import tags
from expt.runs.view import progress, text


@pytest.mark.parametrize(
    ("seconds", "brief", "elapsed", "about", "duration"),
    [
        (0.00736, "7.36 ms", "0.0 s", "0 s", "00:00"),
        (0.1484, "148 ms", "0.1 s", "0 s", "00:00"),
        (6.697, "6.7 s", "6.7 s", "7 s", "00:07"),
        (75.0, "01:15", "01:15", "01:15", "01:15"),
        (4000.0, "1:06:40", "1:06:40", "1:06:40", "1:06:40"),
        (90000.0, "25:00:00", "25:00:00", "25:00:00", "25:00:00"),
    ],
)
def test_seconds(seconds: float, brief: str, elapsed: str, about: str, duration: str) -> None:
    shown = [form(seconds) for form in (text.brief, text.elapsed, text.about, text.duration)]
    assert shown == [brief, elapsed, about, duration]


def test_sizes() -> None:
    expected = ["376 MiB", "1.0 GiB", "19.5 GiB"]
    assert [text.mebibytes(number) for number in (375.6, 1024, 20000)] == expected
    assert text.mebibytes(3 * 2**10) == "3.0 GiB"


TEXT = "[red]a[/red] [/x] gpus=[0,1] :key:"


def test_a_console_prints_texts_as_they_are() -> None:
    console = text.Console(file=io.StringIO(), width=200)
    table = Table(TEXT, title=TEXT)
    table.add_row(TEXT)
    console.print(table)
    console.print(TEXT, style="bold")
    text.say(console, TEXT)
    with progress._progress_bar(console) as bar:
        bar.add_task(TEXT, text=TEXT)
    assert console.file.getvalue().count(TEXT) == 7  # type: ignore[attr-defined]


NAMES = ("loss", "mae", "rmse", "r2", "explained_variance", "mse", "of epoch")


def table_of(rows: Sequence[Sequence[str]], left: Sequence[str] = ("",)) -> Table:
    table = text.plain_table(("", *NAMES), left=left)
    for row in rows:
        table.add_row(*text.cells(*row))
    return table


@pytest.mark.parametrize("width", [None, 1000, 120, 80, 60, 30, 5])
def test_a_table_shows_every_heading_and_number_whole(width: int | None) -> None:
    numbers = [f"{place}{10**place}.1234" for place in range(len(NAMES) - 1)]
    rows = [(split, *numbers, f"{split} {split}") for split in ("train", "val")]
    how: dict[str, Any] = {"width": width} if width else {}
    console = text.Console(file=io.StringIO(), **how)
    console.print(table_of(rows))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    lines = printed.splitlines()
    for word in (*NAMES[:-1], "of epoch"):
        assert len(re.findall(rf"(?<!\S){word}(?!\S)", printed)) == 1, word
    for number in numbers:
        assert len(re.findall(rf"(?<!\S){re.escape(number)}(?!\S)", printed)) == 2, number
    parts = printed.count("\n\n") + 1
    assert [line.split()[0] for line in lines if line.startswith(("train", "val"))] == [
        *("train", "val") * parts
    ], "each part has the rows' names"
    assert len(lines) == 3 * parts + parts - 1
    if width in (None, 1000):
        assert parts == 1
    elif width and width > len("explained_variance") + 7:
        assert max(map(len, lines)) <= width, "so the terminal need not wrap any"


def test_texts_are_folded_before_columns_are_parted() -> None:
    row = ("a_long_name_" * 4, *(str(place) for place in range(len(NAMES) - 1)), "2, the last")
    lines = {}
    for width in (80, 200):
        console = text.Console(file=io.StringIO(), width=width)
        console.print(table_of([row]))
        lines[width] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines[80])) <= 80
    assert "".join(line.split()[0] for line in lines[80][1:]) == row[0]
    assert len(lines[80]) > len(lines[200]) == 2
    for width in range(5, 60):  # of a number
        console = text.Console(file=io.StringIO(), width=width)
        console.print(table_of([("-1.23456789012e-10", "2", *"34567", "8")], left=("", *NAMES)))
        assert "-1.23456789012e-10" in console.file.getvalue()  # type: ignore[attr-defined]


def test_there_is_no_other_console() -> None:
    for path in Path(expt.__file__).parent.rglob("*.py"):
        found = re.findall(r"rich\.console import .*\bConsole\b|rich\.markup", path.read_text())
        assert not found, path


LOGGED = [
    tags.RUNNING_LOSS,
    tags.RUNNING + "accuracy",
    tags.RUNNING_SAMPLES_PER_S,
    *(
        tags.metric(name, split)
        for name in ("loss", "accuracy")
        for split in ("train", "val", "test")
    ),
    tags.BEST + "accuracy/val",
    tags.LR,
    tags.SAMPLES_PER_S,
    tags.EPOCH_S,
    tags.DATA_WAIT_S,
    "memory/worker_mib",
    "ranks/step_ms_min",
    "ranks/step_ms_max",
    "ranks/all_reduce_share",
    "ranks/unequal_weights",
    f"{tags.GRADIENT_NORM}/0",
]


def charts(eval_split: str, world_size: int, *, is_sharded: bool = False) -> dict[str, list[str]]:
    """Return the tags in each chart, found by TensorBoard's patterns."""
    return {
        title: [tag for tag in LOGGED if any(re.match(pattern, tag) for pattern in patterns)]
        for category in tags.layout(eval_split, world_size, is_sharded=is_sharded).values()
        for title, patterns in category.items()
    }


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_each_chart_has_one_quantity(split: str, is_sharded: bool) -> None:
    """TensorBoard draws two curves of a run in one colour."""
    alone, together = charts(split, 1), charts(split, 2, is_sharded=is_sharded)
    assert alone.items() <= together.items()
    for name in ("loss", "accuracy"):
        for part in ("train", split):
            assert alone[f"{name}/{part}"] == [f"{name}/{part}"]
    for title, found in together.items():
        assert len({re.sub(r"running[_/]|/train", "", tag) for tag in found}) == 1, title
    assert ("share of all-reduce" in together) == (not is_sharded)
