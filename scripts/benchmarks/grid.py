"""The measure of a sweep's driver, by itself: grids of several sizes whose workers take nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.comparison import OURS, Comparison
from scripts.benchmarks.systems import environment

SMALLEST = 2
"""Points of a sweep whose driver does little more than to begin."""
ROWS = (
    ("first_s", "s", "from the command to the first of {:,} runs"),
    ("mebibytes", "MiB", "peak memory of the driver, {:,} runs"),
    ("files", "files", "open in the driver at most, {:,} runs"),
    ("again_s", "s", "the command again, all of {:,} runs complete"),
    ("again_cpu_s", "s CPU", "the command again, all of {:,} runs complete"),
    ("report_s", "s", "to the first screen of the report on {:,} runs"),
    ("report_cpu_s", "s CPU", "the report on {:,} runs"),
)


def grid(bench: Bench) -> Iterator[Comparison]:
    """What a sweep's driver takes where workers take nothing, at its first command and at the same
    again.
    """
    sizes = [SMALLEST, *bench.points]
    found = []
    for number in range(bench.rounds):
        found.append([_grid(points, bench.scratch / "grid") for points in sizes])
        bench.say(f"grid, round {number + 1} of {bench.rounds}: {found[-1]}")
    for index, (few, many) in enumerate(itertools.pairwise(sizes)):
        a_run = [(row[index + 1]["cpu_s"] - row[index]["cpu_s"]) / (many - few) for row in found]
        case = f"CPU of the driver for a further run ({few:,} to {many:,})"
        yield Comparison("grid", case, "s", {OURS: a_run})
    for index, points in enumerate(sizes[1:], start=1):
        for key, unit, case in ROWS:
            yield Comparison(
                "grid", case.format(points), unit, {OURS: [row[index][key] for row in found]}
            )


def _grid(points: int, folder: Path) -> dict[str, float]:
    """A sweep of so many points, the same command again, and the report on it."""
    folder.mkdir()
    command = [sys.executable, "-m", "scripts.benchmarks.grid_driver", str(points), str(folder)]
    try:
        found = _driven(command)
        again = _driven(command)
        report_s, report_cpu_s = _first_screen(
            [sys.executable, "-m", "expt", "report", str(folder / "sweep")]
        )
    finally:
        shutil.rmtree(folder)
    return {
        **found,
        "again_s": again["wall_s"],
        "again_cpu_s": again["cpu_s"],
        "report_s": report_s,
        "report_cpu_s": report_cpu_s,
    }


def _driven(command: Sequence[str]) -> dict[str, float]:
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(began)], env=environment(), capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return {**found, "wall_s": time.monotonic() - began}


def _first_screen(command: Sequence[str]) -> tuple[float, float]:
    """Seconds until it has printed something, and those of its CPU time until its end."""
    began = time.monotonic()
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first_s = time.monotonic() - began
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    return first_s, usage.ru_utime + usage.ru_stime
