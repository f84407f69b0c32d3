"""What a worker holds of a sharded model, as the kernel counts it: its share, and a moment's
gathered blocks."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.machine import Machine
from expt.tasks.sums import Sums
from expt.training import patches
from expt.training.collectives import Worker
from expt.training.loop import accumulate_gradients
from expt.worker.build import build_data, build_learner
from tests.composing import composed
from tests.conftest import as_typed, environment
from tests.ranks import together

WORKERS = (1, 2, 4)
LM = (
    *as_typed("model=transformer task=language_model dataset=text dataset.context=16"),
    *as_typed("optimizer=adamw threads=1"),
)
LARGE, TINY = (
    ("model.width=256", "model.layers=40", "model.heads=4"),
    ("model.width=48", "model.layers=2"),
)
BYTES = 16
"""Of a parameter with its gradient and AdamW's two states, in float32."""


class Taken(NamedTuple):
    """MB beyond those of a process that has done the same with a tiny model."""

    at_most: float
    after: float
    """When some steps are done."""
    parameters: int


def kib(field: str) -> int:
    """Of this process, as the kernel has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def taken(tiny: RunConfig, large: RunConfig, worker: Worker) -> list[float]:
    """See Taken; from before the model is built."""
    patches.give_back_freed()  # as worker.main does
    _steps(tiny, worker)  # which brings the libraries' code into memory
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    parameters, after = _steps(large, worker)
    return [(kib("VmHWM") - before) / 1000, (after - before) / 1000, parameters]


def _steps(config: RunConfig, worker: Worker) -> tuple[int, int]:
    """Some steps; the number of parameters, and what the process holds after it."""
    data = build_data(config, worker)
    learner = build_learner(config, data, worker)
    batch = data.blank(1)._replace(global_size=config.batch_size)
    sums = Sums(learner.task, worker.device)
    for _ in range(2):
        accumulate_gradients(learner, batch, sums.add)
        learner.precision.update(learner.optimizer, learner.module.parameters())
    return sum(parameter.numel() for parameter in learner.module.parameters()), kib("VmRSS")


def _of(workers: int, *words: str) -> RunConfig:
    config = parse(composed(*words), Machine(gpus=(), cpus=2))
    if workers == 1:
        return dataclasses.replace(config, world_size=1, strategy="ddp")
    return dataclasses.replace(config, world_size=workers)


def main(folder: Path) -> None:
    """Print what workers take of 1, 2 and 4, in a process that has no memory of other tests."""
    (folder / "book.txt").write_text("to be or not to be, that is the question\n" * 300)
    found = {}
    for workers in WORKERS:
        words = (
            *LM,
            f"dataset.root='{folder / 'book.txt'}'",
            "world_size=4",
            "strategy=fsdp",
            "batch_size=4",
        )
        tiny, large = (_of(workers, *words, *size) for size in (TINY, LARGE))
        each = functools.partial(taken, tiny, large)
        (folder / str(workers)).mkdir()
        found[workers] = max(together(folder / str(workers), workers, each))
        print(workers, found[workers], file=sys.stderr, flush=True)
    print(json.dumps(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_holds_its_share(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.worker.test_memory_of_sharding", str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = {
        int(workers): Taken(*numbers)
        for workers, numbers in json.loads(done.stdout.splitlines()[-1]).items()
    }
    whole = BYTES * found[1].parameters / 1e6
    for more, fewer in ((1, 2), (2, 4)):
        fallen = found[more].at_most - found[fewer].at_most
        assert fallen == pytest.approx(whole / more - whole / fewer, rel=0.2), (more, fewer, found)
    for workers in WORKERS:
        assert found[workers].at_most < whole / workers + 0.1 * whole, "gathered units and messages"
        assert found[workers].after < whole / workers, "gradients are gone"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
