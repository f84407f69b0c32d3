"""Data that is large, or read by one's own class: each case beside a program by hand."""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.comparison import OURS, Comparison, interleave
from scripts.benchmarks.systems import free_port, start, threads

BY_HAND = "by hand"
_VALIDATION = ("dataset.val_fraction=0.97", "dataset.test_fraction=0.0", "max_steps=10")
_TRAINING = ("dataset.test_fraction=0.0", "max_steps=30")
_SUFFIXES = (".csv", ".parquet")
_PHOTOS = 600
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


def _folder(bench: Bench, number: int, height: int, width: int) -> Path:
    found = bench.scratch / f"{number}-of-{height}x{width}"
    if not found.exists():
        from scripts.baselines import pictures  # late: it imports torch

        pictures.write(found, number, height, width)
    return found


def _files(size: int, folder: Path) -> list[str]:
    words = ["dataset=image_folder", f"dataset.root={folder}", "gpus=0", "batch_size=64"]
    words += ["~model", "+model={_target_: scripts.baselines.reading.Pooled}"]
    words += ["optimizer=sgd", "optimizer.lr=0.01"]
    return [sys.executable, "-m", "expt", *words, f"dataset.image_size=[{size},{size}]"]


def _small_files(*, again: bool = False, at_most: float | None = None) -> Case:
    """Return the case of the first step on a folder of many pictures."""

    def by_hand(bench: Bench) -> float:
        command = [sys.executable, "-m", "scripts.baselines.pictures", str(files(bench))]
        return float(json.loads(start([*command, f"--began={time.time()}"]).text)["first_step_s"])

    def ours(bench: Bench) -> float:
        command = [*_files(64, files(bench)), "epochs=1", "max_steps=1"]
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1 + again):
                run, began = Path(folder) / str(number), time.time()
                start([*command, f"seed={number}", f"hydra.run.dir={run}"], EXPT_CACHE=folder)
            result = json.loads((run / "result.json").read_text())
        return float(result["started"] + result["first_step_s"] - began)

    files = partial(_folder, number=50_000, height=64, width=64)
    name = f"50,000 JPEGs of 64x64 in class folders{', a second start' * again}: first step"
    return Case(name=name, unit="s", ours=ours, by_hand=by_hand, at_most=at_most)


def _photos() -> Case:
    """Return the case of photos that are larger than a model wants them, of which none is kept."""

    def by_hand(bench: Bench) -> float:
        command = [sys.executable, "-m", "scripts.baselines.pictures", str(files(bench))]
        command += ["--size=224", f"--epochs={bench.epochs}"]
        read = (start([*command, f"--readers={number}"]).text for number in (*READERS, 3))
        times = (json.loads(text)["epoch_s"][1:] for text in read)
        return 1e3 * float(min(map(statistics.median, times))) / _PHOTOS

    def ours(bench: Bench) -> float:
        command = [*_files(224, files(bench)), "dataset.cache=false", f"epochs={bench.epochs}"]
        with tempfile.TemporaryDirectory() as folder:
            start([*command, "world_size=1", f"hydra.run.dir={folder}/run"], EXPT_CACHE=folder)
            result = json.loads((Path(folder) / "run" / "result.json").read_text())
        train_size = int(result["data"]["train_size"])
        return 1e3 * float(statistics.median(result["epoch_s"][1:])) / train_size

    files = partial(_folder, number=_PHOTOS, height=1200, width=1600)
    name = "600 photos of 1600x1200 to 224x224, nothing cached, one worker: a picture"
    return Case(name=name, unit="ms", ours=ours, by_hand=by_hand, at_most=0.5)


def _text(large: int, small: int, what: str, words: Sequence[str], held_out: float = 0.0) -> Case:
    """Return the case of private memory with a large text; the other is that of a small one.

    `held_out` million bytes of each validate, or what the `words` say.
    """

    def peak(million: int, bench: Bench) -> float:
        path = bench.scratch / f"{million}.txt"
        if not path.exists():
            path.write_text(random.Random(0).randbytes(500_000).hex() * million)
        command = [sys.executable, "-m", "expt", "experiment=char_lm", f"dataset.root={path}"]
        command += [f"dataset.val_fraction={held_out / million}"] * bool(held_out)
        with tempfile.TemporaryDirectory() as folder:
            run = f"hydra.run.dir={folder}/run"
            output = start([*command, *words, run], watch_memory=True, EXPT_CACHE=folder)
        return output.peak.private_mib

    name = f"{what} of {large} million bytes to that of {small} million: private memory, peak"
    ours, by_hand = partial(peak, large), partial(peak, small)
    return Case(name=name, unit="MiB", ours=ours, by_hand=by_hand, at_most=1.1)


def _resume() -> Case:
    """Return the case of 10^8 parameters with Adam; the other is a fresh start."""
    hidden = ",".join(["3162"] * 10)
    words = ["dataset=synthetic", "model=mlp", f"model.hidden=[{hidden}]", "optimizer=adam"]
    words += ["gpus=0", "batch_size=64"]

    def first_step(bench: Bench, *, resumed: bool) -> float:
        command = [sys.executable, "-m", "expt", *words]
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1, 2 + resumed):
                more = [f"max_steps={number}", f"hydra.run.dir={folder}/run", "resume=auto"]
                start([*command, *more])
            result = json.loads((Path(folder) / "run" / "result.json").read_text())
        return float(result["first_step_s"])

    name = "10^8 parameters with Adam: the first step of a resumed run to that of a fresh one"
    ours, by_hand = partial(first_step, resumed=True), partial(first_step, resumed=False)
    return Case(name=name, unit="s", ours=ours, by_hand=by_hand, at_most=1.2)


CASES = (
    *(_table(suffix, what, 1.5) for suffix in _SUFFIXES for what in ("first step", "peak memory")),
    *(_table(suffix, "first step", None, again=True) for suffix in _SUFFIXES),
    _read("rows", 64, at_most=0.77),
    _read("rows", 1024, at_most=1.0),
    _read("stream", 64),
    _read("stream", 1024),
    _read("pictures", 64),
    _read("pictures", 64, workers=1),
    _small_files(at_most=1.5),
    _small_files(again=True),
    _photos(),
    _text(16, 1, "validation", _VALIDATION),
    _text(500, 10, "training", _TRAINING, held_out=0.05),
    _resume(),
)
