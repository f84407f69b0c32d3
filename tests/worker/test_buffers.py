"""Batch norms' statistics on several workers: nobody sends them in a step, and rank 0's are what
counts, as ever."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.models.vision import ConvNet
from expt.tasks.custom import Config as TargetTask
from expt.tasks.sums import Sums
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.loop import evaluate, train_epoch
from expt.worker import build, parallel
from tests.conftest import Configured
from tests.ranks import together

SMALL = ("model=convnet", "model.widths=[4,6]", "model.kernels=[3,3]", "model.strides=[1,2]")
WORDS = (*SMALL, "model.paddings=[same,same]", "batch_size=16", "ema=0.5")


def trained(worker: Worker, *, config: RunConfig, broadcast: bool) -> tuple[Any, Any, int]:
    """The state and the evaluation after three steps, and how often DistributedDataParallel has
    sent buffers in them.

    With `broadcast` it is to do so before each forward pass, or not, whatever the model is."""
    parallel._trains_by_buffers = lambda *_: broadcast  # in this process alone
    sent, send = list[int](), DistributedDataParallel._sync_buffers

    def noted(self: Any) -> None:
        sent.append(1)
        send(self)  # type: ignore[no-untyped-call]

    DistributedDataParallel._sync_buffers = noted  # type: ignore[method-assign]
    torch.manual_seed(0)
    data = build.build_data(config, worker)
    learner = build.build_learner(config, data, worker)
    sums, position, batches = (
        Sums(learner.task, worker.device),
        Position(99, 99),
        data.train.epoch(1),
    )
    train_epoch(learner, itertools.islice(batches, 3), position, sums, log_every=100)
    saved = {name: value.tolist() for name, value in learner.module.state_dict().items()}
    collectives.broadcast_buffers(learner.evaluated)
    assert data.val is not None
    found = evaluate(learner, data.val.evaluation(), worker.device)
    return saved, dict(found.values), len(sent)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_saved_and_evaluated_is_the_same_to_the_bit(
    size: int, configured: Configured, tmp_path: Path
) -> None:
    config = dataclasses.replace(configured(*WORDS), world_size=size)
    found = []
    for number, broadcast in enumerate((True, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(
            together(folder, size, functools.partial(trained, config=config, broadcast=broadcast))
        )
    before, now = found
    assert now[0][0] == before[0][0], "rank 0's, which a checkpoint has"
    assert [rank[1] for rank in now] == [rank[1] for rank in before], "the evaluation"
    assert now[1][0] != now[0][0], "else this tests nothing: the others have seen other images"
    weights = [
        {name: value for name, value in rank[0].items() if "running" not in name} for rank in now
    ]
    assert all(each == weights[0] for each in weights)
    assert ([rank[2] for rank in before], [rank[2] for rank in now]) == ([3] * size, [0] * size)


def test_of_ones_own_code_nobody_knows(configured: Configured) -> None:
    config, module = configured(*WORDS), ConvNet(channels=1, image_size=(8, 8), num_classes=3)
    own_model = dataclasses.replace(config, model=Target(target="mine.Net", kwargs={}))
    own_task = dataclasses.replace(config, task=TargetTask(target="mine.Task", kwargs={}))
    assert not parallel._trains_by_buffers(config, module)
    assert parallel._trains_by_buffers(own_model, module)
    assert parallel._trains_by_buffers(own_task, module)
    module.register_buffer("seen", torch.zeros(1))
    assert parallel._trains_by_buffers(config, module)
