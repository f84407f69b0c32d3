"""Steps by CUDA graphs on a real GPU: `pytest -m gpu`. Never run yet: written without a card."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from expt.config.parse import parse
from expt.machine import detect
from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.tasks.sums import Sums
from expt.training.graphed_step import GraphedStep
from expt.training.loop import train_epoch
from expt.worker import build, random_state
from tests.composing import composed
from tests.conftest import RunFolder, Trained
from tests.gpu.test_steps import first_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

EXACT = ("optimizer.lr=0.125", "scheduler=step", "scheduler.gamma=0.5", "scheduler.every_epochs=1")
"""Rates that are float32, so that a run without `cuda_graph` has the same."""
CASES = {
    "mlp": ("model=mlp", "model.dropout=0.2"),
    "mlp, AdamW": ("model=mlp", "model.dropout=0.2", "optimizer=adamw", "gradient_clip=1.0"),
    "convnet, bf16": ("model=convnet", "amp=bf16", "gradient_accumulation=2"),
    "convnet, fp16": ("model=convnet", "amp=fp16", "ema=0.9"),
    "resnet18, bf16": ("model=resnet18", "amp=bf16"),
}
if torch.cuda.is_available():  # else torch refuses deterministic products; as in a run's workers
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Determinism is of the whole process."""
    was = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(was[0])
    torch.backends.cudnn.benchmark = was[1]


def left_by(*words: str) -> tuple[list[Tensor], int]:
    """All that two epochs leave, the last batch of each smaller; and how many steps were replayed."""
    sizes = (
        "gpus=1",
        "dataset.train_limit=400",
        "batch_size=64",
        "drop_last=false",
        "deterministic=true",
    )
    config, worker = parse(composed(*sizes, *EXACT, *words), detect()), first_gpu()
    random_state.seed(1)
    random_state.set_determinism(config.deterministic, worker.device)
    data = build.build_data(config, worker)
    learner, position = (
        build.build_learner(config, data, worker),
        build.build_position(config, data),
    )
    sums = Sums(learner.task, worker.device)
    for number in (1, 2):
        position.begin_epoch()
        train_epoch(learner, data.train.epoch(number), position, sums, log_every=10**9)
    states = [value for state in learner.optimizer.state.values() for value in state.values()]
    everything = [
        *learner.module.state_dict().values(),
        *states,
        sums.values,
        torch.cuda.get_rng_state(),
    ]
    graphed = learner.graphed
    return everything, graphed.replayed if isinstance(graphed, GraphedStep) else 0


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_eager_steps(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "bf16" in case and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU computes no bfloat16")
    eager, none = left_by(*CASES[case])
    replayed, steps = left_by(*CASES[case], "cuda_graph=true")
    assert not capsys.readouterr().err
    assert none == 0
    assert steps == 0 if "fp16" in case else steps >= 8, (
        "GradScaler may leave an update out: that one is eager"
    )
    assert all(map(torch.equal, replayed, eager))


def test_a_run_that_goes_on_is_equal_to_one_that_was_not_stopped(trained: Trained) -> None:
    words = (
        "gpus=1",
        "model=convnet",
        "deterministic=true",
        "dataset.train_limit=640",
        "epochs=2",
        "cuda_graph=true",
    )

    def weights(run: RunFolder) -> dict[str, Tensor]:
        found: dict[str, Tensor] = checkpoint.load(RunPaths(run.folder).last)["model"]
        return found

    whole = trained(*words, "scheduler=constant", name="whole")
    part = trained(*words, "scheduler=constant", "max_steps=14", name="part")
    rest = trained(*words, "scheduler=constant", f"resume='{part.folder}'", name="rest")
    one, other = weights(whole), weights(rest)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_replay_waits_for_nothing() -> None:
    config, worker = (
        parse(composed("gpus=1", "model=mlp", "cuda_graph=true"), detect()),
        first_gpu(),
    )
    data = build.build_data(config, worker)
    learner, position = (
        build.build_learner(config, data, worker),
        build.build_position(config, data),
    )
    sums = Sums(learner.task, worker.device)
    train_epoch(learner, data.train.epoch(1), position, sums, log_every=10**9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_epoch(learner, data.train.epoch(2), position, sums, log_every=10**9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
