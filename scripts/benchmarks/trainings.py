"""The measures that start whole trainings: seconds per epoch, time to the first step, a sweep's
overhead, memory.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping

from scripts.benchmarks.bench import Bench, warm_epoch_s
from scripts.benchmarks.comparison import OURS, Comparison
from scripts.benchmarks.memory import Peak
from scripts.benchmarks.systems import Training, expt_command, start

FEW_IMAGES = 256  # to evaluate on, where the evaluation is not what is measured
# model, global batch, amp: the largest ratio to each peer
EPOCH_BARS: dict[tuple[str, int, bool], dict[str, float]] = {
    ("mlp", 64, False): {"plain": 0.5, "lightning": 0.4},
    ("mlp", 1024, False): {"plain": 0.15},
    ("convnet", 64, False): {"plain": 0.85},
    ("convnet", 64, True): {"plain": 0.6},
    ("resnet18", 64, False): {},
    ("resnet18", 64, True): {"plain": 0.6},
}


def epoch(bench: Bench) -> Iterator[Comparison]:
    """Seconds per epoch of training; with amp, ours against the peers without."""
    for (model, batch_size, amp), bars in EPOCH_BARS.items():
        if model not in bench.models or batch_size > bench.images_for(model):
            continue
        training = Training(
            model=model,
            data=bench.data(bench.images_for(model), FEW_IMAGES),
            batch_size=batch_size,
            epochs=bench.epochs,
            workers=bench.workers,
            gpus=bench.gpus,
        )
        trainings = dict.fromkeys(bench.systems, training)
        trainings[OURS] = dataclasses.replace(training, amp=amp)
        if amp:
            trainings = {name: trainings[name] for name in (OURS, "plain")}
        case = f"{model}, batch {batch_size}" + (", amp against fp32" if amp else "")
        yield bench.compare("epoch", case, "s", trainings, warm_epoch_s, bars)


def first_step(bench: Bench) -> Iterator[Comparison]:
    """Seconds from starting the process to the end of the first optimiser step."""
    yield from _first_step(
        bench, "first_step", {"mlp": {"plain": 0.33}, "resnet18": {"plain": 0.5}}
    )


def _first_step(
    bench: Bench, name: str, bars: Mapping[str, dict[str, float]]
) -> Iterator[Comparison]:
    for model in bench.models:
        training = Training(
            model=model,
            data=bench.data(test=FEW_IMAGES),
            max_steps=3,
            workers=bench.workers,
            gpus=bench.gpus,
        )
        trainings = dict.fromkeys(bench.systems, training)
        yield bench.compare(
            name, model, "s", trainings, lambda outcome: outcome.first_step_s, bars.get(model, {})
        )


def sweep(bench: Bench, sizes: tuple[int, int] = (4, 12)) -> Iterator[Comparison]:
    """What a further run of a sweep takes, its training being one step; of a peer, what one more
    command takes.
    """
    training = Training(
        model="mlp",
        data=bench.data(1024, FEW_IMAGES),
        max_steps=1,
        workers=bench.workers,
        gpus=bench.gpus,
    )
    few, many = sizes

    def wall_s(runs: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = [f"hydra.sweep.dir={folder}/sweep", f"seed=range({runs})", "-m"]
            return start([*expt_command(training), *bench.systems[OURS].overrides, *words]).wall_s

    ours: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in bench.systems if name != OURS}
    for _ in range(bench.rounds):
        ours.append((wall_s(many) - wall_s(few)) / (many - few))
        bench.say(f"sweep, a further run: {ours[-1]:.3f} s")
        for name, values in others.items():
            values.append(bench.systems[name].train(training).wall_s)
    yield Comparison("sweep", f"a further run ({few} to {many})", "s", {OURS: ours, **others})


def memory(bench: Bench) -> Iterator[Comparison]:
    """Peak memory of a training's processes [MiB]."""
    quantities: dict[str, tuple[Callable[[Peak], float], dict[str, float]]] = {
        "all processes, shared pages once": (lambda peak: peak.total_mib, {}),
        "workers, shared pages once": (lambda peak: peak.workers_mib, {"plain": 0.7}),
        "workers, resident sets added": (lambda peak: peak.workers_resident_mib, {}),
    }
    for model in bench.models:
        training = Training(
            model=model,
            data=bench.data(test=FEW_IMAGES),
            max_steps=10,
            workers=bench.workers,
            gpus=bench.gpus,
        )
        peaks: dict[str, list[Peak]] = {name: [] for name in bench.systems}
        for _ in range(bench.rounds):
            for name, system in bench.systems.items():
                peaks[name].append(system.train(training, watch_memory=True).peak)
            medians = {
                name: round(statistics.median(p.total_mib for p in found))
                for name, found in peaks.items()
            }
            bench.say(f"memory, {model}: {medians}")
        for quantity, (value, bars) in quantities.items():
            values = {name: [value(peak) for peak in found] for name, found in peaks.items()}
            yield Comparison("memory", f"{model}: {quantity}", "MiB", values, bars)
