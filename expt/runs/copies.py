"""Copies of run folders, which a person has made beside the runs: a record says the name that its
folder was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from expt.runs.paths import RunPaths
from expt.runs.result import FoundRecord, Record

NAMED = 3
"""Copies that a line names."""


def has_own_name(paths: RunPaths, record: Record) -> bool:
    """Whether the folder has the name that its run was given; a copy has another."""
    return record.get("name", paths.folder.name) == paths.folder.name


def copies_among(runs: Iterable[tuple[RunPaths, Record]]) -> dict[Path, Path]:
    """The folders of copies, each with that of the run beside it which counts in its stead.

    That is the last one which has its own name, as for a sweep that is typed again, else the first
    by name: a folder that was only renamed is no copy. Runs under their own names are none either,
    but for those of one number of a search, which gives each to one run."""
    alike: dict[tuple[int | None, str], list[tuple[RunPaths, Record]]] = {}
    for paths, record in runs:
        if (key := _same_run(record)) is not None:
            alike.setdefault(key, []).append((paths, record))
    found = dict[Path, Path]()
    for (number, _), several in alike.items():
        if len(several) > 1:
            found.update(_copies(several, is_one=number is not None))
    return found


def without_copies(runs: Sequence[FoundRecord]) -> tuple[list[FoundRecord], dict[Path, Path]]:
    """The runs that count, and the copies as of `copies_among`."""
    copies = copies_among((RunPaths(run["folder"]), run) for run in runs)
    return [run for run in runs if run["folder"] not in copies] if copies else [*runs], copies


def told(copies: Mapping[Path, Path]) -> str:
    """That they don't count, and the names of the first of them with those of what they are copies."""
    names = [f"{folder.name} (of {kept.name})" for folder, kept in sorted(copies.items())]
    what = "copies of runs, which do" if len(names) > 1 else "a copy of a run, which does"
    return f"{what} not count: {', '.join([*names[:NAMED], *['...'] * (len(names) > NAMED)])}"


def _copies(
    alike: Iterable[tuple[RunPaths, Record]], *, is_one: bool
) -> Iterator[tuple[Path, Path]]:
    """Of runs of the same settings the copies; with `is_one` all but one in a folder are."""
    beside: dict[Path, list[tuple[Path, bool]]] = {}
    for paths, record in alike:
        beside.setdefault(paths.folder.parent, []).append(
            (paths.folder, has_own_name(paths, record))
        )
    for folders in beside.values():
        kept = next((folder for folder, is_own in reversed(folders) if is_own), folders[0][0])
        yield from (
            (folder, kept)
            for folder, is_own in folders
            if folder != kept and (is_one or not is_own)
        )


def _same_run(record: Record) -> tuple[int | None, str] | None:
    """Equal for a run and its copies; None where the record says nothing of the kind."""
    number = record["search"]["number"] if "search" in record else None
    settings = record.get("identity") or repr(
        record.get("arguments") or record.get("overrides") or ""
    )
    return (number, settings) if number is not None or settings != repr("") else None
