"""Data that is large, or read by one's own class: each case beside a program by hand."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.comparison import OURS, Comparison, interleave
from scripts.benchmarks.systems import free_port, start, threads

BY_HAND = "by hand"
_SUFFIXES = (".csv", ".parquet")
READERS = (0, 1, 2)
"""For each worker by hand, of which the fastest number counts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A line of the table: what both take, less being better."""

    name: str
    unit: str
    ours: Callable[[Bench], float]
    by_hand: Callable[[Bench], float]
    at_most: float | None = None
    """the largest ratio of ours to that by hand that the project allows itself"""


def data(bench: Bench) -> Iterator[Comparison]:
    """Every case, ours and by hand in turn."""
    for case in CASES:
        actions = {OURS: partial(case.ours, bench), BY_HAND: partial(case.by_hand, bench)}
        values = interleave(actions, bench.rounds)
        bench.say(f"data, {case.name}: {values} {case.unit}")
        bars = {} if case.at_most is None else {BY_HAND: case.at_most}
        yield Comparison("data", case.name, case.unit, values, bars)


def _read(samples: str, batch_size: int, workers: int = 2, at_most: float | None = None) -> Case:
    """Return the case of an epoch of samples that are read one by one."""
    readers = READERS[:2] if samples == "stream" else READERS  # by hand more read all twice

    def folder(bench: Bench) -> Path:
        found = bench.scratch / "pictures"
        if samples == "pictures" and not found.exists():
            from scripts.baselines import reading  # late: it imports torch

            reading.write_pictures(str(found))
        return found

    def by_hand(bench: Bench) -> float:
        words = [f"--samples={samples}", f"--batch-size={batch_size}", f"--workers={workers}"]
        words += [f"--data={folder(bench)}", f"--threads={threads(workers)}"]
        command = [sys.executable, "-m", "scripts.baselines.reading", *words]
        command.append(f"--epochs={bench.epochs}")
        return min(_by_hand_s([*command, f"--readers={number}"]) for number in readers)

    def ours(bench: Bench) -> float:
        path = folder(bench)
        words = _of_pictures(path) if samples == "pictures" else _of_rows(samples.title())
        words += [f"batch_size={batch_size}", f"world_size={workers}", f"epochs={bench.epochs}"]
        with tempfile.TemporaryDirectory() as run:
            start([sys.executable, "-m", "expt", *words, f"hydra.run.dir={run}/run"])
            result = json.loads((Path(run) / "run" / "result.json").read_text())
        return float(statistics.median(result["epoch_s"][1:]))

    name = f"{samples}, batch {batch_size:,}, {workers} workers: an epoch"
    return Case(name=name, unit="s", ours=ours, by_hand=by_hand, at_most=at_most)


def _by_hand_s(command: Sequence[str]) -> float:
    text = start(command, MASTER_PORT=str(free_port())).text
    result = json.loads(next(line for line in text.splitlines() if line.startswith('{"system"')))
    return float(statistics.median(result["epoch_s"][1:]))


_TRAINED = (
    *("gpus=0", "eval_split=test", "objective=accuracy/test", "drop_last=false", "~model"),
    *("optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.0"),
)


def _of_rows(kind: str) -> list[str]:
    keys = "num_classes: 10, val_fraction: 0.0"
    dataset = f"+dataset={{_target_: scripts.baselines.reading.{kind}, {keys}}}"
    model = "+model={_target_: scripts.baselines.reading.Layers}"
    return [*_TRAINED, "~dataset", dataset, model]


def _of_pictures(folder: Path) -> list[str]:
    keys = {"path": folder, "input": "image", "target": "label", "val_fraction": 0.0}
    dataset = ["dataset=huggingface", *(f"dataset.{key}={value}" for key, value in keys.items())]
    return [*_TRAINED, *dataset, "+model={_target_: scripts.baselines.reading.Pooled}"]


def _table(suffix: str, what: str, at_most: float | None, *, again: bool = False) -> Case:
    """Return the case of the first step on a large table, or of the peak memory up to there."""
    is_memory = what == "peak memory"

    def path(bench: Bench) -> Path:
        found = bench.scratch / f"table{suffix}"
        if not found.exists():
            from scripts.baselines import table  # late: it writes for minutes

            table.write(found)
        return found

    def by_hand(bench: Bench) -> float:
        command = [sys.executable, "-m", "scripts.baselines.table", str(path(bench))]
        output = start(command, watch_memory=is_memory, root_trains=True)
        result = json.loads(output.text)
        return output.peak.total_mib if is_memory else float(result["first_step_s"])

    def ours(bench: Bench) -> float:
        words = ["dataset=table", f"dataset.path={path(bench)}", "dataset.targets=y", "gpus=0"]
        words += ["task=regression", "model=mlp", "model.hidden=[128]", "batch_size=4096"]
        command = [sys.executable, "-m", "expt", *words, "epochs=1", "max_steps=1"]
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1 + again):
                run = Path(folder) / str(number)
                more = [f"hydra.run.dir={run}", f"seed={number}"]
                output = start([*command, *more], watch_memory=is_memory, EXPT_CACHE=folder)
            result = json.loads((run / "result.json").read_text())
        return output.peak.total_mib if is_memory else float(result["first_step_s"])

    name = f"4,000,000 rows of 20 numbers, {suffix}{', a second start' * again}: {what}"
    unit = "MiB" if is_memory else "s"
    return Case(name=name, unit=unit, ours=ours, by_hand=by_hand, at_most=at_most)


CASES = (
    *(_table(suffix, what, 1.5) for suffix in _SUFFIXES for what in ("first step", "peak memory")),
    *(_table(suffix, "first step", None, again=True) for suffix in _SUFFIXES),
    _read("rows", 64, at_most=0.77),
    _read("rows", 1024, at_most=1.0),
    _read("stream", 64),
    _read("stream", 1024),
    _read("pictures", 64),
    _read("pictures", 64, workers=1),
)
