"""A run as a tracker records it."""

from __future__ import annotations

import contextlib
import getpass
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
"""The tag of the points that have a step's epoch."""
_TAGGED = "identity seedless_identity command attempts rerun_of error until_epoch".split()
"""Fields of a record that are tags."""


class Snapshot(NamedTuple):
    """A run without its points."""

    paths: RunPaths
    record: Record
    status: str
    """The status in result.json, or lost."""

    @property
    def name(self) -> str:
        """The name of the run's folder when it was made."""
        return str(self.record.get("name") or self.paths.folder.absolute().name)

    @property
    def has_ended(self) -> bool:
        """True if it is no longer running."""
        return self.status != RUNNING

    @property
    def sweep(self) -> Path | None:
        """The folder of its sweep."""
        above = self.paths.folder.absolute().parent
        return above if is_sweep(above) else None

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """The configuration, flat; the typed settings, where the run was refused."""
        return hyperparameters(self.record.get("config") or self.record.get("overrides") or {})

    @property
    def tags(self) -> dict[str, str]:
        """Further facts of the run, as texts."""
        record: Mapping[str, Any] = self.record
        forked, begun = record.get("forked_from") or {}, record.get("weights_from") or {}
        user = None
        with contextlib.suppress(KeyError, OSError, ImportError):  # a container's nameless user
            user = getpass.getuser()
        found = {
            "expt.folder": self.paths.folder.absolute(),
            "expt.sweep": self.sweep.name if self.sweep else None,
            "expt.status": self.status,
            "expt.version": (record.get("versions") or {}).get("expt"),
            "git.commit": (record.get("git") or {}).get("commit"),
            "host": record.get("node"),
            "user": user,
            **{f"expt.fork.{key}": forked.get(key) for key in ("run", "identity", "step", "epoch")},
            **{f"expt.weights.{key}": begun.get(key) for key in ("run", "identity")},
            "expt.search.number": (record.get("search") or {}).get("number"),
            **{f"expt.{key}": record.get(key) for key in _TAGGED},
        }
        return {key: str(value) for key, value in found.items() if value is not None}

    @property
    def summary(self) -> dict[str, float]:
        """Results of the run other than the last value of each tag."""
        record: Mapping[str, Any] = self.record
        found = {
            "objective": (record.get("objective") or {}).get("value"),
            "best/epoch": (record.get("best") or {}).get("epoch"),
            **{key: record.get(key) for key in ("samples_per_s", "first_step_s", "eval_s")},
        }
        known = {key: float(value) for key, value in found.items() if value is not None}
        return {key: value for key, value in known.items() if math.isfinite(value)}

    def files(self, *, checkpoints: bool) -> list[Path]:
        """Return the files that a dashboard keeps of it."""
        paths = self.paths
        found = [paths.result, paths.metrics, *sorted(paths.hydra.glob("*.yaml"))]
        if checkpoints:
            found += [paths.best, paths.last]
        return [path for path in found if path.is_file()]

    def digest(self, *, checkpoints: bool) -> str:
        """Return a text that changes where there is something else to send."""
        stats = [(path.name, path.stat()) for path in self.files(checkpoints=False)]
        sizes = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
        return json.dumps([self.status, checkpoints, sizes])


def snapshot(paths: RunPaths, *, even_lost: bool = True) -> Snapshot | None:
    """Return the run of a folder; None where there is none whose record can be read.

    Whether a run that says running is lost is looked up if `even_lost`.
    """
    record = read_result(paths)
    status = record.get("status", DAMAGED)
    if status == DAMAGED:  # or there is none yet
        return None
    return Snapshot(paths, record, LOST if even_lost and is_lost(paths, record) else status)


def with_epochs(points: Iterable[Point]) -> Iterator[Point]:
    """Yield the points, and before the first of each step one that has the step's epoch."""
    step = None
    for point in points:
        if point.step != step:
            step = point.step
            yield Point(point.step, point.epoch, EPOCH, float(point.epoch))
        yield point
