"""Share of core-time that runs of unequal lengths spend training: in a search that waits for none,
and in batches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.systems import environment


class Utilisation(NamedTuple):
    """Of one command's runs."""

    runs: int
    span_s: float
    """From the first run's turn to the end of the last."""
    trained_s: float
    """Of all runs: their epochs and evaluations."""
    busy_s: float
    """Of all runs: from their turns to their ends."""

    def share(self, seconds: float, cores: int) -> float:
        """Of the cores' time."""
        return seconds / (self.span_s * cores)


def main() -> None:
    """Measure and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--root", default="/usr/share/datasets/fashion-mnist", help="Fashion-MNIST's files"
    )
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--cores", type=int, default=2, help="runs at a time, each of one worker")
    parser.add_argument("--train-limit", type=int, default=30_000)
    parser.add_argument(
        "--longest", type=int, default=16, help="epochs of the longest run; the shortest has 2"
    )
    args = parser.parse_args()
    fixed = [
        f"dataset=fashion_mnist dataset.root={args.root} dataset.train_limit={args.train_limit}",
        f"world_size=1 hydra.launcher.max_concurrent={args.cores} tensorboard.images=false",
    ]
    words = " ".join(fixed).split()
    searched = [
        "search=random",
        f"search.runs={args.runs}",
        f"epochs=int(interval(2,{args.longest}))",
    ]
    with tempfile.TemporaryDirectory() as folder:
        print(
            "| runs of unequal lengths | runs | span [s] | training | training and starting"
            " |\n|---|---|---|---|---|"
        )
        first = _measured(Path(folder) / "one_by_one", [*words, *searched])
        _print("search, each run when a core is free", first[0], args.cores)
        batch = f"search.batch={args.cores}"
        _print(
            f"search, {batch}",
            _measured(Path(folder) / "batches", [*words, *searched, batch])[0],
            args.cores,
        )
        epochs = ",".join(map(str, first[1]))
        hydra = f"hydra.sweeper.max_batch_size={args.cores}"
        grid = _measured(Path(folder) / "hydra", [*words, f"epochs={epochs}", hydra])[0]
        _print("Hydra's own sweeper, max_batch_size", grid, args.cores)


def _measured(folder: Path, words: Sequence[str]) -> tuple[Utilisation, list[int]]:
    command = [sys.executable, "-m", "expt", "-m", *words, f"hydra.sweep.dir={folder}"]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    records = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    records.sort(key=lambda record: record["started"])
    ends = [record["started"] + record["device_s"] for record in records]
    trained = sum(sum(record["epoch_s"]) + record["eval_s"] for record in records)
    span = max(ends) - records[0]["started"]
    found = Utilisation(len(records), span, trained, sum(record["device_s"] for record in records))
    return found, [record["config"]["epochs"] for record in records]


def _print(name: str, found: Utilisation, cores: int) -> None:
    shares = [f"{found.share(seconds, cores):.1%}" for seconds in (found.trained_s, found.busy_s)]
    print(f"| {name} | {found.runs} | {found.span_s:.1f} | {' | '.join(shares)} |", flush=True)
