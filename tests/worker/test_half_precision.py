"""Weights in bfloat16 and images that are prepared once, in whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import expt
from expt.errors import ConfigError
from expt.runs import checkpoint
from expt.runs.result import update_result
from expt.tasks.sums import Sums
from expt.training.ema import ema_of
from expt.training.half_weights import halve
from expt.training.learner import Position
from expt.training.loop import train_epoch
from expt.worker import build
from expt.worker.run import Run
from tests.conftest import Configured
from tests.integration.test_resume import _same
from tests.training.plain import descend, trained_on
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether

FEW = (
    "dataset.train_limit=320",
    "batch_size=32",
    "epochs=2",
    "log_every=1",
    "tensorboard.images=false",
    "onednn=false",
)
SMALL = ("model=convnet", "model.widths=[12,16]", "model.kernels=[3,3]", "model.strides=[1,2]")
CONVNET = (*SMALL, "model.paddings=[same,same]", "model.hidden=32", "model.dropout=0.1")
AUGMENTED = (
    "dataset.augment.crop_padding=1",
    "dataset.augment.flip=true",
    "dataset.augment.cutout=2",
)
OPTIMIZERS = {
    "sgd": ("optimizer.lr=0.2",),
    "adamw": ("optimizer=adamw", "optimizer.lr=0.02"),
    "muon": ("optimizer=muon", "optimizer.lr=0.02"),
}


def begin(run: Run) -> None:
    update_result(run.paths, status="running")


@pytest.mark.parametrize(
    "words", [(), ("amp=bf16", "channels_last=true"), ("amp=bf16", "mixup=0.2")], ids=str
)
def test_images_prepared_once_train_to_the_same_bits(
    words: tuple[str, ...], train_alone: TrainAlone
) -> None:
    plain, prepared = (
        train_alone(*FEW, *CONVNET, *AUGMENTED, *words, f"prepare_once={on}", name=on)
        for on in ("false", "true")
    )
    assert plain.points == prepared.points
    assert _same(plain.run.learner.module.state_dict(), prepared.run.learner.module.state_dict())


@pytest.mark.parametrize(("amp", "apart"), [("false", 1e-6), ("bf16", 0.02)])
def test_mixed_precision_stays_near_a_float32_loop_by_hand(
    amp: str, apart: float, configured: Configured
) -> None:
    words = (
        "model.hidden=[32]",
        "optimizer=plain_sgd",
        "optimizer.lr=0.3",
        "onednn=false",
        "dataset.train_limit=640",
    )
    config = configured(*words, "epochs=2", f"amp={amp}")
    found = trained_on(ALONE, config)
    torch.manual_seed(config.seed)
    data, losses = build.build_data(config, ALONE), list[float]()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for epoch in (1, 2):
        for batch in data.train.epoch(epoch):
            loss = functional.cross_entropy(model(batch.inputs), batch.targets)
            descend(model, loss, 0.3)
            losses.append(loss.item())
    steps = [step["loss"] for step in found["steps"]]
    assert steps == pytest.approx(losses, abs=apart)
    assert (steps == pytest.approx(losses, abs=1e-5)) is (amp == "false"), (
        "what is rounded is another number"
    )
    assert losses[-1] < 0.5 * losses[0]


def test_samples_that_are_not_held_as_images_are_refused(train_alone: TrainAlone) -> None:
    with pytest.raises(
        ConfigError,
        match=r"prepare_once=true: .* of dataset=diabetes are read in each epoch, or are",
    ):
        train_alone("experiment=diabetes", "prepare_once=true")
    blur = "dataset.transforms=[{_target_: torchvision.transforms.v2.GaussianBlur, kernel_size: 3}]"
    with pytest.raises(ConfigError, match=r"not changed by dataset\.transforms"):
        train_alone(blur, "prepare_once=true")


def test_weights_are_halved_but_for_those_of_norms() -> None:
    tied = nn.Linear(4, 4)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), tied, tied)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    halve(module)
    for name, value in module.state_dict().items():
        wide = name.startswith(("1.", "2."))
        assert value.dtype == (expected[name].dtype if wide else torch.bfloat16), name
        assert torch.equal(value, expected[name] if wide else expected[name].bfloat16())
    assert len([*module.parameters()]) == 8, "one that is used twice is still one"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_halved_weights_learns_goes_on_to_the_same_bits_and_is_loaded(
    name: str, train_alone: TrainAlone
) -> None:
    words = (
        *FEW,
        *CONVNET,
        *OPTIMIZERS[name],
        "amp=bf16_params",
        "epochs=3",
        "lookahead={every_steps: 3, keep: 0.2}",
    )
    whole = train_alone(*words, name="whole", before=begin)
    curve = [loss for _, loss in whole.curve("loss/train")]
    assert curve[-1] < 0.9 * curve[0]
    state = checkpoint.load(whole.folder / "checkpoints" / "last.pt")
    kinds = {name: value.dtype for name, value in state["model"].items()}
    assert {kinds["0.weight"], kinds["8.weight"]} == {torch.bfloat16}
    assert kinds["1.weight"] == kinds["1.running_mean"] == torch.float32
    assert {value.dtype for value in state["lookahead"].values()} == {torch.float32}

    def stop(run: Run) -> None:
        run.agreement._asked_to_stop = lambda: run.position.step == 14

    stopped = train_alone(*words, name="stopped", before=stop)
    resumed = train_alone(*words, name="stopped", source=stopped.folder / "checkpoints" / "last.pt")
    assert resumed.points == whole.points
    assert _same(
        resumed.run.snapshot.state_dict()["optimizer"], whole.run.snapshot.state_dict()["optimizer"]
    )
    _assert_loads(whole)


def _assert_loads(done: Any) -> None:
    images, module = torch.rand(9, 1, 8, 8), done.run.learner.module.eval()
    done.run.snapshot.load_weights(checkpoint.load(done.folder / "checkpoints" / "last.pt"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(images)
    recorded, plain = expt.load(done.folder, "last", amp="recorded"), expt.load(done.folder, "last")
    with torch.no_grad():
        assert torch.equal(recorded(images), expected)
        assert plain(images).dtype == torch.float32
        torch.testing.assert_close(plain(images), expected.float(), rtol=0.1, atol=0.1)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, module.state_dict()[name].to(value.dtype)), name


def test_an_average_of_halved_weights_is_float32_and_moves(
    train_alone: TrainAlone, capfd: pytest.CaptureFixture[str]
) -> None:
    halved = ("amp=bf16_params", "tensorboard.graph=true")
    done = train_alone(*FEW, *CONVNET, *halved, "ema=0.999", "optimizer.lr=0.1", before=begin)
    assert "No graph saved" not in "".join(capfd.readouterr())
    average = checkpoint.load(done.folder / "checkpoints" / "last.pt")["ema"]
    assert {value.dtype for name, value in average.items() if "num_batches" not in name} >= {
        torch.float32
    }
    assert not any(value.dtype == torch.bfloat16 for value in average.values())
    module = nn.Linear(2, 2).bfloat16()
    ours, weight = ema_of(module, 0.999, in_float32=True), module.weight.detach().float()
    for _ in range(50):
        with torch.no_grad():
            module.weight.add_(0.25)
        ours.update_parameters(module)
        now = module.weight.detach().float()
        weight = now if int(ours.n_averaged) == 1 else 0.999 * weight + 0.001 * now
    torch.testing.assert_close(ours.module.weight, weight, rtol=1e-5, atol=1e-6)
    loaded = expt.load(done.folder, "last", amp="recorded")
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, average[f"module.{name}"])


def test_two_workers_with_halved_weights_have_the_curve_of_one_to_their_rounding(
    train_alone: TrainAlone, train_together: TrainTogether
) -> None:
    words = (*FEW, "model.hidden=[32]", "amp=bf16_params", "optimizer.lr=0.05")
    curves = [
        dict(done.curve("running/loss"))
        for done in (train_alone(*words, "world_size=1"), train_together(2, *words, name="two"))
    ]
    assert curves[0] == pytest.approx(curves[1], rel=0.02, abs=0.01)


def test_a_step_is_that_of_plain_torch(configured: Configured) -> None:
    """Weights, gradients and momentum in bfloat16, computed under autocast."""
    config = configured(
        *FEW, "model.hidden=[16]", "amp=bf16_params", "optimizer.lr=0.1", "world_size=1"
    )
    data = build.build_data(config, ALONE)
    torch.manual_seed(0)
    learner = build.build_learner(config, data, ALONE)
    batches = [next(data.train.epoch(1))] * 3
    layers = [
        [p.detach().clone().requires_grad_() for p in layer.parameters()]
        for layer in learner.module.modules()
        if isinstance(layer, nn.Linear)
    ]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer], lr=0.1, momentum=0.9)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = functional.linear(batch.inputs.flatten(1), *layers[0]).relu()
            loss = functional.cross_entropy(functional.linear(hidden, *layers[1]), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    train_epoch(learner, batches, Position(9, 9), Sums(learner.task, ALONE.device), log_every=99)
    for one, other in zip(
        learner.module.parameters(), (p for layer in layers for p in layer), strict=True
    ):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
