"""What a step on a GPU computes, and what it waits for: `pytest -m gpu`.

It has passed on soft GPUs; no card has run it yet."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from expt.config.parse import parse
from expt.dashboards.pictures import Review
from expt.dashboards.tensorboard import LayerValues
from expt.data.loading import Batch
from expt.machine import detect
from expt.runs.paths import RunPaths
from expt.tasks.sums import Sums
from expt.training.collectives import Worker
from expt.training.loop import train_epoch
from expt.training.precision import set_precision
from expt.worker import build
from tests.composing import composed
from tests.conftest import Trained
from tests.facade import as_typed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def first_gpu() -> Worker:
    device = torch.device("cuda", 0)
    return Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=device, gpus=(0,))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "words", [("model=mlp",), ("model=convnet", "amp=bf16")], ids=["mlp", "convnet"]
)
def test_an_epoch_waits_for_the_device_at_log_points_alone(words: tuple[str, ...]) -> None:
    config, worker = parse(composed("gpus=1", *words), detect()), first_gpu()
    data = build.build_data(config, worker)
    learner, position = (
        build.build_learner(config, data, worker),
        build.build_position(config, data),
    )
    sums, logs = Sums(learner.task, worker.device), list[float]()
    values = LayerValues(learner, replace(config.tensorboard, norms=True, histograms=False))

    def epoch(number: int) -> None:
        position.begin_epoch()
        batches = data.train.epoch(number)
        train_epoch(
            learner,
            batches,
            position,
            sums,
            log_every=10**9,
            on_gradients=values.note_gradients,
            on_log=lambda averages, speed: logs.append(speed),
        )

    epoch(1)  # the first step chooses algorithms, and copies what stays
    torch.cuda.set_sync_debug_mode("error")
    try:
        epoch(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not logs


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_review_waits_for_nothing_and_counts_as_on_a_cpu() -> None:
    torch.manual_seed(0)
    logits, labels, images = torch.randn(40, 5), torch.randint(5, (40,)), torch.randn(40, 1, 4, 4)
    here, there = Review(5, keep=4), Review(5, keep=4)
    here(Batch(images, labels, 40), logits)
    moved = Batch(images.cuda(), labels.cuda(), 40), logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there(*moved)
        there(*moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert here.confusion is not None
    assert there.confusion is not None
    assert torch.equal(there.confusion.cpu(), 2 * here.confusion)


def test_the_highest_precision_is_that_of_convolutions_too() -> None:
    torch.manual_seed(0)
    layer, images = (
        nn.Conv2d(64, 64, 3, bias=False).cuda(),
        torch.randn(8, 64, 16, 16, device="cuda"),
    )
    exact = nn.functional.conv2d(images.double(), layer.weight.double())
    try:
        set_precision("highest")
        assert (layer(images).double() - exact).abs().max() < 1e-5
    finally:
        torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("amp", ["false", "bf16", "fp16"])
def test_a_run_that_goes_on_is_equal_to_one_that_was_not_stopped(
    amp: str, trained: Trained
) -> None:
    words = (
        *as_typed("gpus=1 model=convnet deterministic=true"),
        f"amp={amp}",
        "dataset.train_limit=640",
    )
    whole = trained(*words, "epochs=2", "scheduler=constant", name="whole")
    part = trained(*words, "epochs=2", "max_steps=14", "scheduler=constant", name="part")
    rest = trained(*words, "epochs=2", "scheduler=constant", f"resume='{part.folder}'", name="rest")
    one, other = (run.state()["model"] for run in (whole, rest))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "words", [("model=mlp",), ("model=convnet",), ("model=resnet18",)], ids=lambda words: words[0]
)
def test_shipped_models_have_deterministic_operations(
    words: tuple[str, ...], trained: Trained
) -> None:
    result = trained(
        *words, "gpus=1", "deterministic=true", "max_steps=2", "dataset.train_limit=320"
    ).result
    assert result["status"] == "completed"


@pytest.mark.real_gpu("its driver times kernels")
def test_the_table_of_operators_has_times_of_the_gpu(trained: Trained) -> None:
    run = trained("gpus=1", "profile=true", "epochs=1")
    assert "Self CUDA" in RunPaths(Path(run.folder)).operators.read_text()


@pytest.mark.real_gpu("it runs what Triton compiles, and CUDA graphs")
@pytest.mark.parametrize("compiled", ["true", "reduce-overhead"])
def test_compiled_models_have_the_loss_curve_of_others(compiled: str, trained: Trained) -> None:
    # Compiled code draws other random numbers: no dropout.
    words = (
        *as_typed("gpus=1 model=convnet model.dropout=0 drop_last=false epochs=2 log_every=1"),
    )
    shape = "dataset.train_limit=600"  # the last batch of an epoch has another
    eager = trained(*words, shape, name="eager").curve("running/loss")
    other = trained(*words, shape, f"compile={compiled}", name="compiled").curve("running/loss")
    assert [loss for _, loss in other] == pytest.approx([loss for _, loss in eager], abs=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(("amp", "within"), [("false", 1e-3), ("bf16", 2e-2)])
def test_data_parallel_has_the_loss_curve_of_one_gpu(
    amp: str, within: float, trained: Trained
) -> None:
    words = ("log_every=1", "max_steps=20", f"amp={amp}")
    one = trained("gpus=1", *words, name="one").curve("running/loss")
    two = trained("gpus=2", "strategy=dp", *words, name="two").curve("running/loss")
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], abs=within)
