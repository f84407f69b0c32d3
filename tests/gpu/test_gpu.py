"""Real runs on a real GPU: `pytest -m gpu`.

Every other test session sees no GPU, and skips these."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import expt
from expt.config import groups
from expt.config.parse import parse
from expt.dashboards.pictures import Review
from expt.dashboards.tensorboard import LayerValues
from expt.data.loading import Batch
from expt.errors import ExptError
from expt.gpus import gpu_uuid, visible
from expt.machine import detect
from expt.runs.paths import RunPaths
from expt.tasks.sums import Sums
from expt.training.collectives import Worker
from expt.training.loop import train_epoch
from expt.training.optim import build_optimizer
from expt.training.precision import Precision, set_precision
from expt.worker import build, fault
from tests.composing import composed
from tests.conftest import Trained
from tests.facade import RunFolder, as_typed, run
from tests.ranks import worker_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Refuse whatever makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_losses_agree(one: RunFolder, other: RunFolder, within: float) -> None:
    curves = [[loss for _, loss in run.curve("running/loss")] for run in (one, other)]
    assert curves[1] == pytest.approx(curves[0], abs=within)


def test_one_gpu_in_mixed_precision(trained: Trained) -> None:
    result = trained("gpus=1", "amp=true", "epochs=1").result
    expected = ("completed", [visible().gpus[0]], 1)
    assert (result["status"], result["devices"], result["world_size"]) == expected
    assert result["metrics"]["accuracy/val"] > 0.3
    assert result["metrics"]["memory/gpu_mib"] > 0
    assert 0 <= result["metrics"].get("ranks/gpu_utilisation", 0) <= 100


def test_the_doctor_finds_it(tmp_path: Path) -> None:
    done = run("doctor", cwd=tmp_path, COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name() in done.stdout
    assert "nccl" in done.stdout


def test_two_workers_on_one_gpu_have_the_loss_curve_of_one(trained: Trained) -> None:
    words = as_typed("gpus=1 backend=gloo log_every=1 max_steps=20")
    one, two = (trained(*words, f"world_size={size}", name=f"{size}") for size in (1, 2))
    curve = one.curve("running/loss")
    assert curve[-1][0] == 20
    assert curve[-1][1] < curve[0][1]
    assert_losses_agree(one, two, 1e-3)


@pytest.mark.parametrize("amp", ["fp16", "bf16"])
def test_each_half_precision(trained: Trained, amp: str) -> None:
    if amp == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU computes no bfloat16")
    options = ("gpus=1", f"amp={amp}", "gradient_clip=1.0", "epochs=3")
    done = trained(*options)
    assert done.result["status"] == "completed"
    losses = [loss for _, loss in done.curve("loss/val")]
    assert losses[-1] < losses[0]


def test_predictions_are_those_of_the_runs_evaluation(trained: Trained) -> None:
    run = trained("gpus=1", "amp=true", "epochs=1")
    found = expt.predict(run.folder, split="test")
    right = sum(record["class"] == record["target"] for record in found) / len(found)
    assert right == pytest.approx(run.result["metrics"]["accuracy/test"], abs=1e-9)
    on_the_cpu = expt.predict(run.folder, split="test", device="cpu", amp=False)
    chances = [[record["probability"] for record in each] for each in (found, on_the_cpu)]
    assert chances[0] == pytest.approx(chances[1], abs=0.05)


def test_a_gpu_without_room_names_a_smaller_batch_size(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(
        "import torch\nclass Net(torch.nn.Sequential):\n    def __init__(self, *, channels,"
        " image_size, num_classes):\n        super().__init__(torch.nn.Flatten(),"
        " torch.nn.Linear(64, num_classes))\n    def forward(self, images):\n        total ="
        " torch.cuda.get_device_properties(images.device).total_memory\n        logits ="
        " super().forward(images)\n        if self.training:  # a 20th of the memory for each"
        " image\n            self.kept = torch.empty(len(images), total // 20, dtype=torch.uint8,"
        " device=images.device)\n        return logits\n"
    )
    own = as_typed("+model._target_=large.Net ~model.hidden ~model.dropout gpus=1 batch_size=64")
    done = run(*own, cwd=tmp_path)
    assert done.returncode == 1
    assert "try gradient_accumulation=2 (or auto), or batch_size=32" in done.stderr


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("first", [1, 2], ids=["the first step", "a later one"])
def test_a_step_is_skipped_without_a_word_of_the_host(optimizer: str, first: int) -> None:
    def train(losses: list[float]) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
        configs: dict[str, groups.SGD | groups.Adam] = {
            "sgd": groups.SGD(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False),
            "adam": groups.Adam(
                name="adam", lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
            ),
        }
        device = torch.device("cuda")
        precision = Precision(False, device, skip_non_finite=True, skips_on_device=True)
        update = build_optimizer(configs[optimizer], torch.nn.ParameterList([weight]))
        with nothing_waits():
            for extra in losses:
                precision.backward(weight.square().sum() + extra)
                precision.update(update, [weight])
        return [weight.detach(), *update.state[weight].values()]

    losses = [0.0, 0.0, 0.0]
    losses.insert(first - 1, float("nan"))
    skipped, never_there = train(losses), train([0.0, 0.0, 0.0])
    assert all(torch.equal(mine, other) for mine, other in zip(skipped, never_there, strict=True))


def first_gpu() -> Worker:
    return worker_of(device=torch.device("cuda", 0), gpus=(0,))


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
    with nothing_waits():
        epoch(2)
    assert not logs


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_review_waits_for_nothing_and_counts_as_on_a_cpu() -> None:
    torch.manual_seed(0)
    logits, labels, images = torch.randn(40, 5), torch.randint(5, (40,)), torch.randn(40, 1, 4, 4)
    here, there = Review(5, keep=4), Review(5, keep=4)
    here(Batch(images, labels, 40), logits)
    moved = Batch(images.cuda(), labels.cuda(), 40), logits.cuda()
    with nothing_waits():
        there(*moved)
        there(*moved)
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
    eager = trained(*words, shape, name="eager")
    other = trained(*words, shape, f"compile={compiled}", name="compiled")
    assert_losses_agree(eager, other, 1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(("amp", "within"), [("false", 1e-3), ("bf16", 2e-2)])
def test_data_parallel_has_the_loss_curve_of_one_gpu(
    amp: str, within: float, trained: Trained
) -> None:
    words = ("log_every=1", "max_steps=20", f"amp={amp}")
    one = trained("gpus=1", *words, name="one")
    assert_losses_agree(one, trained("gpus=2", "strategy=dp", *words, name="two"), within)


# NCCL takes a GPU for each worker; gloo has two on one.
BACKENDS = [
    pytest.param(("gpus=1", "backend=gloo", "world_size=2"), id="gloo"),
    pytest.param(
        ("gpus=2",),
        id="nccl",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    ),
]


def failed(tmp_path: Path, what: str, *words: str) -> tuple[str, float]:
    """What a person would see of a run with that fault, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(ExptError) as raised:
        expt.run(
            *words,
            f"+hydra.job.env_set.{fault.VARIABLE}='{what}'",
            f"hydra.run.dir='{tmp_path / 'here'}'",
        )
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("words", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "text", "within_s"),
    [("raise", "a fault on purpose", 40), ("oom", "on purpose", 40), ("hang", "in strike", 60)],
)
def test_the_rank_at_fault_is_named_at_once(
    kind: str, text: str, within_s: float, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Long before NCCL's own end, after timeout_s=600; a start of two workers is included."""
    more = ("timeout_s=10",) if kind == "hang" else ()
    error, seconds = failed(tmp_path, f"1:5:{kind}", *more, *words)
    assert error.startswith("rank 1 of 2")
    assert text in error
    assert seconds < within_s


def test_each_gpu_has_a_uuid() -> None:
    uuids = [gpu_uuid(name) for name in visible().gpus]
    assert len(set(uuids)) == len(uuids) == torch.cuda.device_count()
    assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in uuids)
    found = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert uuids[0] == found or uuids[0].startswith("MIG-")
