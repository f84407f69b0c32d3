"""Real runs on a real GPU: `pytest -m gpu`.

Every other test session sees no GPU, and skips these."""

from pathlib import Path

import pytest
import torch

import expt
from expt.config import groups
from expt.machine import visible_gpus
from expt.training.optim import build_optimizer
from expt.training.precision import Precision
from tests.conftest import Trained
from tests.facade import as_typed, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_one_gpu_in_mixed_precision(trained: Trained) -> None:
    result = trained("gpus=1", "amp=true", "epochs=1").result
    expected = ("completed", [visible_gpus()[0]], 1)
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
    def curve(workers: int) -> list[tuple[int, float]]:
        options = ("gpus=1", "backend=gloo", f"world_size={workers}", "log_every=1", "max_steps=20")
        return trained(*options, name=f"workers_{workers}").curve("running/loss")

    one, two = curve(1), curve(2)
    assert [step for step, _ in one] == [step for step, _ in two]
    assert one[-1][0] == 20
    assert one[-1][1] < one[0][1]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], abs=1e-3)


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
        torch.cuda.set_sync_debug_mode("error")
        try:
            for extra in losses:
                precision.backward(weight.square().sum() + extra)
                precision.update(update, [weight])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [weight.detach(), *update.state[weight].values()]

    losses = [0.0, 0.0, 0.0]
    losses.insert(first - 1, float("nan"))
    skipped, never_there = train(losses), train([0.0, 0.0, 0.0])
    assert all(torch.equal(mine, other) for mine, other in zip(skipped, never_there, strict=True))
