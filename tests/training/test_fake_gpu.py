"""A step of a GPU on tensors without numbers: every operator is there for CUDA, and the host looks
at no value.

torch's FakeTensorMode raises where one is asked for: what passes here waits for no GPU. No kernel
runs, and no backward pass, which is counted on a CPU: see test_operator_budget."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from expt.config.parse import parse
from expt.config.schema import TensorBoard
from expt.dashboards.tensorboard import LayerValues
from expt.data.augment import Augmentation
from expt.data.loading import Batch, Finish, LoaderOptions
from expt.machine import Machine
from expt.tasks.sums import Sums
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.loop import train_epoch
from expt.worker import build, rank_health
from tests.composing import composed

GPU = torch.device("cuda", 0)
WORKER = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=GPU, gpus=(0,))


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else torch switches autocast and the scaling of gradients off, with a warning: it finds no
    # GPU.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(
        nn.Module, "to", lambda module, *_, **__: module
    )  # they are made there; torch moves no such


@contextlib.contextmanager
def learner_of(*words: str) -> Iterator[tuple[Learner, Batch]]:
    """What trains on a GPU, and a batch for it, while tensors have no numbers."""
    config = parse(composed("gpus=1", *words), Machine(gpus=("0",), cpus=2))
    data = build.build_data(
        config, dataclasses.replace(WORKER, device=torch.device("cpu"), gpus=())
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        with GPU:
            learner = build.build_learner(config, data, WORKER)
        vars(learner.optimizer)["step"] = lambda: None  # torch has no fused update without numbers
        vars(learner.precision)["backward"] = functools.partial(_without_autograd, learner)
        images, labels = (
            torch.zeros(8, *each.shape, dtype=each.dtype, device=GPU) for each in data.example
        )
        yield learner, Batch(images, labels, 8)


def _without_autograd(learner: Learner, loss: Tensor, weight: float, _: object) -> None:
    """Gradients from nowhere: autograd asks the driver for a GPU's context, fake or not."""
    assert loss.device == GPU
    learner.precision.scaler.scale(loss * weight)
    for parameter in learner.module.parameters():
        parameter.grad = torch.empty_like(parameter)


DRAWN = TensorBoard(images=False, norms=True, histograms=True, health=False)
STEPS = [
    ("model=mlp",),
    ("model=convnet", "amp=fp16"),
    ("model=mlp", "optimizer=adam", "amp=fp16", "gradient_clip=1.0"),
]


@pytest.mark.parametrize("words", STEPS, ids=" ".join)
def test_a_step_looks_at_no_value(words: tuple[str, ...]) -> None:
    with learner_of(*words) as (learner, batch):
        sums, values = Sums(learner.task, GPU), LayerValues(learner, DRAWN)
        note = values.note_gradients
        train_epoch(learner, [batch] * 3, Position(9, 9), sums, log_every=10, on_gradients=note)
        assert all(parameter.device == GPU for parameter in learner.module.parameters())
        assert values._gradient_norms is not None
        assert values._gradient_norms.device == GPU
        with pytest.raises(DataDependentOutputException):  # else this tests nothing
            sums.values[0].item()


def test_images_are_augmented_on_the_gpu_and_nothing_is_looked_at() -> None:
    options = LoaderOptions(
        batch_size=4, device=GPU, augment=Augmentation(crop_padding=2, flip=True, cutout=3)
    )
    with FakeTensorMode():
        finish = Finish(options, channels=3)
        drawn = torch.zeros(5, 4, dtype=torch.int16, device=GPU)
        images = finish(torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device=GPU), drawn)
    assert (images.device, images.dtype, images.shape) == (GPU, torch.float32, (4, 3, 8, 8))


def test_the_checksum_of_weights_is_not_waited_for() -> None:
    with FakeTensorMode():
        found = rank_health.checksum(nn.Linear(3, 4, device=GPU).parameters())
    assert (found.device, found.dtype) == (GPU, torch.float64)
