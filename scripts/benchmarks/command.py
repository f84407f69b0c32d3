"""The command line of scripts/bench."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console

from scripts.benchmarks import gpu, grid, large, report, steps, trainings
from scripts.benchmarks.bench import MODELS, Bench
from scripts.benchmarks.comparison import OURS, Comparison
from scripts.benchmarks.systems import PEERS, System, num_gpus

MEASURES: dict[str, Callable[[Bench], Iterator[Comparison]]] = {
    "epoch": trainings.epoch,
    "first_step": trainings.first_step,
    "sweep": trainings.sweep,
    "grid": grid.grid,
    "memory": trainings.memory,
    "step": steps.step,
    "allreduce": steps.allreduce,
    "checkpoint": steps.checkpoint,
    "dashboard": steps.dashboard,
    "gpu": gpu.gpu,
    "data": large.data,
}
DEBIAN_DATA = Path("/usr/share/datasets/fashion-mnist")


def main() -> None:
    """Measure what the arguments ask for; exit with 1 where a training failed."""
    args = _arguments()
    console, progress = Console(), Console(stderr=True, highlight=False)
    comparisons: list[Comparison] = []
    gpus = 0 if args.device == "cpu" else num_gpus()
    machine = report.describe_machine(gpus)
    with tempfile.TemporaryDirectory(prefix="expt-bench-") as scratch:
        bench = Bench(
            systems=_systems(args),
            source=args.data,
            scratch=Path(scratch),
            rounds=args.rounds,
            epochs=args.epochs,
            models=args.models,
            images=args.images,
            points=args.points,
            gpus=gpus,
            say=lambda text: progress.print(text, style="dim"),
        )
        try:
            for name in args.only:
                for comparison in MEASURES[name](bench):
                    comparisons.append(comparison)
                    if args.json:  # after each, so that an interruption loses none
                        report.write_json(args.json, machine, comparisons)
        except subprocess.CalledProcessError as error:
            progress.print(f"failed: {error.cmd}\n{error.stderr or ''}", style="red", markup=False)
            sys.exit(1)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), highlight=False)
    report.print_table(console, comparisons)


def _systems(args: argparse.Namespace) -> dict[str, System]:
    ours = System(OURS, sys.executable, overrides=args.overrides)
    return {OURS: ours, **{name: System(name, args.python) for name in args.peers}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure expt against its peers, in turn, on the devices present.",
        epilog="KEY=VALUE: given to expt alone, e.g. channels_last=true.",
    )
    parser.add_argument(
        "--only", type=_names(MEASURES), default=list(MEASURES), help=", ".join(MEASURES)
    )
    parser.add_argument(
        "--models", type=_names(MODELS), default=list(MODELS), help=", ".join(MODELS)
    )
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter that has the peers installed"
    )
    parser.add_argument(
        "--data", type=Path, default=DEBIAN_DATA, help="folder of Fashion-MNIST's four files"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--epochs", type=int, default=3, help="of each training; the first is not counted"
    )
    parser.add_argument(
        "--images", type=int, help="training images; on a CPU fewer for the larger models"
    )
    parser.add_argument(
        "--points",
        type=_numbers,
        default=[10, 100, 1000],
        help="of the grids, e.g. 10,100,1000,10000",
    )
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return sorted({int(number) for number in text.split(",")})


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    names = list(known)

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name}: not one of {', '.join(names)}")
        return chosen

    return parse
