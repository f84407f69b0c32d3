"""What is planned without numbers, against the memory that CPU workers take for the same steps."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
from pathlib import Path

import pytest

from expt.config.schema import RunConfig
from expt.planning.plan import planned
from expt.tasks.sums import Sums
from expt.training.collectives import Worker
from expt.training.loop import accumulate_gradients
from expt.worker.build import build_data, build_learner
from tests.conftest import Configured
from tests.ranks import together

WORKERS = 2
LM = ("model=transformer", "task=language_model", "dataset=text", "optimizer=adamw", "dataset.context=256")
IMAGES = ("dataset=synthetic", "dataset.channels=3", "dataset.image_size=[32,32]", "dataset.train_size=640")
CASES = {
    "decoder": (*LM, "model.size=10m", "batch_size=8"),
    "decoder, checkpointed": (*LM, "model.size=10m", "batch_size=16", "activation_checkpointing=auto"),
    "decoder, bf16": (*LM, "model.size=10m", "batch_size=8", "amp=bf16"),
    "resnet18": (*IMAGES, "model=resnet18", "batch_size=32"),
    "mlp": (*IMAGES, "model=mlp", "model.hidden=[4096,4096]", "batch_size=64", "optimizer=adamw"),
}


def kib(field: str) -> int:
    """Of this process, as the kernel has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def taken(config: RunConfig, worker: Worker) -> float:
    """Bytes beyond those of a process that has done the same with one sample, at most, in two steps."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD: pages of their own, or what lies between tensors would count
    _steps(config, worker, 1)  # which brings the libraries' code into memory, no part of a plan
    gc.collect()
    libc.malloc_trim(0)
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    _steps(config, worker, config.batch_size // WORKERS)
    return 1024.0 * (kib("VmHWM") - before)


def _steps(config: RunConfig, worker: Worker, samples: int) -> None:
    data = build_data(config, worker)
    learner = build_learner(config, data, worker)
    batch = data.blank(samples)._replace(global_size=config.batch_size)
    sums = Sums(learner.task, worker.device)
    for _ in range(2):
        accumulate_gradients(learner, batch, sums.add)
        learner.precision.update(learner.optimizer, learner.module.parameters())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_is_near_what_two_workers_take(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 3000)
    configs, measured = dict[str, RunConfig](), dict[str, float]()
    for name, words in CASES.items():
        text = [f"dataset.root='{tmp_path / 'book.txt'}'"] if "decoder" in name else []
        configs[name] = config = dataclasses.replace(configured(*words, *text), world_size=WORKERS)
        (folder := tmp_path / name).mkdir()
        measured[name] = max(together(folder, WORKERS, functools.partial(taken, config)))
    off = dict[str, float]()
    for name, config in configs.items():  # after all forks, which autograd's threads forbid
        found = planned(config, None, tokens=None, per_node=8, network=1e9)
        wanted = "checkpointed" in name
        plan = next(each for each in found.plans if each.strategy == "ddp" and each.checkpointing == wanted)
        off[name] = plan.total_bytes / measured[name] - 1
        told = f"planned {plan.total_bytes / 2**20:.0f} MiB, measured {measured[name] / 2**20:.0f} MiB"
        print(f"{name}: {told}, {off[name]:+.0%}")
    assert {name: share for name, share in off.items() if abs(share) > 0.15} == {}
