"""A step of a GPU on tensors without numbers: every operator is there for CUDA, and the host looks at no value.

torch's FakeTensorMode raises where one is asked for: what passes here waits for no GPU. No kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from expt.config.parse import parse
from expt.data.augment import Augmentation
from expt.data.loading import Batch, Finish, LoaderOptions
from expt.machine import Machine
from expt.tasks.sums import Sums
from expt.tensorboard.layers import LayerValues
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.loop import train_epoch
from expt.training.patches.fake_tensors import NUMBERS_WANTED, FakeTensorMode
from expt.worker import build, rank_health
from tests.composing import composed

GPU = torch.device("cuda", 0)
WORKER = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=GPU, gpus=(0,))


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Else torch switches autocast and the scaling of gradients off, with a warning.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def learner_of(*words: str) -> tuple[Learner, Batch]:
    config = parse(composed("gpus=1", *words), Machine(gpus=("0",), cpus=2))
    data = build.build_data(config, Worker(**{**vars(WORKER), "device": torch.device("cpu"), "gpus": ()}))
    learner = build.build_learner(config, data, WORKER)
    images, labels = (torch.zeros_like(each, device=GPU) for each in data.blank(8)[:2])
    return learner, Batch(images, labels, 8)


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize(
    "words",
    [("model=mlp",), ("model=convnet", "amp=fp16"), ("model=resnet18", "on_nan=skip"), ("model=mlp", "optimizer=adam", "amp=fp16", "gradient_clip=1.0")],
    ids=" ".join,
)
def test_a_step_looks_at_no_value(words: tuple[str, ...]) -> None:
    learner, batch = learner_of(*words)
    sums, values = Sums(learner.task, GPU), LayerValues(learner, norms=True, histograms=True)
    train_epoch(
        learner, [batch] * 3, Position(9, 9), sums, log_every=10, on_gradients=values.note_gradients
    )
    assert all(parameter.device == GPU for parameter in learner.module.parameters())
    assert values._gradient_norms is not None
    with pytest.raises(NUMBERS_WANTED):  # else this tests nothing
        sums.values[0].item()


@pytest.mark.usefixtures("_fake")
def test_images_are_augmented_on_the_gpu_and_nothing_is_looked_at() -> None:
    options = LoaderOptions(batch_size=4, device=GPU, augment=Augmentation(crop_padding=2, flip=True, cutout=3))
    finish = Finish(options, channels=3)
    drawn = torch.zeros(5, 4, dtype=torch.int16, device=GPU)
    images = finish(torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device=GPU), drawn)
    assert (images.device, images.dtype, images.shape) == (GPU, torch.float32, (4, 3, 8, 8))


@pytest.mark.usefixtures("_fake")
def test_the_checksum_of_weights_is_not_waited_for() -> None:
    module = nn.Linear(3, 4, device=GPU)
    found = rank_health.checksum(module.parameters())
    assert (found.device, found.dtype) == (GPU, torch.float64)
