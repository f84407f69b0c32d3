"""Whose weights runs have begun with, and whose those had, back to the first; and the tree of
forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from expt.errors import printable
from expt.runs.paths import RunPaths
from expt.runs.record_parts import Begun, Forked
from expt.runs.result import Record, result_of_any
from expt.runs.view.cells import say, setting
from expt.runs.view.progress import shown_path


def print_ancestry(console: Console, runs: Iterable[tuple[Path, Record]]) -> None:
    """A line for each file of weights that some of `runs` began with, and below it where those came
    from; and forks.
    """
    runs = list(runs)
    begun: dict[tuple[str, ...], list[Path]] = {}
    for folder, record in runs:
        if line := tuple(_ancestors(record)):
            begun.setdefault(line, []).append(folder)
    for (first, *others), folders in begun.items():
        whose = shown_path(folders[0]) if len(folders) == 1 else f"{len(folders)} runs"
        say(console, f"weights      {whose}: from {first}")
        for depth, each in enumerate(others, 1):
            say(console, f"             {'  ' * depth}which began from {each}")
    print_forks(console, runs)


def print_forks(console: Console, runs: Sequence[tuple[Path, Record]]) -> None:
    """A tree for each run that has forks among `runs`, and is none itself; parents come in though
    they are no part.
    """
    for tree in _trees(runs):
        console.print(tree, soft_wrap=True)


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


def forks_told(record: Record) -> list[str]:
    """Of a fork the run that it comes from, the step, and what is other since; nothing of a run
    that is none.
    """
    forked = record.get("forked_from")
    return [f"{shown_path(Path(forked['run']))}, {_since(forked)}"] if forked else []


def _since(forked: Forked) -> str:
    changed = ", ".join(
        f"{key} {setting(then)} -> {setting(now)}" for key, (then, now) in forked["changed"].items()
    )
    return f"at step {forked['step']}" + (f": {changed}" if changed else "")


def _trees(runs: Sequence[tuple[Path, Record]]) -> list[Tree]:
    records = {folder.resolve(): record for folder, record in runs}
    named = {
        record["identity"]: folder for folder, record in records.items() if "identity" in record
    }
    below: dict[Path, list[Path]] = {}
    todo = list(records)
    while todo:
        folder = todo.pop()
        if forked := records[folder].get("forked_from"):
            parent = Path(forked["run"])
            if parent not in records:  # it has been moved, lies elsewhere, or is gone
                parent = named.get(forked["identity"], parent)
            if parent not in records:
                records[parent] = result_of_any(RunPaths(parent))
                todo.append(parent)
            below.setdefault(parent, []).append(folder)
    roots = [folder for folder in below if "forked_from" not in records[folder]]
    return [_grown(root, below, records) for root in sorted(roots)]


def _grown(
    folder: Path, below: Mapping[Path, Sequence[Path]], records: Mapping[Path, Record]
) -> Tree:
    """The run of `folder` with its forks, by the step at which they part from it."""
    record = records[folder]
    gone = "" if record else " (no longer there)"
    forked = record.get("forked_from")
    label = f"{'forks        ' if forked is None else ''}{shown_path(folder)}{gone}"
    if forked is not None:
        label += f"  {_since(forked)}"
    objective = record.get("objective")
    if objective and objective["value"] is not None:
        label += f"  {objective['name']} {objective['value']:.4f}"
    tree = Tree(Text(printable(label)))
    for child in sorted(
        below.get(folder, ()), key=lambda each: (records[each]["forked_from"]["step"], each)
    ):
        tree.children.append(_grown(child, below, records))
    return tree
