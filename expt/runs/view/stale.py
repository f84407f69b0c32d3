"""Runs whose own classes have other source now: their numbers are not those of today's code."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from expt.config import user_code
from expt.runs import provenance
from expt.runs.result import Record
from expt.runs.view.cells import say
from expt.runs.view.progress import shown_path

WORD = "stale"
SHOWN = 3
"""Commands that are printed; a person who wants more can tell how they go."""


def stale(runs: Iterable[tuple[Path, Record]]) -> list[Path]:
    """The folders of those that are; one whose classes are not found from here is not known to be."""
    today: dict[tuple[str, ...], str | None] = {}
    found = []
    for folder, record in runs:
        content: Mapping[str, Any] = record.get("content") or {}
        then = content.get("code")
        if then is None:
            continue
        targets = user_code.targets_recorded(record.get("config") or {})
        if targets not in today:
            today[targets] = user_code.fingerprint(targets)
        if today[targets] not in (None, then):
            found.append(folder)
    return found


def print_stale(console: Console, folders: Iterable[Path]) -> None:
    """Say what is stale, with the command that runs it anew."""
    commands = [
        f"{provenance.program()} rerun {shlex.quote(shown_path(folder))}" for folder in folders
    ]
    if not commands:
        return
    say(
        console,
        f"\n{len(commands)} {WORD}: their own classes have other source now; to run them anew",
        "bold yellow",
    )
    for command in commands[:SHOWN]:
        say(console, f"      {command}")
    if left := len(commands) - min(SHOWN, len(commands)):
        others = f"{left} others that are marked" if left > 1 else "other that is marked"
        say(console, f"      and so on for the {others}")
