"""`expt cache`: the decoded datasets that are kept on this machine, and an end to them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from expt.command.words import Parser
from expt.data import cache


def main(words: Sequence[str]) -> int:
    """List what is there, or remove it. Raises ConfigError for words that are not understood."""
    parser = Parser(
        "cache",
        "List datasets that were decoded for later runs. If space is short, those not used for"
        " longest are removed.",
    )
    parser.add_argument(
        "--clear", action="store_true", help="remove all of them, except those being written"
    )
    asked = parser.parse_args(list(words))
    cache.remove_left_over()
    console, found = Console(), cache.entries()
    if asked.clear:
        removed = [entry for entry in found if cache.remove(entry.path)]
        console.print(
            f"removed {_size(removed)} in {len(removed)} of {len(found)} datasets", highlight=False
        )
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("dataset", "size", "last used"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
        table.add_row(entry.path.name, _size([entry]), used)
    console.print(table)
    limit = f"{cache.limit_bytes() / 1e9:g} GB (EXPT_CACHE_GB)"
    console.print(
        f"{_size(found)} of at most {limit} in {cache.cache_dir()}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def _size(entries: Sequence[cache.Entry]) -> str:
    return f"{sum(entry.num_bytes for entry in entries) / 1e6:,.1f} MB"
