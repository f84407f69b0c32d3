"""Statistics of batch norms on several workers: not sent in a step, rank 0's count."""

import contextlib
import dataclasses
import functools
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from expt.config.schema import RunConfig
from expt.data.loading import Batch
from expt.errors import ConfigError
from expt.tasks.sums import Sums
from expt.tasks.task import Task
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.loop import evaluate, train_epoch
from expt.worker import build, parallel
from tests import on_cards
from tests.conftest import Configured
from tests.ranks import together

SMALL = ("model=convnet", "model.widths=[4,6]", "model.kernels=[3,3]", "model.strides=[1,2]")
WORDS = (*SMALL, "model.paddings=[same,same]", "batch_size=16", "ema=0.5")


def trained(worker: Worker, *, config: RunConfig, broadcast: bool) -> tuple[Any, Any, int]:
    """The state and the evaluation after three steps, and how often buffers were sent in them.

    With `broadcast` they are to be after each step, whatever the model is."""
    if broadcast:
        parallel._trains_by_buffers = lambda *_: True  # in this process alone
    sent, send = list[int](), collectives.broadcast

    def noted(tensors: Any) -> None:
        sent.append(1)
        send(tensors)

    torch.manual_seed(0)
    data = build.build_data(config, worker)
    learner = build.build_learner(config, data, worker)
    sums, position, batches = (
        Sums(learner.task, worker.device),
        Position(99, 99),
        data.train.epoch(1),
    )
    collectives.broadcast = noted
    train_epoch(learner, itertools.islice(batches, 3), position, sums, log_every=100)
    collectives.broadcast = send
    saved = {name: value.tolist() for name, value in learner.module.state_dict().items()}
    collectives.broadcast(learner.evaluated.buffers())
    assert data.val is not None
    found = evaluate(learner, data.val.evaluation(), worker.device)
    return saved, dict(found.values), len(sent)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_saved_statistics_are_rank_0s(size: int, configured: Configured, tmp_path: Path) -> None:
    config = dataclasses.replace(configured(*WORDS), world_size=size)
    before, now = (
        together(tmp_path, size, functools.partial(trained, config=config, broadcast=broadcast))
        for broadcast in (True, False)
    )
    assert now[0][0] == before[0][0], "rank 0's, which a checkpoint has"
    assert [rank[1] for rank in now] == [rank[1] for rank in before], "the evaluation"
    assert now[1][0] != now[0][0], "else this tests nothing: the others have seen other images"
    weights = [
        {name: value for name, value in rank[0].items() if "running" not in name} for rank in now
    ]
    assert all(each == weights[0] for each in weights)
    assert ([rank[2] for rank in before], [rank[2] for rank in now]) == ([3] * size, [0] * size)


class Odd(nn.Module):
    """Has buffers that differ by worker, or lie in memory as torch can't send them."""

    hidden: Tensor

    def __init__(self, num_classes: int, kind: str) -> None:
        super().__init__()
        self.layer, self.norm, self.kind = nn.Linear(64, num_classes), nn.BatchNorm1d(64), kind
        odd = {
            "transposed": torch.zeros(5, 64).unsqueeze(0).transpose(0, 1),
            "expanded": torch.zeros(1, 64).expand(5, 64),
            "sparse": torch.eye(3).to_sparse(),
        }
        self.register_buffer("hidden", odd.get(kind, torch.zeros(64)))
        self.calls = 0
        if kind == "aliased":
            self.register_buffer("turned", torch.zeros(4, 16))
            self.hidden = self.get_buffer("turned").t()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        self.calls += 1
        if self.kind == "carried" or (self.kind == "late" and self.calls > 2):  # twice in a step
            self.hidden.add_(x.mean(0))
        elif self.kind == "alike":
            self.hidden.add_(1)
        elif self.kind == "aliased":
            self.get_buffer("turned").add_(1)
        elif self.kind == "made":  # which FirstSteps refuses, in words of its own
            self.more = nn.Parameter(x.new_full((1,), dist.get_rank()))
        twice: Tensor = self.norm(x) + self.norm(2 * x) * (1 + self.hidden.sum())
        outputs: Tensor = self.layer(twice)
        return outputs


class Twice(Task):
    """Calls the model twice in a step."""

    def loss(self, outputs: Tensor, batch: Batch) -> Any:
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def forward(self, model: Any, batch: Batch) -> Any:
        whole = getattr(model, "module", model)
        called = whole if whole.kind in ("bypassed", "unlike") else model
        return called(batch.inputs) + called(batch.inputs)


def stepped(worker: Worker, *, config: RunConfig) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    if config.model.kwargs["kind"] == "unlike":
        torch.backends.cpu.get_cpu_capability = lambda: f"of rank {worker.rank}"
    data = build.build_data(config, worker)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            learner = build.build_learner(config, data, worker)
            sums, batches = Sums(learner.task, worker.device), data.train.epoch(1)
            two, position = itertools.islice(batches, 2), Position(99, 99)
            train_epoch(learner, two, position, sums, log_every=100)
        except ConfigError as error:
            return str(error), []
    return said.getvalue(), learner.module.get_buffer("hidden").flatten().tolist()


KINDS = {"carried": "hidden", "alike": "", "late": "hidden", "made": "", "bypassed": "layer.weight"}
KINDS |= {"transposed": "", "expanded": "", "sparse": "hidden"}
"""Each kind of model, and what is said of it."""
ON_CPUS = {"aliased": "", "unlike": ""}
"""Those of memory that cards do not share, and of processors."""


@pytest.mark.slow
def test_custom_buffers_sent(configured: Configured, tmp_path: Path) -> None:
    words = ("~task", f"+task._target_={__name__}.Twice", "objective=loss/val", "batch_size=16")
    kinds = KINDS if on_cards.ON else KINDS | ON_CPUS
    configs = {}
    for kind in kinds:
        config = configured("~model", f"+model={{_target_: {__name__}.Odd, kind: {kind}}}", *words)
        configs[kind] = dataclasses.replace(config, world_size=2)

    def each(worker: Worker) -> dict[str, tuple[str, list[float]]]:
        return {kind: stepped(worker, config=config) for kind, config in configs.items()}

    first, second = together(tmp_path, 2, each)
    for kind, said in kinds.items():
        (told, hidden), (told_too, others) = first[kind], second[kind]
        assert (said in told) if said else not told, kind
        assert not told_too or kind in ("sparse", "bypassed")
        assert hidden == others, kind
        assert kind != "aliased" or {*hidden} == {4.0}
