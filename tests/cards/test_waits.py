"""Waits of the host for the device within steps: each would keep it from running ahead."""

import collections
import contextlib
import io
import json
import os
import re
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import expt
from expt.config.parse import parse
from expt.data.loading import Batch
from expt.machine import Machine
from expt.training import collectives
from expt.training.loop import train_epoch
from expt.worker import parallel
from expt.worker import run as worker_run
from expt.worker import steps as worker_steps
from tests import soft_gpu
from tests.cards.ranks import ranks
from tests.composing import composed
from tests.conftest import Cards
from tests.facade import as_typed, request_of

STEPS, BEFORE = 80, {1: 2, 2: 12}
"""The steps in which waits count, and by the number of workers those before, in which torch chooses
its kernels. DistributedDataParallel measures itself in the first ten, and in each hundredth.
"""
USUAL = as_typed(
    "epochs=1 batch_size=4 dataset.train_limit=368 log_every=1000 tensorboard.images=false"
    " timeout_s=60 threads=1"
)
TEXT = (
    "task=language_model dataset=text dataset.root=text.txt dataset.context=16 model=transformer"
    " model.layers=1 model.heads=2 model.width=16 optimizer=adamw"
)
OWN = f"~task +task._target_={__name__}.Halved +task.metrics.size=max objective=loss/val"


class Halved(expt.Task):
    """Weights and metrics that are Python's numbers, of a loss that is not divided by samples."""

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        total = functional.cross_entropy(outputs, batch.targets, reduction="sum")
        return total / 2, len(outputs) / 2

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, float]]:
        return {"size": (outputs.detach().abs().sum(), outputs.numel())}


class Experts(torch.nn.Module):
    """A custom model, whose unused parameters a sharded step looks for."""

    seen: Tensor

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.seen += 1
        outputs: Tensor = self.layer(images)
        return outputs


class Case(NamedTuple):
    words: str
    waits: Mapping[str, int] = {}
    """How often it waits within STEPS, by where."""


LOG = "tasks/sums.py averages_if_any"
OF_TORCH = "training/precision.py update"
"""GradScaler asks whether to skip, unless the optimizer is fused."""
ONE = {
    "logged": Case("log_every=20", {LOG: 4}),
    "logged in each step": Case(
        "log_every=1 tensorboard.histograms=true tensorboard.norms=true", {LOG: STEPS}
    ),
    "bf16, clipped by both": Case(
        "model=convnet amp=bf16 gradient_clip=1.0 gradient_clip_value=0.5"
    ),
    "fp16": Case("amp=fp16 optimizer=adam gradient_clip=1.0 gradient_clip_value=0.5"),
    "ema": Case("model=convnet ema=0.9 model.dropout=0.2 batch_norm=groups batch_norm_group=2"),
    "micro-batches": Case("gradient_accumulation=2 task.class_weights=balanced ema=0.9"),
    "as many as fit": Case("gradient_accumulation=auto optimizer=adamw label_smoothing=0.1"),
    "offloaded": Case("optimizer=adamw offload=cpu scheduler=one_cycle"),
    "muon": Case("optimizer=muon offload=cpu"),
    "mixed": Case("mixup=0.2 cutmix=1.0"),
    "augmented": Case("dataset.augment.crop_padding=1 dataset.augment.flip=true"),
    "transformer": Case(f"{TEXT} activation_checkpointing=auto gradient_clip=1.0"),
    "resnet18": Case("model=resnet18 channels_last=true batch_size=2 max_steps=6 ema=0.9"),
    "regression": Case(
        "task=regression dataset=diabetes dataset.train_limit=184 batch_size=2 optimizer=adamw"
    ),
    "own task": Case(f"{OWN} gradient_accumulation=2"),
    "skipped": Case("on_nan=skip"),
    "skipped with states": Case("on_nan=skip optimizer=adamw offload=cpu gradient_clip=1.0"),
    "skipped in fp16": Case("on_nan=skip amp=fp16"),
    # These wait in each step.
    "skipped, not fused": Case("on_nan=skip optimizer=muon", {OF_TORCH: STEPS}),
    "skipped with ema": Case("on_nan=skip ema=0.9", {"training/loop.py train_epoch": STEPS}),
    "fp16, not fused": Case("amp=fp16 optimizer=muon", {OF_TORCH: STEPS}),
}
MODEL = f"~model +model._target_={__name__}.Experts"
TWO = {
    "ddp": Case("ema=0.9 gradient_clip=1.0 ddp.comm_hook=bf16"),
    "logged": Case("log_every=1", {LOG: STEPS}),
    "micro-batches": Case(f"{OWN} gradient_accumulation=2 on_nan=skip"),
    "as many as fit": Case("gradient_accumulation=auto"),
    "groups": Case("model=convnet batch_norm=groups batch_norm_group=2"),
    # torch's SyncBatchNorm asks three times in each of three layers which workers have samples.
    "sync": Case("model=convnet batch_norm=sync", {"tasks/task.py forward": 9 * STEPS}),
    "fsdp": Case("strategy=fsdp optimizer=adamw amp=bf16 gradient_clip=1.0 ema=0.9"),
    "fsdp, offloaded": Case(
        "strategy=fsdp optimizer=adamw offload=cpu gradient_accumulation=2 on_nan=skip"
    ),
    "fsdp in fp16": Case(f"strategy=fsdp {MODEL} amp=fp16 optimizer=adamw"),
}


FAST = {"ema", "fp16", "transformer", "skipped with states", "ddp"}


class Watch:
    """Counts waits, and where they come from, after the first steps of a run."""

    def __init__(self, before: int) -> None:
        self._before = before
        self.begin()
        vars(worker_run)["train_epoch"] = self._watched
        warnings.showwarning = self._note  # type: ignore[assignment]

    def begin(self) -> None:
        self.places, self._batches, self._waits = collections.Counter[str](), 0, 0
        warnings.simplefilter("always")

    @property
    def found(self) -> dict[str, int]:
        other = self._waits - self.places.total()
        return {**self.places, **({"elsewhere": other} if other else {})}

    def _watched(self, learner: Any, batches: Any, *args: Any, **more: Any) -> None:
        def each() -> Iterator[Any]:
            for batch in batches:
                self._batches += 1
                if self._batches == self._before + 1:
                    watch()
                yield batch

        def watch() -> None:
            self._waits -= soft_gpu.count("waits")
            torch.cuda.set_sync_debug_mode("warn")

        if self._batches > self._before:
            watch()
        train_epoch(learner, each(), *args, **more)
        torch.cuda.set_sync_debug_mode("default")
        self._waits += soft_gpu.count("waits")

    def _note(self, message: Warning, *_: object) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            root = str(Path(expt.__file__).parent)
            own = [one for one in traceback.extract_stack() if one.filename.startswith(root)]
            path = Path(own[-1].filename).relative_to(root)
            self.places[f"{path}:{own[-1].lineno} {own[-1].name}"] += 1


def main(*cases: str) -> None:
    """Train cases of a number of workers in this process, and print their waits."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    worker = collectives.worker_from(os.environ, gpus=range(size))
    machine = Machine(gpus=tuple(map(str, range(size))), cpus=2)
    worker_steps.MEET_EVERY_S = 1e9  # where workers agree, a few times a second, they wait
    parallel._compare_workers = lambda *_: None  # so they do in steps 1, 2, 4, 8, ...
    watch, found = Watch(BEFORE[size]), dict[str, dict[str, int]]()
    with collectives.process_group(worker, backend="nccl", timeout_s=60):
        for number, name in enumerate(cases):
            watch.begin()
            steps = f"gpus={size} max_steps={BEFORE[size] + STEPS}"
            case = (ONE if size == 1 else TWO)[name]
            words = (*USUAL, *as_typed(f"{steps} {case.words}"))
            config = parse(composed(*words), machine)
            (folder := Path(f"run{number}")).mkdir(exist_ok=True)
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                worker_run.Run(request_of(config, folder), worker).train()
            found[name] = watch.found
    if rank == 0:
        print(json.dumps(found))


def waits(size: int, cases: Collection[str], folder: Path) -> dict[str, dict[str, int]]:
    """Return what rank 0 of `size` has printed."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    first, *_ = ranks(f"from {__name__} import main; main(*{[*cases]})", size, folder)
    found: dict[str, dict[str, int]] = json.loads(first.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("is_fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_waits_for_nothing(size: int, is_fast: bool, cards: Cards, tmp_path: Path) -> None:
    cards()
    every = ONE if size == 1 else TWO
    cases = {name: case for name, case in every.items() if (name in FAST) == is_fast}
    found = waits(size, cases, tmp_path)
    without_lines = {
        name: {re.sub(r":\d+", "", place): number for place, number in places.items()}
        for name, places in found.items()
    }
    assert without_lines == {name: case.waits for name, case in cases.items()}, found
