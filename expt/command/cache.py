"""`expt cache`: the decoded datasets that are kept on this machine, and an end to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from expt.command import terminal
from expt.command.words import Parser
from expt.data import cache
from expt.runs.view.text import Console, cells, plain_table, say


def main(words: Sequence[str]) -> int:
    """List the datasets, or remove them. Raises ConfigError for other words."""
    about = "List datasets decoded for later runs; those not used for longest go if space is short."
    parser, clears = Parser("cache", about), "remove all of them, except those being written"
    parser.add_argument("--clear", action="store_true", help=clears)
    asked = parser.parse_args(words)
    cache.remove_left_over()
    console, found = Console(), cache.entries()
    removed = [entry for entry in found if asked.clear and cache.remove(entry.path)]
    there = [entry for entry in found if entry not in removed]
    terminal.put(datasets=_records(there), removed=_records(removed))
    if asked.clear:
        say(console, f"removed {_size(removed)} in {len(removed)} of {len(found)} datasets")
        return 0
    table = plain_table(("dataset", "size", "last used"), left=("dataset", "last used"))
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
        table.add_row(*cells(entry.path.name, _size([entry]), used))
    console.print(table)
    limit = f"{cache.limit_bytes() / 1e9:g} GB (EXPT_CACHE_GB)"
    say(console, f"{_size(found)} of at most {limit} in {cache.cache_dir()}")
    return 0


def _records(entries: Sequence[cache.Entry]) -> list[dict[str, Any]]:
    return [{**entry._asdict(), "path": str(entry.path)} for entry in entries]


def _size(entries: Sequence[cache.Entry]) -> str:
    return f"{sum(entry.num_bytes for entry in entries) / 1e6:,.1f} MB"
