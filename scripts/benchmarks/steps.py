"""The measures of a single step: expt's own code in processes of our own, with the data ready."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.comparison import OURS, Comparison
from scripts.benchmarks.data import TEST_IMAGES, TRAIN_IMAGES
from scripts.benchmarks.systems import Training, environment, expt_command, free_port

STEPS = {"mlp": 200, "convnet": 40, "resnet18": 3}
GPU_STEPS = 200
BLOCKS_PER_ROUND = 3


def step(bench: Bench) -> Iterator[Comparison]:
    """One worker: seconds per step of expt's loop, and of forward, backward and step alone."""
    for model in bench.models:
        values = _measure(bench, model, mode="bare", workers=1)
        bar = 1.1 if model == "mlp" else 1.03
        yield Comparison("step", f"{model}, one worker, batch 64", "s", values, {"bare": bar})


def allreduce(bench: Bench) -> Iterator[Comparison]:
    """Share of a step that goes away when the workers do not sum their gradients."""
    for model in bench.models if bench.workers > 1 else ():
        values = _measure(bench, model, mode="no_sync", workers=bench.workers)
        share = [
            1 - alone / together
            for together, alone in zip(values["expt"], values["no_sync"], strict=True)
        ]
        yield Comparison(
            "allreduce",
            f"{model}, {bench.workers} workers, batch 64",
            "share of a step",
            {"expt": share},
        )


def checkpoint(bench: Bench) -> Iterator[Comparison]:
    """Seconds of an epoch of the whole set with a checkpoint at its end, and without: blocks of
    steps, extrapolated.
    """
    for model in bench.models:
        found = _measure(bench, model, mode="no_checkpoint", workers=bench.workers)
        bar = 1.02 if model == "resnet18" else None
        without = found["no_checkpoint"]
        yield from _added(
            bench, model, found, "checkpoint", "written, and waited for", without, bar
        )


def dashboard(bench: Bench) -> Iterator[Comparison]:
    """Seconds that pictures, norms and health add to an epoch of the whole set and its evaluation,
    drawn after each.
    """
    for model in bench.models:
        found = _measure(
            bench, model, mode="no_dashboard", workers=bench.workers, test_images=TEST_IMAGES
        )
        bar = 1.01 if model == "convnet" else None
        what = "pictures, norms, health of an epoch"
        yield from _added(bench, model, found, "dashboard", what, found["steps"], bar)


def _added(
    bench: Bench,
    model: str,
    found: Mapping[str, list[float]],
    measure: str,
    what: str,
    step_s: list[float],
    bar: float | None,
) -> Iterator[Comparison]:
    """What `measure` adds to a block of steps, and to an epoch of the whole set whose steps take
    `step_s`.
    """
    off, epoch_steps, case = (
        f"no_{measure}",
        TRAIN_IMAGES // 64,
        f"{model}, {bench.workers} workers",
    )
    blocks = zip(found[OURS], found[off], strict=True)
    added_s = [(ours - without) * _num_steps(bench, model) for ours, without in blocks]
    yield Comparison(measure, f"{case}: {what}", "s", {OURS: added_s})
    without = [each * epoch_steps for each in step_s]
    values = {OURS: [a + b for a, b in zip(without, added_s, strict=True)], off: without}
    yield Comparison(
        measure, f"{case}: an epoch of {epoch_steps} steps", "s", values, {off: bar} if bar else {}
    )


def _num_steps(bench: Bench, model: str) -> int:
    return GPU_STEPS if bench.gpus else STEPS[model]


def _measure(
    bench: Bench, model: str, *, mode: str, workers: int, test_images: int = 256
) -> dict[str, list[float]]:
    gpus = min(bench.gpus, workers)
    training = Training(model=model, data=bench.data(4096, test_images), workers=workers, gpus=gpus)
    words = [
        f"--mode={mode}",
        f"--steps={_num_steps(bench, model)}",
        f"--rounds={bench.rounds * BLOCKS_PER_ROUND}",
    ]
    # A checkpoint then has what most optimisers keep; pictures are drawn each time.
    more = {
        "no_checkpoint": ["optimizer.momentum=0.9"],
        "no_dashboard": ["tensorboard.images=true"],
    }
    overrides = [*expt_command(training)[3:], *more.get(mode, []), *bench.systems["expt"].overrides]
    values: dict[str, list[float]] = json.loads(
        _start_workers([*words, *overrides], workers).splitlines()[-1]
    )
    bench.say(
        f"{mode}, {model}: { ({name: round(min(found), 5) for name, found in values.items()}) }"
    )
    return values


def _start_workers(words: Sequence[str], workers: int) -> str:
    """What rank 0 prints."""
    command = [sys.executable, "-m", "scripts.benchmarks.step_worker", *words]
    shared = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1"}
    port, processes = free_port(), []
    for rank in range(workers):
        variables = {**shared, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
        own = environment(**{name: str(value) for name, value in variables.items()})
        processes.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, " ".join(command))
    return outputs[0]
