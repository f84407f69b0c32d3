"""How many kernels a step asks for, and that it waits for none of them: counted on a CPU, which no GPU has confirmed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from expt.data.loading import Batch
from expt.tasks.sums import MAX_KEPT, Sums
from expt.tensorboard.layers import LayerValues
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.loop import train_epoch
from expt.worker import build
from tests.conftest import Configured
from tests.operators import Operators
from tests.ranks import together

ALONE = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))


def a_step(configured: Configured, worker: Worker, *words: str) -> tuple[Learner, Operators]:
    """The operators of a run's third step: forward, backward, update and schedule."""
    config = dataclasses.replace(configured("batch_size=8", *words), world_size=worker.world_size)
    data = build.build_data(config, worker)
    learner = build.build_learner(config, data, worker)
    batches, sums = data.train.epoch(1), Sums(learner.task, worker.device)
    position = Position(1 << 60, 1 << 60)

    def steps(number: int) -> None:
        ready = [next(batches) for _ in range(number)]
        train_epoch(learner, ready, position, sums, log_every=1 << 60)

    steps(2)
    ready = next(batches)
    with Operators() as found:
        train_epoch(learner, [ready], position, sums, log_every=1 << 60)
    return learner, found


# Today's; a change that takes more is to say why, one that takes fewer lowers it.
BUDGET = {"mlp": 14, "convnet": 42, "resnet18": 161}


@pytest.mark.parametrize("model", BUDGET)
def test_a_step_asks_for_no_more_kernels_than_it_did(model: str, configured: Configured) -> None:
    _, found = a_step(configured, ALONE, f"model={model}", "onednn=false")
    assert not found.waits
    assert found.launched.total() <= BUDGET[model], found.launched
