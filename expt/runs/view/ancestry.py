"""Whose weights runs have begun with, and whose those had, back to the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from expt.runs.paths import RunPaths
from expt.runs.record_parts import Begun
from expt.runs.result import Record, result_of_any
from expt.runs.view.cells import say
from expt.runs.view.progress import shown_path


def print_ancestry(console: Console, runs: Iterable[tuple[Path, Record]]) -> None:
    """A line for each file of weights that some of `runs` began with, and below it where those came from."""
    begun: dict[tuple[str, ...], list[Path]] = {}
    for folder, record in runs:
        if line := tuple(_ancestors(record)):
            begun.setdefault(line, []).append(folder)
    for (first, *others), folders in begun.items():
        whose = shown_path(folders[0]) if len(folders) == 1 else f"{len(folders)} runs"
        say(console, f"weights      {whose}: from {first}")
        for depth, each in enumerate(others, 1):
            say(console, f"             {'  ' * depth}which began from {each}")


def _ancestors(record: Record) -> Iterator[str]:
    seen = set[str]()
    while (begun := record.get("weights_from")) and begun["file"] not in seen:
        seen.add(begun["file"])
        there = result_of_any(RunPaths(Path(begun["run"]))) if begun.get("run") else Record()
        is_it = bool(there) and there.get("identity") == begun["identity"]
        yield _described(begun, there=bool(there), is_it=is_it)
        record = there if is_it else {}


def _described(begun: Begun, *, there: bool, is_it: bool) -> str:
    epoch = f"epoch {begun['epoch']}" if begun.get("epoch") is not None else ""
    details = [begun.get("which") or "", epoch, "moving average" if begun.get("average") else ""]
    if begun.get("run") and not is_it:
        details.append("another run is there now" if there else "no longer there")
    told = ", ".join(filter(None, details))
    return shown_path(Path(begun.get("run") or begun["file"])) + (f" ({told})" if told else "")
