"""The check of whether a custom task gives sums over samples, by a few samples and their halves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expt.data.loading import ROWS, Batch, PerSample, mapped
from expt.errors import ConfigError, ExptError, first_line, warn
from expt.tasks.sums import LOSS, method_of
from expt.tasks.task import Task
from expt.training import collectives
from expt.training.strategy import in_parts, part_of
from expt.worker.copies import Copies, first_samples

NEAR, ABOUT = 0.01, 0.2
"""The share by which a sum may differ from that of its halves; ABOUT with noise, or in 16 bits."""
TRAINING = "training_loss"


class _Sum(NamedTuple):
    """A sum over samples, such as a loss, and its weight."""

    total: Tensor
    weight: float


class _Sums(NamedTuple):
    """One sum of a few samples, taken five times."""

    whole: _Sum
    shared: _Sum
    """The same samples as the share of one of two workers."""
    twice: _Sum
    """Each sample twice."""
    one: _Sum
    """The first half of the samples."""
    other: _Sum

    @property
    def are_zero(self) -> bool:
        """True if all of them are 0, as their means would be."""
        return not any(each.total.any() for each in self)

    def is_mean(self, near: float) -> bool:
        """Return whether it may be a mean: equal to that of its halves, and of samples twice."""
        total, one, other = self.whole.total, self.one, self.other
        mean = one.total * one.weight + other.total * other.weight
        mean = mean / (one.weight + other.weight or 1.0)
        room = near * (one.total.abs() + other.total.abs()) + 1e-9
        stays = torch.allclose(self.twice.total, total, rtol=near, atol=0.0)
        return stays and bool(((total - mean).abs() <= room).all())


def check_sums(copies: Copies, batch: Batch, *, warns: bool) -> bool:
    """Compare sums that a custom task gives of a few samples with those of the two halves.

    Raises ConfigError where they are means, or weights of all workers, and warns where the
    halves don't add up. Weights, the states of task and model, and random numbers stay as they
    were. A batch that can't be halved is not compared. Returns whether a sum is 0, which is
    not compared either.
    """
    if batch.weightless:
        return False
    try:
        with copies.trying():
            copies.make(None, seed=0)
    except Exception as error:  # many classes
        if warns:
            warn(f"sums are not checked: can't copy model and task ({first_line(error)})")
        return False
    compared = set[str]()
    for predicted in (False, True):  # accuracies of many classes begin at 0
        if not (found := _found(copies, batch, predicted=predicted)):
            return False
        others = part_of(batch, slice(None, None, 2))
        for name, sums in found.items():
            if name not in compared and not sums.are_zero:
                again = functools.partial(_found, copies, others, predicted=predicted)
                _compare(copies, name, sums, again, warns=warns)
                compared.add(name)
        if compared >= found.keys():
            return False
    return True


def _found(copies: Copies, batch: Batch, *, predicted: bool) -> dict[str, _Sums]:
    """Return each sum by its name; none of a batch that raises, as training will."""
    found, twice = list[dict[str, _Sum]](), functools.partial(mapped, _doubled, parts=ROWS)
    try:
        few = first_samples(batch if batch.size > 1 else twice(batch))
        one, other = in_parts(few, -(-few.size // 2))  # raises where it can't be cut
        shared = few._replace(global_size=2 * few.size)
        with copies.trying(), collectives.alone():
            for seed, part in enumerate([few, shared, twice(few), one, other]):
                module, task, part = copies.make(part, seed)
                found.append(_sums(task, module.eval(), part, predicted=predicted))
    except ExptError:
        raise
    except Exception:  # many classes
        return {}
    return {name: _Sums(*(each[name] for each in found)) for name in found[0]}


def _compare(
    copies: Copies, name: str, sums: _Sums, again: Callable[[], Mapping[str, _Sums]], *, warns: bool
) -> None:
    task = copies.learner.task
    method = f"{method_of(task, 'measure')}: {name}"
    if name in (LOSS, TRAINING):
        method = method_of(task, name)
    (total, weight), shared = sums.whole, sums.shared
    is_divided = bool(total.any()) and torch.allclose(2 * shared.total, total, rtol=NEAR, atol=0.0)
    if is_divided or (weight and abs(shared.weight / weight - 2) <= NEAR):
        raise ConfigError(
            f"{method} has batch.global_size in its {'sum' if is_divided else 'weight'}, where"
            " workers are added up; give the sum over its own samples, and their number,"
            " len(outputs)"
        )
    one, other = sums.one.total, sums.other.total
    is_too_noisy = not torch.allclose(shared.total, total, rtol=ABOUT)
    if is_too_noisy or not total.shape == one.shape == other.shape:
        return  # or no sums, which the first step refuses
    is_noisy = not torch.allclose(shared.total, total, rtol=NEAR)
    near = ABOUT if is_noisy or copies.learner.precision.dtype else NEAR
    room = near * (one.abs() + other.abs()) + 1e-9
    weights = sums.one.weight + sums.other.weight
    weighs = abs(weight - weights) <= near * abs(weights)
    off = (total - one - other).abs()
    if not off.isfinite().all() or (weighs and (off <= room).all()):
        return
    # Where outputs depend on the batch, a sum may equal the mean of its halves by chance.
    confirmed = again() if weighs and sums.is_mean(near) else {}
    if name in confirmed and confirmed[name].is_mean(near):
        raise ConfigError(
            f"{method} gives a mean where the sum over the batch is expected; return the sum"
            ' (such as by reduction="sum") and its weight (such as len(outputs))'
        )
    if warns and not is_noisy and name != TRAINING:  # which may compare samples of a batch
        warn(
            f"{method} of a batch is not the sum of its parts: it depends on how samples are"
            " batched, and so on world_size and batch_size; return sums over samples, and"
            " weights (outputs [B, 1] with targets [B] would make pairs, [B, B])"
        )


def _doubled(rows: Tensor | PerSample) -> Tensor | PerSample:
    return torch.cat((rows, rows)) if isinstance(rows, Tensor) else PerSample(2 * rows)


def _sums(task: Task, module: nn.Module, batch: Batch, *, predicted: bool) -> dict[str, _Sum]:
    """Return the sums of a batch, or of one whose targets are the `predicted` classes."""
    outputs = task.forward(module, batch)
    if predicted:
        batch = batch._replace(targets=outputs.argmax(1))
    phases = {name: outputs[name] for name in task.phases}
    measured = task.measure(outputs, batch)
    measured = {name: each for name, each in measured.items() if name not in task.reductions}
    found = {**phases, LOSS: task.loss(outputs, batch), **measured}
    if type(task).training_loss is not Task.training_loss:
        found[TRAINING] = task.training_loss(outputs, batch)
    return {
        name: _Sum(torch.as_tensor(total).detach().double().reshape(-1).cpu(), float(weight))
        for name, (total, weight) in found.items()
    }
