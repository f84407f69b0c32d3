"""What lies in a search's folder: its own points, and runs that hold a number there and are none of
its points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from expt.errors import ConfigError, warn
from expt.runs.folder_lock import at_work
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, DAMAGED, INTERRUPTED, PAUSED, Record, update_result
from expt.runs.spending import device_s
from expt.runs.sweep import copies_among, results_of_sweep
from expt.search.history import Point, Reader, in_order


@dataclass
class Found:
    """The runs of a folder."""

    points: dict[Path | None, Point] = field(default_factory=dict)
    """Those of this search, or typed by hand, by their folders; each has a number of its own, or
    none.
    """
    numbers: set[int] = field(default_factory=set)
    """All that some run has."""
    differing: dict[str, list[str]] = field(default_factory=dict)
    """The names of runs of other settings, and in what they differ."""
    outside: list[str] = field(default_factory=list)
    """The names of those that lie outside of the space."""
    copies: dict[Path, Path] = field(default_factory=dict)
    """Copies of other runs there, and those: they are no points of their own, and have cost
    nothing.
    """
    damaged: set[Path] = field(default_factory=set)
    """The folders of runs at a rung that have lost what they had measured, and are trained anew."""
    spent_elsewhere_s: dict[Path, float] = field(default_factory=dict)
    """What devices have been busy for with these and those, by their folders."""

    @property
    def numbers_of_others(self) -> frozenset[int]:
        """Those that no point of this search has."""
        return frozenset(self.numbers - {point.number for point in self.points.values()})

    @property
    def by_hand(self) -> list[Point]:
        """Points that no search has chosen: a grid's, say."""
        ended = [point for point in self.points.values() if point.status in (COMPLETED, PAUSED)]
        return [point for point in ended if point.number is None]


def read(folder: Path, reader: Reader) -> Found:
    """All that lies there now."""
    found, points = Found(), list[Point]()
    runs = [run for run in results_of_sweep(folder) if run[1]["status"] != DAMAGED]
    found.copies = copies_among(runs)
    for paths, record in runs:
        if paths.folder in found.copies:
            continue
        if (number := record.get("search", {}).get("number")) is not None:
            found.numbers.add(number)
        point, differences = point_of(reader, paths, record)
        if point and not differences:
            points.append(
                _as_far_as_known(point, paths, record, found) if reader.with_rungs else point
            )
            continue
        found.spent_elsewhere_s[paths.folder] = device_s(record)
        if point:
            found.differing[paths.folder.name] = list(differences)
        else:
            found.outside.append(paths.folder.name)
    found.points = {
        point.folder: point for point in _numbered_once(in_order(points), found.numbers)
    }
    return found


def point_of(reader: Reader, paths: RunPaths, record: Record) -> tuple[Point | None, Sequence[str]]:
    """The point that a run is, if any, and in what it is none of this search."""
    point = reader.point(paths, record)
    return (None, ()) if point is None else (point, reader.differences(point.values, record))


def of_another(reader: Reader, source: Path, own: Iterable[Path | None]) -> list[Point]:
    """The points of a sweep for a warm start, whose numbers count for nothing here, but for the
    search's `own`.
    """
    if not source.is_dir():
        raise ConfigError(
            f"search.warm_start={source}: there is no such folder; give that of a sweep"
        )
    own = {folder.resolve() for folder in own if folder}
    found = [*results_of_sweep(source)]
    copies = copies_among(found)
    runs = [
        (reader.point(paths, record), record)
        for paths, record in found
        if paths.folder not in copies
    ]
    points = [
        replace(point, number=None, is_of_others=bool(reader.differences(point.values, record)))
        for point, record in runs
        if point is not None
    ]
    if not points:
        raise ConfigError(f"search.warm_start={source}: holds no run with a point of this space")
    return [point for point in points if point.folder and point.folder.resolve() not in own]


def forget_training(paths: RunPaths) -> None:
    """Let a run that has paused be trained from its beginning, whenever that is.

    Raises FolderInUse where another command is at work there.
    """
    with at_work(paths):
        update_result(paths, status=INTERRUPTED, resumable=False)
        paths.remove_checkpoints()


def _numbered_once(points: Iterable[Point], numbers: set[int]) -> Iterable[Point]:
    """Older versions gave a number twice where the space had become another."""
    seen = set[int]()
    for point in points:
        if point.number in seen:
            point = replace(point, number=max(numbers) + 1)
        if point.number is not None:
            seen.add(point.number)
            numbers.add(point.number)
        yield point


def _as_far_as_known(point: Point, paths: RunPaths, record: Record, found: Found) -> Point:
    """The point as rungs may count it: who has lost what it had measured has paused nowhere, or
    passed all of them.
    """
    done = range(point.began_at + 1, point.began_at + len(record.get("epoch_s") or ()) + 1)
    lost = f"{paths.metrics}: lacks values of epochs that the run has trained"
    if point.status == PAUSED and not {*done} <= point.rung_values.keys():
        warn(f"{lost}; it is trained anew")
        found.damaged.add(paths.folder)
        return replace(point, status=INTERRUPTED, rung_values={})
    if (
        point.is_measured and not {*done[:-1]} <= point.rung_values.keys()
    ):  # a last one may have ended half-way
        warn(f"{lost}; it has completed, and counts as past all rungs")
        return replace(point, is_past_rungs=True)
    return point
