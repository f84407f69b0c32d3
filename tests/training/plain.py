"""The numbers of a run without its folder, a plain step of gradient descent, equal weights."""

from typing import Any

import torch
from torch import Tensor, nn

from expt.config.schema import RunConfig
from expt.tasks.sums import Averages, Sums
from expt.training.collectives import Worker
from expt.training.loop import evaluate, train_epoch
from expt.worker.build import build_data, build_learner, build_position


def trained_on(worker: Worker, config: RunConfig) -> dict[str, Any]:
    """Return the averages of each step, of both evaluations, and the weights, as plain values."""
    torch.manual_seed(config.seed)
    data = build_data(config, worker)
    learner, position, seen = (
        build_learner(config, data, worker),
        build_position(config, data),
        list[Averages](),
    )
    sums = Sums(learner.task, worker.device)
    for epoch in range(1, config.epochs + 1):
        position.begin_epoch()
        batches = data.train.epoch(epoch)
        train_epoch(
            learner,
            batches,
            position,
            sums,
            log_every=1,
            on_log=lambda values, _: seen.append(values),
        )
    splits = {"val": data.val, "test": data.test}
    evaluated = {
        name: dict(evaluate(learner, each.evaluation(), worker.device).values)
        for name, each in splits.items()
        if each
    }
    weights = {name: values.tolist() for name, values in learner.module.state_dict().items()}
    return {"steps": [dict(values.values) for values in seen], "weights": weights, **evaluated}


def descend(model: nn.Module, loss: Tensor, lr: float) -> None:
    """A step of plain gradient descent."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(lr * parameter.grad)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters are equal to the bit."""
    return all(map(torch.equal, one.parameters(), other.parameters()))
