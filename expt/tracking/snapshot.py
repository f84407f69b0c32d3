"""What a run's folder says now, in the words of a dashboard; computed from its files alone."""

from __future__ import annotations

import getpass
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from expt.config.identity import hyperparameters
from expt.runs.metrics_file import Point
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import DAMAGED, LOST, RUNNING, Record, is_lost, read_result

EPOCH = "epoch"
Marks = dict[str, int]
"""The step of the last point of each tag that a dashboard has. A tag only goes forward: a run that
goes on from an
older checkpoint repeats its points to the bit, and they are not sent again."""


class Snapshot(NamedTuple):
    """A run as a dashboard shows it, but for its points."""

    paths: RunPaths
    record: Record
    status: str
    """As result.json has it, or that the run is lost."""

    @property
    def name(self) -> str:
        """That of the run's folder when it was made."""
        return str(self.record.get("name") or self.paths.folder.absolute().name)

    @property
    def has_ended(self) -> bool:
        """Whether it is no longer under way."""
        return self.status != RUNNING

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that it is of."""
        above = self.paths.folder.absolute().parent
        return above if is_sweep(above) else None

    @property
    def started_at(self) -> float | None:
        """When it began [seconds since the epoch]."""
        return self.record.get("started")

    @property
    def ended_at(self) -> float:
        """When it last wrote its record [seconds since the epoch]."""
        return self.paths.result.stat().st_mtime

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """The configuration, flat; that of a run which was refused is what was typed."""
        return hyperparameters(self.record.get("config") or self.record.get("overrides") or {})

    @property
    def tags(self) -> dict[str, str]:
        """What else is known of the run, as texts."""
        record, sweep = self.record, self.sweep
        host = record.get("node")
        found: dict[str, Any] = {
            "expt.folder": self.paths.folder.absolute(),
            "expt.sweep": sweep.name if sweep else None,
            "expt.identity": record.get("identity"),
            "expt.seedless_identity": record.get("seedless_identity"),
            "expt.status": self.status,
            "expt.command": record.get("command"),
            "expt.version": (record.get("versions") or {}).get("expt"),
            "expt.attempts": record.get("attempts"),
            "expt.rerun_of": record.get("rerun_of"),
            "expt.error": record.get("error"),
            "git.commit": (record.get("git") or {}).get("commit"),
            "host": f"{host}, {record.get('world_size')} workers" if host else None,
            "user": _user(),
            **self._lineage,
        }
        return {key: str(value) for key, value in found.items() if value is not None}

    @property
    def _lineage(self) -> dict[str, Any]:
        """The run that it is a fork of, or has its first weights from; its place in a search, and
        how far it may go.
        """
        record = self.record
        forked: Mapping[str, Any] = record.get("forked_from") or {}
        begun: Mapping[str, Any] = record.get("weights_from") or {}
        search: Mapping[str, Any] = record.get("search") or {}
        until = record.get("until_epoch")
        if until is None and search:  # a dashboard keeps what an earlier attempt has said
            until = (record.get("config") or {}).get("epochs")
        return {
            "expt.fork.run": forked.get("run"),
            "expt.fork.identity": forked.get("identity"),
            "expt.fork.step": forked.get("step"),
            "expt.fork.epoch": forked.get("epoch"),
            "expt.weights.run": begun.get("run"),
            "expt.weights.identity": begun.get("identity"),
            "expt.search.number": search.get("number"),
            "expt.search.replaces": search.get("replaces"),
            "expt.search.parent": search.get("parent"),
            "expt.until_epoch": until,
            "expt.epochs_done": (
                len(record["epoch_s"]) + forked.get("epoch", 0) if "epoch_s" in record else None
            ),
        }

    @property
    def summary(self) -> dict[str, float]:
        """What the run has come to beside the last value of each tag: its objective, and how fast
        it was.
        """
        record, best, objective = self.record, self.record.get("best"), self.record.get("objective")
        found: dict[str, Any] = {
            "objective": objective["value"] if objective else None,
            "best/epoch": best["epoch"] if best else None,
            **{key: record.get(key) for key in ("samples_per_s", "first_step_s", "eval_s")},
        }
        return {
            key: float(value)
            for key, value in found.items()
            if value is not None and math.isfinite(value)
        }

    @property
    def last_step(self) -> int:
        """The optimiser steps that it has done."""
        return int(self.record.get("steps") or 0)

    def files(self, *, checkpoints: bool) -> list[Path]:
        """What a dashboard keeps of it as files."""
        paths = self.paths
        found = [paths.result, paths.metrics, *sorted(paths.hydra.glob("*.yaml"))]
        found += [paths.best, paths.last] if checkpoints else []
        return [path for path in found if path.is_file()]

    def digest(self, *, checkpoints: bool) -> str:
        """Another one where there is something else to send."""
        stats = [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.files(checkpoints=False)
        ]
        text = json.dumps([self.status, checkpoints, stats])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def snapshot(paths: RunPaths, *, even_lost: bool = True) -> Snapshot | None:
    """What the folder says; None where it holds no run whose record can be read.

    Whether a run that says running is lost is looked up if `even_lost`.
    """
    record = read_result(paths)
    status = record.get("status", DAMAGED)
    if status == DAMAGED:  # or there is none yet
        return None
    return Snapshot(paths, record, LOST if even_lost and is_lost(paths, record) else status)


def with_epochs(points: Iterable[Point]) -> Iterator[Point]:
    """The points, and before the first of each step one that tells the step's epoch."""
    step = None
    for point in points:
        if point.step != step:
            step = point.step
            yield Point(point.step, point.epoch, EPOCH, float(point.epoch))
        yield point


def unsent(points: Iterable[Point], marks: Mapping[str, int]) -> list[Point]:
    """Those of `points` that lie after `marks`, each once."""
    found, reached = list[Point](), dict(marks)
    for point in points:
        if point.step > reached.get(point.tag, -1):
            reached[point.tag] = point.step
            found.append(point)
    return found


def marked(points: Iterable[Point], marks: Marks) -> None:
    """Let `marks` know that `points` were sent."""
    for point in points:
        marks[point.tag] = max(point.step, marks.get(point.tag, -1))


def sweep_status(statuses: Iterable[str]) -> str:
    """What is said of a sweep whose runs have these: the worst of them, or that one is under way."""
    found = set(statuses)
    return next(
        (status for status in (RUNNING, "failed", LOST, "interrupted") if status in found),
        "completed",
    )


def runs_of(folder: Path) -> list[Snapshot]:
    """The runs of a sweep's folder."""
    found = (snapshot(RunPaths(path)) for path in sorted(folder.iterdir()) if path.is_dir())
    return [run for run in found if run is not None and run.record]


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without a name for the number
        return None
