"""The loops: a training step, an epoch, an evaluation. No I/O, no rank, no configuration."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from expt.data.indexing import local_slice
from expt.data.loading import Batch, leaves, mapped, to_device
from expt.errors import ConfigError, is_out_of_memory, listed
from expt.tasks.sums import Averages, Sums, check_loss
from expt.tasks.task import PhasedTask, Sum, Task
from expt.training import sharding
from expt.training.collectives import gather_across_workers, sum_across_workers
from expt.training.learner import Add, Evaluator, Learner, Position
from expt.training.optimizer_state import switch
from expt.training.parameter_groups import members


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
    learner.parallel.train()
    switch(learner.optimizer, "train")
    since, trained = time.perf_counter(), 0  # here, not before a checkpoint: `sums` may be older
    for batch in batches:
        _train_step(learner, batch, sums, on_gradients)
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


def _train_step(
    learner: Learner, batch: Batch, sums: Sums, on_gradients: Callable[[], None]
) -> None:
    """Run one training step."""
    if learner.phases:
        _through_phases(learner, batch, sums, on_gradients)
    elif learner.has_closure:
        _by_closure(learner, batch, sums, on_gradients)
    else:
        accumulate_gradients(learner, batch, sums.add)
        learner.drop_unused()
        on_gradients()
        update(learner)
    left_out = learner.precision.left_out
    sums.end_step(left_out)
    learner.average_statistics()
    if learner.ema is not None and (left_out is None or not left_out):
        learner.ema.update_parameters(learner.module)


def _by_closure(
    learner: Learner, batch: Batch, sums: Sums, on_gradients: Callable[[], None]
) -> None:
    """Have the optimizer compute loss and gradients as often as it needs; count the first."""
    evaluations = itertools.count()

    def closure() -> Tensor:
        """Return the loss of the global batch, alike on all workers, as its gradients are."""
        learner.optimizer.zero_grad(set_to_none=True)
        is_first, sum_and_weight = not next(evaluations), list[Tensor]()

        def add(loss: Sum, outputs: Any, part: Batch, begins_step: bool) -> None:
            if is_first:
                sums.add(loss, outputs, part, begins_step)
            if begins_step:
                sum_and_weight.clear()
            if not part.weightless:
                both = (loss[0].detach(), to_device(torch.as_tensor(loss[1]), loss[0].device))
                sum_and_weight.append(torch.stack([each.double() for each in both]))

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
    """What it and earlier phases hand on, for each of the micro-batches."""


def _through_phases(
    learner: Learner, batch: Batch, sums: Sums, on_gradients: Callable[[], None]
) -> None:
    """Update for each phase in order."""
    parts = _micro_batches(learner, batch, learner.gradient_accumulation)
    outputs: list[dict[str, Any]] = [{} for _ in parts]
    for name, parameters in learner.phases.items():
        trained = [each for each in parameters if each.requires_grad]

        def note(loss: Sum, found: Any, *_: object, name: str = name) -> None:
            found[name] = loss[0].detach(), loss[1]

        accumulate_gradients(learner, batch, note, _Phase(name, trained, parts, outputs))
        on_gradients()
        update(learner)
    for index, (part, found) in enumerate(zip(parts, outputs, strict=True)):
        sums.add(learner.task.loss(found, part), found, part, index == 0)


def _micro_batches(learner: Learner, batch: Batch, count: int) -> list[Batch]:
    size = learner.world_size
    return micro_batches(batch, count, size, interleaved=learner.interleaved)


def accumulate_gradients(
    learner: Learner, batch: Batch, add: Add, phase: _Phase | None = None
) -> None:
    """Run forward and backward on this worker's share of a global batch.

    `add` gets the loss and the outputs of each micro-batch, and whether it is the first, which may
    come again with `learner.fit`. Waits for nothing else. Raises ConfigError as `_all_reduce`.
    """
    passes = functools.partial(_passes, learner, batch, add, phase)
    count = learner.gradient_accumulation
    weights = learner.fit(passes, batch) if learner.fit else passes(count)
    if phase is not None:
        learner.average_gradients(phase.trained)
    if not learner.task.weight_is_samples:
        _divide_by_weight(learner, batch.global_size, weights)


def _passes(
    learner: Learner, batch: Batch, add: Add, phase: _Phase | None, count: int
) -> list[Tensor | float]:
    """Run forward and backward on each of `count` micro-batches; return their weights."""
    task, parts = learner.task, phase.parts if phase else _micro_batches(learner, batch, count)
    # DDP averages gradients over workers, whose parts may differ in size: weighted so, the mean is
    # the global batch's.
    whole_weight = learner.world_size / batch.global_size
    weights = list[Tensor | float]()
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        with _all_reduce(learner, index) if last else _without_all_reduce(learner):
            with learner.precision.autocast():
                if phase is not None:
                    outputs = phase.outputs[index]
                    loss = cast(PhasedTask, task).phase(phase.name, learner.parallel, part, outputs)
                else:
                    outputs = task.forward(learner.parallel, part)
                    loss = task.training_loss(outputs, part)
            check_loss(loss, task)
            weight = 0.0 if part.weightless else whole_weight
            learner.precision.backward(loss[0], weight, phase.trained if phase else ())
        add(loss, outputs, part, index == 0)
        weights.append(0.0 if part.weightless else loss[1])
    return weights


def update(learner: Learner) -> None:
    """Use the step's gradients, and drop them; see `Precision.update`."""
    learner.precision.update(learner.optimizer, learner.module.parameters())


@torch.no_grad()
def _divide_by_weight(learner: Learner, samples: int, weights: list[Tensor | float]) -> None:
    """Divide gradients by the loss's weight over all workers instead of by samples.

    A collective of one number. Where nothing has a weight they are zero.
    """
    device = next(learner.module.parameters()).device
    rows = [to_device(torch.as_tensor(one, dtype=torch.float64), device) for one in weights]
    total = sum_across_workers(torch.stack(rows).sum())
    factor = torch.where(total > 0, samples / total, 0.0)
    for parameter in members(learner.optimizer.param_groups):
        if parameter.grad is not None:
            sharding.local(parameter.grad).mul_(factor)


def micro_batches(
    batch: Batch, count: int, world_size: int = 1, *, interleaved: bool = False
) -> list[Batch]:
    """Cut a batch into at most `count` micro-batches; as many on every worker, which meet in each.

    Where they are `interleaved`, the n-th of all workers together has the same samples of the
    global batch whatever the number of workers: each `count`-th, from the n-th on.
    A worker with fewer samples than others have micro-batches repeats its first, without weight.
    Raises ConfigError where the batch's tensors differ in length.
    """
    if count == 1:
        return [batch]
    lengths = {len(tensor) for tensor in leaves((batch.inputs, batch.targets))}
    if len(lengths) > 1:
        raise ConfigError(
            f"gradient_accumulation={count}: the tensors of a batch have unequal lengths; use 1"
        )
    size, most = lengths.pop(), -(-batch.global_size // world_size)
    number = min(most, count) if interleaved else len(_cut(most, count))
    cuts = [slice(at, size, number) for at in range(number)] if interleaved else _cut(size, count)
    if len(cuts) != number:
        cuts = [local_slice(size, index, number) for index in range(number)]

    def part(cut: slice) -> Batch:
        inputs, targets = mapped(lambda tensor: tensor[cut], (batch.inputs, batch.targets))
        return batch._replace(inputs=inputs, targets=targets)

    return [
        part(cut) if cut.start < cut.stop else part(slice(1))._replace(weightless=True)
        for cut in cuts
    ]


def _cut(size: int, count: int) -> list[slice]:
    """Return slices of this many samples in at most `count` micro-batches, as by torch.chunk."""
    step = -(-size // count)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def warm_up_buckets(
    learner: Learner, blank: Callable[[int], Batch], batch_size: int, device: torch.device
) -> None:
    """Run a step on a blank batch, without an update, so that DDP rebuilds its buckets.

    DistributedDataParallel sorts gradients into other buckets after its first step. A resumed run
    has had that step: without one here, gradients would be added up in another order once. Does
    nothing for fewer than three workers. The effect on buffers must be undone.
    """
    # Where it looks for unused parameters, as for phases, it sorts nothing.
    if learner.world_size <= 2 or learner.phases or learner.shards > 1 or learner.fit:
        return
    part = max(learner.gradient_accumulation, batch_size // learner.world_size)
    accumulate_gradients(
        learner, blank(part)._replace(global_size=batch_size), Sums(learner.task, device).add
    )
    learner.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _all_reduce(learner: Learner, earlier: int) -> Iterator[None]:
    """Average the gradients of the body's backward pass, after `earlier` ones of the same step.

    Raises ConfigError naming parameters without one, for which the other workers wait.
    """
    parallel, trained = learner.parallel, list[Tensor]()
    if isinstance(parallel, DistributedDataParallel) and not (
        parallel.find_unused_parameters or parallel.static_graph
    ):  # the optimiser's lists: to walk through the modules in every step would cost too much
        trained = [p for p in members(learner.optimizer.param_groups) if p.requires_grad]
    reached = set[Tensor]()  # a gradient that is there may be of an earlier pass
    hooks = [p.register_post_accumulate_grad_hook(reached.add) for p in trained if earlier]
    yield
    for hook in hooks:
        hook.remove()
    unused = {p for p in trained if p.grad is None or (earlier and p not in reached)}
    refuse_unused(learner.module, unused)


def refuse_unused(module: nn.Module, unused: set[Tensor]) -> None:
    """Raise ConfigError where there are `unused` parameters."""
    if unused:
        names = [name for name, p in module.named_parameters() if p in unused]
        raise ConfigError(
            f"these parameters got no gradient, they took no part in the loss: {listed(names)};"
            " use ddp.find_unused_parameters=true, or remove them from the model"
        )


@torch.no_grad()
def evaluate(
    learner: Evaluator,
    batches: Iterable[Batch],
    device: torch.device,
    observe: Callable[[Batch, Any], None] | None = None,
) -> Averages:
    """Return averages over every sample of every worker's `batches`, and draw no random number.

    One collective, and two more for metrics that are not sums. `observe` gets each batch and the
    model's outputs. A batch for which memory does not suffice is halved until it does, and so are
    those after it.
    """
    sums = Sums(learner.task, device, learns=False)
    learner.evaluated.eval()
    most = math.inf
    for whole in learner.in_step(batches):
        left = in_parts(whole, most)
        while left:
            batch, found = left.pop(0), None
            # What it notes of no sample is dropped
            task = copy.copy(learner.task) if batch.weightless else learner.task
            try:
                found = _evaluated(learner, task, batch)
            except Exception as error:
                is_least = len(in_parts(batch, batch.size / 2)) == 1
                if is_least or learner.in_step is not iter or not is_out_of_memory(error):
                    raise
            if found is None:  # out of the `except`: its traceback would keep what was allocated
                most = math.ceil(batch.size / 2)
                left = [part for each in (batch, *left) for part in in_parts(each, most)]
            elif found[1] is not None:
                sums.add(found[1], found[0], batch)
                learner.extra_metrics.update(task, found[0], batch)
                if observe is not None:
                    observe(batch, found[0])
    total = sum_across_workers(sums.values, len(learner.task.reductions))
    averages = sums.averages(total)
    extra = learner.extra_metrics.compute(gather_across_workers)
    return dataclasses.replace(averages, values={**averages.values, **extra}) if extra else averages


def _evaluated(learner: Evaluator, task: Task, batch: Batch) -> tuple[Any, Sum | None]:
    """Return the model's outputs, and the loss, unless nothing has a weight."""
    with learner.precision.autocast():
        outputs = task.forward(learner.evaluated, batch)
        # For the others' sake: the model, and the loss, may ask all workers
        if batch.weightless:
            with contextlib.suppress(Exception):  # it may not take what is not a sample
                task.loss(outputs, batch)
            return outputs, None
        loss = task.loss(outputs, batch)
        check_loss(loss, task, learns=False)
    return outputs, loss


def in_parts(batch: Batch, most: float) -> list[Batch]:
    """Return an evaluation's batch in parts of at most so many samples.

    It stays whole where its tensors differ in length.
    """
    if batch.size <= most or len({*map(len, leaves((batch.inputs, batch.targets)))}) > 1:
        return [batch]
    return micro_batches(batch._replace(global_size=batch.size), math.ceil(batch.size / most))


def _without_all_reduce(learner: Learner) -> contextlib.AbstractContextManager[None]:
    if isinstance(learner.parallel, DistributedDataParallel):
        return learner.parallel.no_sync()
    if learner.shards > 1 and not learner.reduces_each_micro_batch:
        return sharding.without_reduction(learner.parallel)
    return contextlib.nullcontext()
