"""Whether the sums of a custom task add up, tried on a few samples before the first step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from expt.data.loading import Batch, leaves, mapped
from expt.errors import ConfigError, ExptError, warn
from expt.tasks.sums import LOSS, loss_method, measure_method
from expt.tasks.task import Task
from expt.training import batch_norm, collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.worker import random_state

SAMPLES = 8
NEAR, NEAR_IN_16_BITS = 0.01, 0.1
"""The share of itself by which a sum may differ from that of its parts."""
TRAINING = "training_loss"
_Sums = dict[str, tuple[Tensor, float]]


def tried(batches: Iterator[Batch], learner: Learner, worker: Worker) -> Iterator[Batch]:
    """Yield the batches, and check the task's sums on the first. Raises ConfigError for means."""
    first = next(batches, None)
    if first is not None:
        check_sums(learner, first, worker.device, warns=worker.rank == 0)
        yield first
    yield from batches


def check_sums(learner: Learner, batch: Batch, device: torch.device, *, warns: bool) -> None:
    """Compare what `loss` and `measure` give for a few samples with what they give for parts.

    Raises ConfigError where they give means, and warns where the sums of parts don't add up.
    Weights, the states of task and model, and random numbers stay as they were. What can't be
    copied, cut or computed so is not compared.
    """
    parts = _parts(batch)
    if not parts or learner.shards > 1:
        return
    before = random_state.state_dict(device)
    eager = torch.compiler.set_stance("force_eager") if learner.compiled else None
    try:
        with torch.no_grad(), collectives.alone(), eager or contextlib.nullcontext():
            module, task = copy.deepcopy((learner.module, learner.task))
            batch_norm.part_from_workers(module)
            module.eval()
            found = []
            for seed, one in enumerate([parts[0], parts[0], *parts]):
                random_state.seed(max(1, seed))
                memo = {id(each): each for each in module.modules()}
                with learner.precision.autocast():
                    found.append(_sums(copy.deepcopy(task, memo), module, one))
    except ExptError:
        raise
    except Exception:  # many classes: training says what is wrong
        return
    finally:
        random_state.load_state_dict(before, device)
    first, again, whole, *others = found
    if any(bool((first[name][0] != again[name][0]).any()) for name in first):
        return  # the model carries something from one pass to the next
    sizes = [one.size for one in parts[1:]]
    near = NEAR if learner.precision.dtype is None else NEAR_IN_16_BITS
    for name in whole:
        is_drawn = not torch.allclose(again[name][0], whole[name][0], rtol=near)
        each = [one[name] for one in others]
        problem = _problem(whole[name], each, sizes, near, is_drawn=is_drawn)
        _report(_method(task, name), problem, warns=warns and name != TRAINING)


def _parts(batch: Batch) -> list[Batch]:
    """Return the first samples of a batch, and then these in parts, not all of one size."""
    lengths = {len(tensor) for tensor in leaves((batch.inputs, batch.targets))}
    size = min(SAMPLES, *lengths) if len(lengths) == 1 else 0
    if size < 2 or batch.weightless:
        return []
    step = -(-size * 3 // SAMPLES)
    cuts = [slice(size), *(slice(at, min(at + step, size)) for at in range(0, size, step))]

    def part(cut: slice) -> Batch:
        inputs, targets = mapped(lambda tensor: tensor[cut], (batch.inputs, batch.targets))
        return batch._replace(
            inputs=inputs, targets=targets, global_size=cut.stop - (cut.start or 0)
        )

    return [part(cut) for cut in cuts]


def _sums(task: Task, module: Any, batch: Batch) -> _Sums:
    outputs = task.forward(module, batch)
    found = {LOSS: task.loss(outputs, batch), **task.measure(outputs, batch)}
    if type(task).training_loss is not Task.training_loss:
        found[TRAINING] = task.training_loss(outputs, batch)
    return {
        name: (total.detach().double().reshape(-1).cpu(), float(weight))
        for name, (total, weight) in found.items()
    }


def _problem(
    whole: tuple[Tensor, float],
    parts: Sequence[tuple[Tensor, float]],
    sizes: Sequence[int],
    near: float,
    *,
    is_drawn: bool,
) -> str | None:
    """Return "mean" where `whole` is that of the parts, "other" where it is not their sum."""
    total, weight = whole
    each = torch.stack([part for part, _ in parts])
    weights = torch.tensor([part for _, part in parts], dtype=torch.float64)
    added, room = each.sum(0), near * each.abs().sum(0) + 1e-9
    weighs = abs(weight - float(weights.sum())) <= near * abs(weight)
    if not (total.isfinite().all() and each.isfinite().all()):
        return None
    if is_drawn:  # a mean is a third of the sum here, whatever noise there is
        share = float(total.sum() / added.sum()) if added.sum() else 1.0
        return "mean" if weighs and 0.5 < share * len(parts) < 1.7 else None
    if weighs and bool(((total - added).abs() <= room).all()):
        return None
    shares = (torch.tensor(sizes, dtype=torch.float64), weights)
    means = [(each * (by / by.sum())[:, None]).sum(0) for by in shares if by.sum() > 0]
    is_mean = any(bool(((total - mean).abs() <= room).all()) for mean in means)
    return "mean" if weighs and is_mean else "other"


def _method(task: Task, name: str) -> str:
    if name in (LOSS, TRAINING):
        return loss_method(task, learns=name == TRAINING)
    return f"{measure_method(task)}: {name}"


def _report(method: str, problem: str | None, *, warns: bool) -> None:
    if problem == "mean":
        raise ConfigError(
            f"{method} gives a mean where the sum over the batch is expected; return the sum (such"
            ' as by reduction="sum") and its weight (such as len(outputs))'
        )
    if problem == "other" and warns:  # a loss may compare the samples of a batch
        warn(
            f"{method} of a batch is not the sum of its parts: it depends on how samples are"
            " batched, and so on world_size and batch_size; return sums over samples, and weights"
        )
