"""Run folders as workers leave them."""

import json
from pathlib import Path
from typing import Any

from expt.runs.metrics_file import Point
from expt.runs.paths import SWEEP_RECORD, RunPaths


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
        "status": "running", "name": folder.name, "started": 1000.0, "config": settings,
        "identity": "1f",
    }  # fmt: skip
    paths.result.write_text(json.dumps({**known, **fields}))
    return paths


def sweep(folder: Path) -> Path:
    folder.mkdir()
    (folder / SWEEP_RECORD).write_text("hydra: {job: {name: expt}}\n")
    return folder


def measure(paths: RunPaths, *steps: int, speed: float = 1.0) -> None:
    """Two tags at each step; epochs have ten."""
    with paths.metrics.open("a") as file:
        for step in steps:
            for tag, value in {"loss/train": 1 / step, "speed/epoch_s": speed}.items():
                file.write(json.dumps(Point(step, step // 10 + 1, tag, value)._asdict()) + "\n")
