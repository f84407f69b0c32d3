"""The loops: a training step, an epoch, an evaluation. No I/O, no rank, no configuration."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from expt.data.loading import Batch, to_device
from expt.errors import is_out_of_memory, sized_by
from expt.tasks.sums import Averages, Sums, check_loss
from expt.tasks.task import PhasedTask, Sum, Task
from expt.training import sharding
from expt.training.collectives import broadcast, gather_across_workers, sum_across_workers
from expt.training.learner import Add, Evaluator, Learner, Position
from expt.training.optimizer_state import switch
from expt.training.parameter_groups import members
from expt.training.strategy import copied, in_parts


def train_epoch(
    learner: Learner,
    batches: Iterable[Batch],
    position: Position,
    sums: Sums,
    *,
    log_every: int,
    on_gradients: Callable[[], None] = lambda: None,
    on_step: Callable[[], None] = lambda: None,
    on_log: Callable[[Averages, float], None] = lambda averages, samples_per_s: None,
    between_steps: Callable[[], bool] = lambda: False,
) -> None:
    """Train on `batches`, adding to the epoch's `sums`, until they end or the run does.

    An optimizer that has `train` and `eval` is left in training.

    In each step `on_gradients` is called before the update, and `on_step` before the learning rate
    changes. Every `log_every` steps `on_log` gets the averages over all workers since the last
    time, and the images trained on per second, if any step since then was not left out.
    `between_steps` comes last, and ends the loop by returning True.
    """
    learner.strategy.model.train()
    switch(learner.optimizer, "train")
    since, trained = time.perf_counter(), 0  # here, not before a checkpoint: `sums` may be older
    for batch in batches:
        if learner.phases:
            _through_phases(learner, batch, sums, on_gradients)
        elif learner.has_closure:
            _by_closure(learner, batch, sums, on_gradients)
        else:
            accumulate_gradients(learner, batch, sums.add)
            on_gradients()
            learner.precision.update(learner.optimizer, learner.module.parameters())
        left_out = learner.precision.left_out
        sums.end_step(left_out)
        learner.strategy.finish_step()
        if learner.ema is not None and (left_out is None or not left_out):
            learner.ema.update_parameters(learner.module)
        position.advance()
        trained += batch.global_size
        on_step()
        if learner.scheduler_interval == "step":
            learner.scheduler.step()
        if position.step % log_every == 0:
            values, now = averages_since_logged(learner, sums), time.perf_counter()
            if values is not None:  # else every step was left out
                on_log(values, trained / (now - since))
            since, trained = now, 0
            sums.mark_logged()
        if between_steps() or position.is_run_done:
            break


def averages_since_logged(learner: Learner, sums: Sums) -> Averages | None:
    """Return those of all workers since the last log point; None if every step was left out."""
    total = sum_across_workers(sums.since_logged, len(learner.task.reductions))
    return sums.averages_if_any(total)


def _by_closure(
    learner: Learner, batch: Batch, sums: Sums, on_gradients: Callable[[], None]
) -> None:
    """Have the optimizer compute loss and gradients as often as it needs; count the first."""
    evaluations = itertools.count()

    def closure() -> Tensor:
        """Return the loss of the global batch; it and its gradients are equal on all workers."""
        learner.optimizer.zero_grad(set_to_none=True)
        is_first, sum_and_weight = not next(evaluations), list[Tensor]()

        def add(loss: Sum, outputs: Any, part: Batch, begins_step: bool) -> None:
            if is_first:
                sums.add(loss, outputs, part, begins_step)
            if begins_step:
                sum_and_weight.clear()
            if not part.weightless:
                weight = to_device(torch.as_tensor(loss[1]), loss[0].device)
                sum_and_weight.append(torch.stack([loss[0].detach().double(), weight.double()]))

        accumulate_gradients(learner, batch, add)
        if is_first:
            on_gradients()
        learner.precision.clip(learner.optimizer, learner.module.parameters())
        device = next(learner.module.parameters()).device
        none = torch.zeros(2, dtype=torch.float64, device=device)
        total, weight = sum_across_workers(sum(sum_and_weight, none))
        return torch.where(weight > 0, total / weight, 0.0)

    learner.optimizer.step(closure)  # type: ignore[arg-type]
    learner.optimizer.zero_grad(set_to_none=True)


class _Phase(NamedTuple):
    """An update of a step that has several."""

    name: str
    trained: Sequence[nn.Parameter]
    parts: Sequence[Batch]
    outputs: Sequence[dict[str, Any]]
    """Values that this and earlier phases hand on, for each micro-batch."""


def _through_phases(
    learner: Learner, batch: Batch, sums: Sums, on_gradients: Callable[[], None]
) -> None:
    """Update for each phase in order."""
    parts = learner.strategy.cut(batch, learner.strategy.micro_batches)
    outputs: list[dict[str, Any]] = [{} for _ in parts]
    for name, parameters in learner.phases.items():
        trained = [each for each in parameters if each.requires_grad]

        def note(loss: Sum, found: Any, *_: object, name: str = name) -> None:
            found[name] = loss[0].detach(), loss[1]

        accumulate_gradients(learner, batch, note, _Phase(name, trained, parts, outputs))
        on_gradients()
        learner.precision.update(learner.optimizer, learner.module.parameters())
    for index, (part, found) in enumerate(zip(parts, outputs, strict=True)):
        sums.add(learner.task.loss(found, part), found, part, index == 0)


def accumulate_gradients(
    learner: Learner, batch: Batch, add: Add, phase: _Phase | None = None
) -> None:
    """Run forward and backward on this worker's share of a global batch.

    `add` gets the loss and the outputs of each micro-batch, and whether it is the first, which may
    come again. Waits for nothing else.
    """
    task, strategy, trained = learner.task, learner.strategy, phase.trained if phase else ()
    # Gradients are averaged over workers, whose parts may differ in size: weighted so, the mean is
    # the global batch's.
    whole_weight = strategy.world_size / batch.global_size

    def passes(count: int) -> list[Tensor | float]:
        """Run them on each of `count` micro-batches; return the weights of the losses."""
        weights = list[Tensor | float]()
        parts = phase.parts if phase else strategy.cut(batch, count)
        for index, part in enumerate(parts):
            with strategy.accumulate(index, len(parts)):
                with learner.precision.autocast():
                    if phase is None:
                        outputs = task.forward(strategy.model, part)
                        loss = task.training_loss(outputs, part)
                    else:
                        outputs, phased = phase.outputs[index], cast(PhasedTask, task)
                        loss = phased.phase(phase.name, strategy.model, part, outputs)
                check_loss(loss, task)
                weight = 0.0 if part.weightless else whole_weight
                learner.precision.backward(loss[0], weight, trained)
            add(loss, outputs, part, index == 0)
            weights.append(0.0 if part.weightless else loss[1])
        return weights

    weights = strategy.gradients(passes, batch, trained)
    if not task.weight_is_samples:
        _divide_by_weight(learner, batch.global_size, weights)


@torch.no_grad()
def _divide_by_weight(learner: Learner, samples: int, weights: list[Tensor | float]) -> None:
    """Divide gradients by the loss's weight over all workers; without a weight they are 0."""
    device = next(learner.module.parameters()).device
    rows = [to_device(torch.as_tensor(one, dtype=torch.float64), device) for one in weights]
    total = sum_across_workers(torch.stack(rows).sum())
    factor = torch.where(total > 0, samples / total, 0.0)
    for parameter in members(learner.optimizer.param_groups):
        if parameter.grad is not None:
            sharding.local(parameter.grad).mul_(factor)


def rehearse(
    learner: Learner, blank: Callable[[int], Batch], batch_size: int, device: torch.device
) -> None:
    """Run a step on a blank batch, without an update, where the strategy of a resumed run needs it.

    The effect on buffers must be undone.
    """
    if not learner.strategy.rehearses:
        return
    part = max(learner.strategy.micro_batches, batch_size // learner.strategy.world_size)
    accumulate_gradients(
        learner, blank(part)._replace(global_size=batch_size), Sums(learner.task, device).add
    )
    learner.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(
    learner: Evaluator,
    batches: Iterable[Batch],
    device: torch.device,
    observe: Callable[[Batch, Any], None] | None = None,
    left_out: Collection[str] = (),
) -> Averages:
    """Return averages over every sample of every worker's `batches`, and draw no random number.

    A collective. All workers use rank 0's buffers, since they differ in statistics of batches.
    `observe` gets each batch and the model's outputs. The metrics `left_out` are not measured. A
    batch that needs too much memory is halved until it fits, as are later ones.
    """
    sums = Sums(learner.task, device, learns=False, left_out=left_out)
    broadcast(learner.evaluated.eval().buffers())
    most = math.inf
    for whole in learner.strategy.batches(batches, learner.evaluated):
        left = in_parts(whole, most)
        while left:
            part, found = left.pop(0), None
            batch = part if device.type == "cpu" else copied(part)  # a model may change its inputs
            # Its notes on a batch without samples are dropped
            task = copy.copy(learner.task) if batch.weightless else learner.task
            try:
                with sized_by("eval_batch_size", batch.size):
                    found = _evaluated(learner, task, batch)
            except Exception as error:
                is_least = len(in_parts(batch, batch.size / 2)) == 1
                is_least |= learner.strategy.forward_is_collective
                if is_least or not is_out_of_memory(error):
                    raise
            if found is None:  # out of the `except`, whose traceback would keep tensors alive
                most = math.ceil(batch.size / 2)
                left = [less for each in (part, *left) for less in in_parts(each, most)]
                continue
            outputs, loss, measured = found
            if loss is not None:
                sums.add(loss, outputs, measured)
                learner.extra_metrics.update(task, outputs, measured)
                if observe is not None:
                    observe(measured, outputs)
    total = sum_across_workers(sums.values, len(learner.task.reductions))
    averages = sums.averages(total)
    extra = learner.extra_metrics.compute(gather_across_workers)
    return dataclasses.replace(averages, values={**averages.values, **extra}) if extra else averages


def _evaluated(learner: Evaluator, task: Task, batch: Batch) -> tuple[Any, Sum | None, Batch]:
    """Return the model's outputs, the loss, unless nothing has a weight, and the measured batch."""
    with learner.precision.autocast():
        outputs, batch = learner.outputs(task, batch)
        # For the others' sake: the model, and the loss, may ask all workers
        if batch.weightless:
            with contextlib.suppress(Exception):  # it may not take a blank sample
                task.loss(outputs, batch)
            return outputs, None, batch
        loss = task.loss(outputs, batch)
        check_loss(loss, task, learns=False)
    return outputs, loss, batch
