"""The measure of a sweep's driver, by itself: grids of several sizes whose workers take nothing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.comparison import OURS, Comparison
from scripts.benchmarks.systems import environment

GRIDS = (10, 100, 1000)
"""Points of a sweep."""


def grid(bench: Bench) -> Iterator[Comparison]:
    """What a sweep's driver takes where workers take nothing: CPU seconds of a further run, and until the first."""
    found = [[_grid(points) for points in GRIDS] for _ in range(bench.rounds)]
    for index, (few, many) in enumerate(itertools.pairwise(GRIDS)):
        a_run = [(row[index + 1]["cpu_s"] - row[index]["cpu_s"]) / (many - few) for row in found]
        yield Comparison("grid", f"CPU of the driver for a further run ({few} to {many})", "s", {OURS: a_run})
    for index, points in enumerate(GRIDS):
        yield Comparison("grid", f"to the first of {points}", "s", {OURS: [row[index]["first_s"] for row in found]})
        memory = [row[index]["mebibytes"] for row in found]
        yield Comparison("grid", f"peak memory of the driver, {points} runs", "MiB", {OURS: memory})


def _grid(points: int) -> dict[str, float]:
    command = [sys.executable, "-m", "scripts.benchmarks.grid_driver", str(points)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return found
