"""The measures that need a GPU: the fraction of its matrix rate that a training reaches, and many
runs on one card.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from expt.gpus import MPS_DAEMON
from scripts.benchmarks.bench import Bench, warm_epoch_s
from scripts.benchmarks.comparison import OURS, Comparison
from scripts.benchmarks.data import TRAIN_IMAGES
from scripts.benchmarks.systems import System, Training, environment, expt_command, start

# Forward and backward of ResNet-18 with the small stem on 60,000 images of 28x28, a multiply-add as
# two.
RESNET18_EPOCH_TFLOP = 164.0
CHANNELS_LAST = "channels_last=true"
_MATRIX_RATE = """
import json, sys, time, torch
size = int(sys.argv[1])
a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
for _ in range(20): a @ b
torch.cuda.synchronize()
best = 1e9
for _ in range(10):
    began = time.perf_counter()
    for _ in range(20): a @ b
    torch.cuda.synchronize()
    best = min(best, (time.perf_counter() - began) / 20)
print(json.dumps(2 * size**3 / best / 1e12))
"""


def gpu(bench: Bench) -> Iterator[Comparison]:
    """One GPU; nothing where there is none."""
    if not bench.gpus:
        bench.say("gpu: not measured, this machine has no GPU")
        return
    rate = [matrix_rate() for _ in range(bench.rounds)]
    yield Comparison("gpu", "bf16 matrix product, 8192 cubed", "TFLOP/s", {OURS: rate})
    peak = max(rate)
    for batch_size in (512, 1024):
        if "resnet18" in bench.models:
            epochs = _epochs(bench, "resnet18", batch_size, at_most=1 / 10)
            yield epochs
            rates = [
                RESNET18_EPOCH_TFLOP * bench.images_for("resnet18") / TRAIN_IMAGES / s
                for s in epochs.values[OURS]
            ]
            reached = [rate / peak for rate in rates]
            case = f"resnet18, bf16, batch {batch_size}: fraction of the matrix rate"
            yield Comparison("gpu", case, "", {OURS: reached}, at_least=0.4)
    for model in {"mlp", "convnet"} & {*bench.models}:
        yield _epochs(bench, model, 512, at_most=1 / 50)
    yield from packed(bench)


def matrix_rate(size: int = 8192) -> float:
    """Return the rate of a bf16 product of two square matrices [TFLOP/s]."""
    return float(json.loads(start([sys.executable, "-c", _MATRIX_RATE, str(size)]).text))


def _on_one_gpu(bench: Bench, model: str, batch_size: int) -> Training:
    return Training(
        model=model, data=bench.data(bench.images_for(model), 256), batch_size=batch_size,
        epochs=bench.epochs,
        workers=1, gpus=1, amp=True,
    )  # fmt: skip


def _epochs(bench: Bench, model: str, batch_size: int, *, at_most: float) -> Comparison:
    """Seconds per epoch on one GPU, in bf16, of expt and of the hand-written loop."""
    training = _on_one_gpu(bench, model, batch_size)
    ours = bench.systems[OURS]
    fast = System(OURS, sys.executable, overrides=[CHANNELS_LAST, *ours.overrides])
    on_one = Bench(**{**vars(bench), "systems": {**bench.systems, OURS: fast}})
    trainings = {name: training for name in bench.systems if name in (OURS, "plain")}
    return on_one.compare(
        "gpu",
        f"{model}, bf16, batch {batch_size}",
        "s",
        trainings,
        warm_epoch_s,
        {"plain": at_most},
    )


def packed(bench: Bench, runs: int = 8) -> Iterator[Comparison]:
    """Seconds for several mlp runs at once on one card, one after another, and at once through MPS
    if that is there.
    """
    data = bench.data(bench.images_for("mlp"))
    training = Training(model="mlp", data=data, epochs=5, workers=1, gpus=1, batch_size=512)

    def wall_s(runs_per_gpu: int, **extra: Any) -> float:
        with tempfile.TemporaryDirectory() as folder:
            sweep = [f"hydra.sweep.dir={folder}/sweep", f"seed=range({runs})", "-m"]
            share = f"hydra.launcher.runs_per_gpu={runs_per_gpu}"
            # As many as fit on one card: another card must not help.
            limit = f"hydra.launcher.max_concurrent={runs_per_gpu}"
            return start(
                [*expt_command(training), *sweep, share, limit], CUDA_VISIBLE_DEVICES="0", **extra
            ).wall_s

    at_once, in_a_row, by_mps = list[float](), list[float](), list[float]()
    for _ in range(bench.rounds):
        at_once.append(wall_s(runs))
        in_a_row.append(wall_s(1))
        with mps() as extra:
            by_mps += [] if extra is None else [wall_s(runs, **extra)]
        told = f", by MPS {by_mps[-1]:.1f} s" if by_mps else f", MPS: no {MPS_DAEMON}"
        bench.say(f"gpu, {runs} mlp runs: {at_once[-1]:.1f} s, in a row {in_a_row[-1]:.1f} s{told}")
    case = f"{runs} mlp runs with runs_per_gpu={runs}"
    yield Comparison("gpu", case, "s", {OURS: at_once, "in a row": in_a_row}, {"in a row": 0.25})
    if by_mps:
        yield Comparison(
            "gpu", f"{case}, by MPS", "s", {OURS: by_mps, "in a row": in_a_row}, {"in a row": 0.25}
        )


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """Variables that lead to a daemon of NVIDIA's Multi-Process Service, which lasts as long; None
    without one.
    """
    if shutil.which(MPS_DAEMON) is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        extra = {f"CUDA_MPS_{what}_DIRECTORY": folder for what in ("PIPE", "LOG")}
        known = environment(CUDA_VISIBLE_DEVICES="0", **extra)
        subprocess.run(
            [MPS_DAEMON, "-d"],
            env=known,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        try:
            yield extra
        finally:
            subprocess.run(
                [MPS_DAEMON], input=b"quit\n", env=known, stdout=subprocess.DEVNULL, check=True
            )
