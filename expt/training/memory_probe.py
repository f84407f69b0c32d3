"""How large a batch fits, tried after the GPU's memory did not suffice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expt.data.loading import Batch, mapped
from expt.training.learner import Learner


def largest_that_fits(learner: Learner, batch: Batch) -> int | None:
    """How many samples a worker can train on at a time, halved until it does; None where that can't
    be said.

    For a run that has failed: the model has taken some steps more afterwards. No collective.
    """
    if learner.phases or isinstance(
        learner.parallel, nn.DataParallel
    ):  # of dp a GPU has but a part of the batch
        return None
    if learner.shards > 1:  # a step alone would wait for the others
        return None
    if learner.compiled:  # it would compile for each size
        return None
    if any(
        isinstance(layer, nn.SyncBatchNorm) for layer in learner.module.modules()
    ):  # would wait for the others
        return None
    count = batch.size // learner.gradient_accumulation
    while count > 1:
        count //= 2
        learner.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        try:
            _step_alone(learner, _first(batch, count))
        except torch.OutOfMemoryError:
            continue
        except Exception:  # a batch norm of one image, ...
            return None
        return count
    return None


def _first(batch: Batch, count: int) -> Batch:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[:count]

    return Batch(mapped(cut, batch.inputs), mapped(cut, batch.targets), count)


def _step_alone(learner: Learner, batch: Batch) -> None:
    """A step of this worker alone; not through `backward`, which would have DistributedDataParallel
    call the others.
    """
    parameters = [parameter for parameter in learner.module.parameters() if parameter.requires_grad]
    with learner.precision.autocast():
        loss, _ = learner.task.training_loss(learner.task.forward(learner.module, batch), batch)
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
    ):
        parameter.grad = gradient
    learner.optimizer.step()
