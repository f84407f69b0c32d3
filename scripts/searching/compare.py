"""Best accuracy over device-seconds: TPE with rungs, random search, and Optuna around a
hand-written script.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.benchmarks.systems import environment

Curve = list[tuple[float, float]]
"""Device-seconds, and the best accuracy until then."""
RANDOM, OURS, BY_HAND = (
    "random search",
    "search=tpe search.rungs=asha",
    "Optuna's TPE and pruner, hand-written script",
)
SPACE = (
    *(
        "model=mlp,convnet",
        "optimizer.lr=tag(log,interval(1e-4,1))",
        "optimizer.momentum=interval(0,0.99)",
    ),
    *("optimizer.weight_decay=tag(log,interval(1e-6,1e-2))", "batch_size=32,64,128,256"),
    "search.when=['model=mlp: model.hidden=[64],[128],[256],[512]']",
)
LOOK_S = 0.5
IMAGES = 60_000
"""Of Fashion-MNIST, to train on and to hold out."""


def main() -> None:
    """Run every system with each seed, print what it took, and write the numbers and the
    picture.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--seconds", type=int, default=600, help="of the clock, for each search")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="runs at a time, each of one worker")
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--limit", type=int, default=12_000, help="images to train on")
    parser.add_argument(
        "--held-out", type=int, default=2_000, help="images that every epoch is judged by"
    )
    parser.add_argument("--out", type=Path, default=Path("build/search_compare"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Curve]] = {RANDOM: [], OURS: [], BY_HAND: []}
    with tempfile.TemporaryDirectory() as folder:
        data = _unpacked(args.root, Path(folder) / "data")
        for seed in range(args.seeds):
            for system, curves in found.items():
                curves.append(
                    _measured(system, seed, args, Path(folder) / f"{len(curves)}{system[:3]}", data)
                )
                (args.out / "curves.json").write_text(json.dumps(found))
                print(f"{system}, seed {seed}: {curves[-1][-1][1]:.4f}", flush=True)
    for line in table(found):
        print(line)
    draw(found, args.out / "search.png")


def _measured(system: str, seed: int, args: argparse.Namespace, folder: Path, data: Path) -> Curve:
    if system == BY_HAND:
        numbers = {
            "seed": seed,
            "seconds": args.seconds,
            "jobs": args.cores,
            "epochs": args.epochs,
            "limit": args.limit,
            "held-out": args.held_out,
        }
        words = [word for key, value in numbers.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "scripts.searching.by_hand", "--data", str(data), *words]
        return _followed(command, args, folder, _printed)
    sampler = ["search=random"] if system == RANDOM else ["search=tpe", "search.rungs=asha"]
    fixed = [f"search.seed={seed}", f"search.budget={args.seconds}s", "search.runs=10000",
        f"epochs={args.epochs}",
             "dataset=fashion_mnist", f"dataset.root={args.root}",
             f"dataset.train_limit={args.limit}",
             f"dataset.val_fraction={args.held_out / IMAGES}", "world_size=1",
             "tensorboard.images=false", f"hydra.launcher.max_concurrent={args.cores}"]  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "expt",
        "-m",
        *sampler,
        *SPACE,
        *fixed,
        f"hydra.sweep.dir={folder / 'sweep'}",
    ]
    return _followed(command, args, folder, _logged)


def _followed(
    command: Sequence[str],
    args: argparse.Namespace,
    folder: Path,
    values: Callable[[Path], list[float]],
) -> Curve:
    """Look at what it has come to until its time is over."""
    folder.mkdir()
    curve, best, began = [(0.0, 0.0)], 0.0, time.monotonic()
    with (folder / "printed").open("w") as printed, (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, env=environment(), stdout=printed, stderr=errors, start_new_session=True
        )
        while process.poll() is None and time.monotonic() - began < args.seconds:
            time.sleep(LOOK_S)
            best = max([best, *values(folder)])
            curve.append(((time.monotonic() - began) * args.cores, best))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    return curve


def _printed(folder: Path) -> list[float]:
    return [float(line) for line in (folder / "printed").read_text().splitlines()]


def _logged(folder: Path) -> list[float]:
    text = "".join(path.read_text() for path in folder.glob("sweep/*/metrics.jsonl"))
    lines = [
        line for line in text.splitlines() if '"tag": "accuracy/val"' in line and line.endswith("}")
    ]
    return [json.loads(line)["value"] for line in lines]


def _unpacked(root: Path, folder: Path) -> Path:
    """As torchvision wants it."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in root.glob("*-ubyte.gz"):
        with gzip.open(path) as packed, (raw / path.stem).open("wb") as file:
            shutil.copyfileobj(packed, file)
    return folder


def reached(curve: Curve, accuracy: float) -> float | None:
    """The device-seconds until the curve was as high."""
    return next((seconds for seconds, best in curve if best >= accuracy), None)


def mean(curves: Sequence[Curve], points: int = 1000) -> Curve:
    """The mean of the seeds' best at each time, until the first of them ends."""
    end = min(curve[-1][0] for curve in curves)
    at = [end * index / points for index in range(1, points + 1)]
    return [
        (
            x,
            statistics.fmean(
                max(best for seconds, best in curve if seconds <= x) for curve in curves
            ),
        )
        for x in at
    ]


def table(found: dict[str, list[Curve]]) -> list[str]:
    """Markdown: the final best, and how long it took to random search's; for each seed, and for
    their mean.
    """
    means = {system: mean(curves) for system, curves in found.items()}
    goal = means[RANDOM][-1][1]
    if not goal:
        raise SystemExit(
            "random search has measured nothing: give it more --seconds, or fewer --epochs"
        )
    base = reached(means[RANDOM], goal)
    head = (
        "| search | best accuracy | device-seconds to random's best, each seed | their mean curve"
        " to random's | ratio |"
    )
    lines = [head, "|---|---|---|---|---|"]
    for system, curves in found.items():
        took = [
            reached(curve, other[-1][1]) for curve, other in zip(curves, found[RANDOM], strict=True)
        ]
        bests = ", ".join(f"{curve[-1][1]:.4f}" for curve in curves)
        until = reached(means[system], goal)
        ratio = f"{until:.0f} | {until / base:.2f}" if until and base else "never | -"
        lines.append(
            f"| {system} | {bests} | {', '.join('-' if t is None else f'{t:.0f}' for t in took)} |"
            f" {ratio} |"
        )
    return lines


def draw(found: dict[str, list[Curve]], path: Path) -> None:
    """The mean of the seeds, and each of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for system, curves in found.items():
        (line,) = axes.plot([], [], label=system)
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=line.get_color(), alpha=0.25, linewidth=1)
        axes.plot(*zip(*mean(curves), strict=True), color=line.get_color())
    highest = max(curve[-1][1] for curves in found.values() for curve in curves)
    axes.set(
        xlabel="device-seconds",
        ylabel="best validation accuracy",
        ylim=(highest - 0.12, highest + 0.01),
    )
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
