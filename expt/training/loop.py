"""The loops: a training step, an epoch, an evaluation. No I/O, no rank, no configuration."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from expt.data.loading import Batch
from expt.errors import ConfigError, OutOfMemory
from expt.training.collectives import sum_across_workers
from expt.training.learner import Learner, Position
from expt.training.memory_probe import largest_that_fits
from expt.training.metrics import Averages, Sums, averages, summed_loss


def train_epoch(
    learner: Learner,
    batches: Iterable[Batch],
    position: Position,
    sums: Sums,
    *,
    log_every: int,
    on_gradients: Callable[[], None] = lambda: None,
    on_step: Callable[[], None] = lambda: None,
    on_log: Callable[[Averages, float], None] = lambda averages, images_per_s: None,
    between_steps: Callable[[], bool] = lambda: False,
) -> None:
    """Train on `batches`, adding to the epoch's `sums`, until they end or all steps of the run are done.

    In each step `on_gradients` is called before the update, and `on_step` before the learning rate changes. Every
    `log_every` steps `on_log` gets the averages over all workers since the last time, and the images that were trained
    on a second.
    `between_steps` comes last, and ends the loop by saying True.
    """
    learner.parallel.train()
    since, trained = time.perf_counter(), 0  # here, not before a checkpoint: `sums` may be older
    for batch in batches:
        shortage = _learn(learner, batch, sums, on_gradients)
        if shortage:  # out of the `except`: the traceback would keep what the step has allocated
            raise OutOfMemory(shortage, fits=largest_that_fits(learner, batch))
        position.advance()
        trained += batch.global_size
        on_step()
        if learner.scheduler_interval == "step":
            learner.scheduler.step()
        if position.step % log_every == 0:
            values = averages(sum_across_workers(sums.values - sums.logged))
            now = time.perf_counter()
            on_log(values, trained / (now - since))
            since, trained = now, 0
            sums.mark_logged()
        if between_steps() or position.is_run_done:
            break


def _learn(learner: Learner, batch: Batch, sums: Sums, on_gradients: Callable[[], None]) -> str | None:
    """One optimiser step; returns what torch says where the GPU's memory did not suffice."""
    try:
        accumulate_gradients(learner, batch, sums)
        check_gradients(learner)
        on_gradients()
        learner.precision.update(learner.optimizer, learner.module.parameters())
        learner.average_statistics()
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


def accumulate_gradients(learner: Learner, batch: Batch, sums: Sums) -> None:
    """Forward and backward on this worker's part of a global batch; adds to `sums`, waits for nothing."""
    parts = _parts(batch, learner.gradient_accumulation)
    # DDP averages gradients over workers, whose parts may differ in size: weighted so, the mean is the global batch's.
    weight = learner.world_size / batch.global_size
    for index, (images, labels) in enumerate(parts):
        last = index == len(parts) - 1
        with contextlib.nullcontext() if last else _without_all_reduce(learner.parallel):
            with learner.precision.autocast():
                logits = learner.parallel(images)
                loss_sum = summed_loss(logits, labels, learner.label_smoothing)
            learner.precision.backward(loss_sum, weight)
        sums.add(logits, labels, loss_sum)


def _parts(batch: Batch, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if count == 1:
        return [(batch.images, batch.labels)]
    return list(zip(batch.images.chunk(count), batch.labels.chunk(count), strict=True))


def rehearse(learner: Learner, image_shape: tuple[int, int, int], batch_size: int, device: torch.device) -> None:
    """For three or more workers: a step on a blank batch that changes no weight; its effect on buffers is to be undone.

    DistributedDataParallel sorts gradients into other buckets after its first step. A run that goes on has that step
    behind it: without one here, gradients would be added up in another order once.
    """
    if learner.world_size <= 2:
        return
    part = max(learner.gradient_accumulation, batch_size // learner.world_size)
    images, labels = torch.zeros(part, *image_shape, device=device), torch.zeros(part, dtype=torch.long, device=device)
    accumulate_gradients(learner, Batch(images, labels, batch_size), Sums(device))
    learner.optimizer.zero_grad(set_to_none=True)


def check_gradients(learner: Learner) -> None:
    """Raise ConfigError naming the parameters that took no part in the loss, where DDP would wait for them in vain."""
    parallel = learner.parallel
    if not isinstance(parallel, DistributedDataParallel) or parallel.find_unused_parameters or parallel.static_graph:
        return
    # The optimiser's lists: to walk through the modules in every step would cost more than the question is worth.
    parameters = itertools.chain.from_iterable(group["params"] for group in learner.optimizer.param_groups)
    if any(p.grad is None and p.requires_grad for p in parameters):
        unused = [name for name, p in learner.module.named_parameters() if p.requires_grad and p.grad is None]
        raise ConfigError(
            f"these parameters got no gradient, they took no part in the loss: {', '.join(unused)}; "
            "use ddp.find_unused_parameters=true, or remove them from the model"
        )


@torch.no_grad()
def evaluate(
    learner: Learner,
    batches: Iterable[Batch],
    device: torch.device,
    observe: Callable[[Batch, torch.Tensor], None] | None = None,
) -> Averages:
    """Averages over every sample of every worker's `batches`; one collective, and no random number drawn.

    `observe` gets each batch and its logits.
    """
    module, sums = learner.module, Sums(device, at_once=learner.overwrites)
    module.eval()
    for batch in batches:
        with learner.precision.autocast():
            logits = module(batch.images)
            loss_sum = summed_loss(logits, batch.labels)
        sums.add(logits, batch.labels, loss_sum)
        if observe is not None:
            observe(batch, logits)
    return averages(sum_across_workers(sums.values))


def _without_all_reduce(parallel: nn.Module) -> contextlib.AbstractContextManager[None]:
    if isinstance(parallel, DistributedDataParallel):
        return parallel.no_sync()
    return contextlib.nullcontext()
