"""A page of HTML about runs that needs no other file and no network."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rich.table import Table

from expt.runs.found import FoundRun
from expt.runs.view import curves

DRAWN = 24
"""The largest number of runs whose curves are drawn, the best ones."""
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto }}
body {{ padding: 0 1rem }}
p, h1, h3, pre {{ overflow-wrap: anywhere }}
div {{ overflow: auto; max-height: 42rem }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; white-space: nowrap }}
th, td {{ text-align: right }} .left {{ text-align: left }}
th {{ position: sticky; top: 0; background: white }}
img, svg {{ max-width: 100%; height: auto }}
@media (max-width: 45rem) {{ div svg {{ max-width: 220% }} }}
@media print {{ div {{ max-height: none }} }}
pre {{ background: #f4f4f4; padding: .6rem; overflow-x: auto }}
</style>
<h1>{title}</h1>
"""


def page(title: str, sections: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return the page: below each heading its pieces of HTML, unless there are none."""
    parts = [_HEAD.format(title=escape(title))]
    for heading, pieces in sections:
        if pieces:
            parts += [f"<h2>{escape(heading)}</h2>", *pieces]
    return "\n".join([*parts, "</html>\n"])


def paragraph(*lines: str) -> list[str]:
    """Return each line as a paragraph."""
    return [f"<p>{escape(line)}</p>" for line in lines]


def command(line: str) -> str:
    """Return a command to be copied."""
    return f"<pre>{escape(line)}</pre>"


def table(found: Table) -> list[str]:
    """Return a table of the terminal's, and its caption."""
    sides = ["" if column.justify == "right" else " class=left" for column in found.columns]
    heads = (escape(str(column.header)) for column in found.columns)
    rows = zip(*(map(str, column.cells) for column in found.columns), strict=True)
    return [
        "<div><table>",
        _row("th", sides, heads),
        *(_row("td", sides, map(escape, row)) for row in rows),
        "</table></div>",
        *paragraph(*str(found.caption or "").splitlines()),
    ]


def _row(kind: str, sides: Sequence[str], cells: Iterable[str]) -> str:
    row = (f"<{kind}{side}>{cell}</{kind}>" for side, cell in zip(sides, cells, strict=True))
    return f"<tr>{''.join(row)}</tr>"


def drawn_curves(runs: Sequence[FoundRun]) -> list[str]:
    """Return the learning curves of the first runs."""
    drawing, left = io.BytesIO(), len(runs) - DRAWN
    curves.learning_curves(runs[:DRAWN], drawing)
    return [picture(drawing), *paragraph(*[f"and {left} more runs"] * (left > 0))]


def picture(drawing: io.BytesIO) -> str:
    """Return an SVG file as a part of the page."""
    svg = drawing.getvalue().decode()
    return f"<div>{svg[svg.index('<svg') :]}</div>"


def pictures(found: Mapping[str, bytes]) -> list[str]:
    """Return PNG files, each below its tag."""
    pieces = list[str]()
    for tag, content in sorted(found.items()):
        data, name = base64.b64encode(content).decode(), escape(tag)
        pieces.append(f"<h3>{name}</h3><img alt='{name}' src='data:image/png;base64,{data}'>")
    return pieces
