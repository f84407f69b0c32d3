"""The measures of a single step: expt's own code in processes of our own, with the data ready."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.comparison import Comparison
from scripts.benchmarks.systems import Training, environment, expt_command, free_port

STEPS = {"mlp": 200, "convnet": 40, "resnet18": 3}
GPU_STEPS = 200
BLOCKS_PER_ROUND = 3


def step(bench: Bench) -> Iterator[Comparison]:
    """One worker: seconds per step of expt's loop, and of forward, backward and step alone."""
    for model in bench.models:
        values = _measure(bench, model, mode="bare", workers=1)
        bars = {} if model == "mlp" else {"bare": 1.03}
        yield Comparison("step", f"{model}, one worker, batch 64", "s", values, bars)


def allreduce(bench: Bench) -> Iterator[Comparison]:
    """Share of a step that goes away when the workers do not sum their gradients."""
    for model in bench.models if bench.workers > 1 else ():
        values = _measure(bench, model, mode="no_sync", workers=bench.workers)
        share = [1 - alone / together for together, alone in zip(values["expt"], values["no_sync"], strict=True)]
        yield Comparison("allreduce", f"{model}, {bench.workers} workers, batch 64", "share of a step", {"expt": share})


def _measure(bench: Bench, model: str, *, mode: str, workers: int) -> dict[str, list[float]]:
    gpus = min(bench.gpus, workers)
    training = Training(model=model, data=bench.data(4096, 256), workers=workers, gpus=gpus)
    steps = GPU_STEPS if gpus else STEPS[model]
    words = [f"--mode={mode}", f"--steps={steps}", f"--rounds={bench.rounds * BLOCKS_PER_ROUND}"]
    overrides = [*expt_command(training)[3:], *bench.systems["expt"].overrides]
    values: dict[str, list[float]] = json.loads(_start_workers([*words, *overrides], workers).splitlines()[-1])
    bench.say(f"{mode}, {model}: { ({name: round(min(found), 5) for name, found in values.items()}) }")
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
