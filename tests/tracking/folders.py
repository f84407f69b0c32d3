"""Run folders as workers leave them, and a dashboard in memory."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expt.runs.plain_json import dumps

from expt.runs.metrics_file import Point
from expt.runs.paths import SWEEP_RECORD, RunPaths
from expt.tracking.cursor import Cursor
from expt.tracking.snapshot import Marks, Snapshot, marked
from expt.tracking.tracker import Times


def record(folder: Path, **fields: Any) -> RunPaths:
    """result.json of a run, of a sweep's if the folder around it is one's."""
    paths = RunPaths(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": {"name": "mlp"},
        "optimizer": {"lr": 0.1},
        "send": ["mlflow"],
        "mlflow": {"experiment": "mine"},
    }
    known = {
        "status": "running",
        "name": folder.name,
        "started": 1000.0,
        "config": settings,
        "identity": "1f",
    }
    paths.result.write_text(json.dumps({**known, **fields}))
    return paths


def sweep(folder: Path) -> Path:
    folder.mkdir()
    (folder / SWEEP_RECORD).touch()
    return folder


def measure(paths: RunPaths, *steps: int, speed: float = 1.0) -> None:
    """Two tags at each step; epochs have ten."""
    with paths.metrics.open("a") as file:
        for step in steps:
            for tag, value in {"loss/train": 1 / step, "speed/epoch_s": speed}.items():
                file.write(dumps(Point(step, step // 10 + 1, tag, value)._asdict()) + "\n")


@dataclasses.dataclass
class Ledger:
    """A dashboard that only adds, as real ones do; `fails_after` so many points it is not reached."""

    points: Counter[tuple[str, str, int]] = dataclasses.field(default_factory=Counter)
    statuses: dict[str, str] = dataclasses.field(default_factory=dict)
    marks: dict[str, Marks] = dataclasses.field(default_factory=dict)
    fails_after: int | None = None
    times: list[float] = dataclasses.field(default_factory=list)
    where = "memory"

    def check(self) -> None:
        if self.fails_after is not None:
            raise ConnectionError("gone")

    def open(self, run: Snapshot, cursor: Cursor) -> LedgerCopy:
        self.check()
        return LedgerCopy(self, cursor.key)

    def address(self) -> str | None:
        return "memory"

    def end_sweeps(self) -> None:
        pass


@dataclasses.dataclass
class LedgerCopy:
    ledger: Ledger
    key: str

    @property
    def marks(self) -> Marks:
        return self.ledger.marks.setdefault(self.key, {})

    def name_of(self, tag: str) -> str:
        return tag

    def describe(self, run: Snapshot) -> None:
        self.ledger.statuses[self.key] = run.status

    def add(self, points: Sequence[Point], times: Times) -> None:
        for point in points:
            if self.ledger.fails_after == 0:
                raise ConnectionError("gone")
            if self.ledger.fails_after is not None:
                self.ledger.fails_after -= 1
            self.ledger.points[self.key, point.tag, point.step] += 1
            self.ledger.times.append(times(point.step))
            marked([point], self.marks)

    def end(self, run: Snapshot) -> bool:
        before, self.ledger.statuses[self.key] = self.ledger.statuses.get(self.key), run.status
        return before != run.status

    def leave(self) -> None:
        pass
