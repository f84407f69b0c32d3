"""Values as a person reads them: cells, lines, times, sizes and paths."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rich.console
from rich.cells import cell_len
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from expt import progress
from expt.errors import printable
from expt.runs.paths import RunPaths

STALE = "stale"
"""The mark of a run whose custom classes have other source now."""
UNLIMITED = 100_000
"""The width of a file or a pipe [characters]."""
_FOLDED = 18
"""The least width to which texts are folded; no number among them is longer."""
_GAP = 2
"""The space between columns."""


class Console(rich.console.Console):
    """A terminal that prints texts as they are: `[a]` is no markup, and `:key:` no picture.

    Nothing is cut: a file or a pipe has no width, and a terminal wraps lines that are too wide. It
    raises BrokenPipeError, where Rich's own ends the process without a word.
    """

    def __init__(self, *, wraps: bool = False, **how: Any) -> None:
        """Open it; one that `wraps` has a width in a file, too."""
        super().__init__(markup=False, emoji=False, **how)
        if not wraps and "width" not in how and not getattr(self.file, "isatty", bool)():
            self.width = UNLIMITED

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as Rich does, but whole lines."""
        super().print(*objects, **{"crop": False, **how})

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


class PlainTable(Table):
    """A table without lines, in which every heading and number is whole.

    In a narrow terminal texts are folded, and columns that still have no room follow below, next to
    the first ones again.
    """

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        for number, part in enumerate(self._parts(self.width or options.max_width)):
            if number:
                yield Segment.line()
            yield from Table.__rich_console__(part, console, options.update(max_width=UNLIMITED))
        if self.caption:  # Rich would fold it to the table's width
            yield Text(str(self.caption), "table.caption")

    def _parts(self, room: int) -> Iterator[Table]:
        """Yield tables of at most `room` characters, where their columns can be so narrow."""
        whole, least = list[int](), list[int]()
        for column in self.columns:
            heading = cell_len(str(column.header))
            lines = [line for cell in column.cells for line in str(cell).splitlines()]
            whole.append(max([heading, *map(cell_len, lines)]))
            least.append(whole[-1] if column.no_wrap else min(whole[-1], max(_FOLDED, heading)))

        def needs(part: Sequence[int]) -> int:
            return sum(least[at] for at in part) + _GAP * (len(part) - 1)

        every = range(len(self.columns))
        first = [*itertools.takewhile(lambda at: not self.columns[at].no_wrap, every)]
        while len(first) > 1 and needs(first) > room // 2:
            first.pop()
        parts = [first]
        for at in every[len(first) :]:
            if parts[-1] != first and needs([*parts[-1], at]) > room:
                parts.append(first)
            parts[-1] = [*parts[-1], at]
        for part in parts:
            columns = list[Column]()
            spare = max(0, room - needs(part))
            for at in part:
                width = min(whole[at], least[at] + spare)
                spare -= width - least[at]
                how: Any = {"no_wrap": True} if width == whole[at] else {"max_width": width}
                columns.append(dataclasses.replace(self.columns[at], **how))
            table = Table(*columns, box=None, pad_edge=False, header_style="bold")
            table.rows = self.rows
            yield table


def gpus_named(devices: Sequence[str] | None) -> str:
    """Return the devices of a run's record, such as `GPUs 0, 1`."""
    if not devices:
        return "the CPU"
    return f"{'GPU' if len(devices) == 1 else 'GPUs'} {', '.join(devices)}"


def cells(*values: object) -> list[Text]:
    """Return cells of a rich table, in which markup and escape sequences are plain text."""
    return [Text(printable(str(value))) for value in values]


def plain_table(
    columns: Iterable[str], rows: Iterable[Iterable[object]] = (), *, left: Collection[str] = ()
) -> Table:
    """Return a table whose columns are numbers, at the right, but those of `left` texts."""
    table = PlainTable()
    for column in columns:
        side: Any = "left" if column in left else "right"
        table.add_column(
            cells(column)[0], justify=side, no_wrap=column not in left, overflow="fold"
        )
    for row in rows:
        table.add_row(*cells(*row))
    return table


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is; the terminal wraps a long one, so that a path in it can be copied."""
    console.print(Text(printable(text), style), soft_wrap=True)
    progress.said()


def field(label: str, value: object) -> str:
    """Return a line of a summary, in which values are below one another."""
    return f"{label:<13}{value}"


def setting(value: Any) -> str:
    """Return a setting as it is typed: `1e12`, `0.05` and `null`."""
    if value is None:
        return "null"
    if not isinstance(value, float):
        return str(value)
    return re.sub(r"e([+-])0*", lambda found: f"e{found[1].strip('+')}", f"{value:.12g}")


def in_csv(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def as_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV, in which no spreadsheet takes a cell for a formula."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(in_csv, row) for row in rows)
    return text.getvalue()


def shown_path(folder: Path) -> str:
    """Return `folder` relative to the current one where it lies below it."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def resume_command(paths: RunPaths, key: str = "") -> str:
    """Return the command that resumes the run of that folder, which `key` has ended."""
    from expt.runs import provenance  # late: the line of an early error needs neither
    from expt.runs.overrides import setting_word

    words = [setting_word("hydra.run.dir", shown_path(paths.folder)), "resume=auto"]
    words += [f"{key}=..."] if key else []
    words += ["--json"] if "--json" in sys.argv[1:] else []
    return " ".join([provenance.program(), *words])


def sweep_command(folder: Path, command: str) -> str:
    """Return the command that continues the sweep in `folder`, which `command` has begun."""
    from expt.config.constraints import quoted
    from expt.runs.overrides import joined, words_after_expt  # late, as above

    if words_after_expt(command) is None:  # of a script or a notebook
        return f"call expt.sweep again, with folder={str(folder)!r}"
    kept = [word for word in shlex.split(command) if not word.startswith("hydra.sweep.dir=")]
    return joined([*kept, f"hydra.sweep.dir={quoted(shown_path(folder))}"])


def duration(seconds: float) -> str:
    """Return seconds as `[hours:]minutes:seconds`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}".removeprefix("0:")


def elapsed(seconds: float) -> str:
    """Return seconds with a tenth; from a minute on as `duration`."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def about(seconds: float) -> str:
    """Return whole seconds; from a minute on as `duration`."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)


def brief(seconds: float) -> str:
    """Return milliseconds with three digits; from a second on as `elapsed`."""
    if seconds >= 1:
        return elapsed(seconds)
    return f"{seconds * 1000:{'.0f' if seconds >= 0.1 else '.3g'}} ms"


def mebibytes(mib: float) -> str:
    """Return whole MiB; from 1024 on GiB with a tenth."""
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def amount(seconds: float) -> str:
    """Return seconds, minutes or hours with a tenth, as of several devices."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def kilowatt_hours(joules: float) -> str:
    """Return an energy with three digits."""
    return f"{joules / 3.6e6:.3g} kWh"
