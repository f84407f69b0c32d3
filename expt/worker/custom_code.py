"""Checks of custom code in the first steps: wrong sums, untrained tensors, lost state.

The sums of a task are checked on a few samples before the first step, tensors that no optimizer
trains after it, and state that no checkpoint holds at the first checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from expt.config import constraints
from expt.config.schema import RunConfig
from expt.data import changes
from expt.data.changes import Watched
from expt.data.checked_samples import in_words
from expt.data.loading import Batch, mapped, named_leaves
from expt.errors import ConfigError, ExptError, first_line, listed, warn
from expt.tasks.sums import LOSS, method_of
from expt.tasks.task import Task
from expt.training import batch_norm, collectives, random_state
from expt.training.callback import Callback
from expt.training.collectives import Worker
from expt.training.learner import Learner, trained_names
from expt.training.strategy import in_parts
from expt.worker.rank_health import UNEQUAL


class FirstSteps:
    """Compares custom code after the first step with itself at a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        callbacks: Sequence[Callback] = (),
        *,
        warns: bool,
    ) -> None:
        self._learner, self._warns = learner, warns
        self._steps, self._epochs = 0, 0
        self._shapes = _shapes(learner.module)
        self._parameters = {id(each): each for each in learner.module.parameters()}
        self._watched: dict[str, Watched] = {}
        self._reported: set[str] | None = None
        keys = "task", "optimizer", "scheduler", "model"
        custom = {key for key in keys if isinstance(getattr(config, key), constraints.Target)}
        self._is_custom = bool(custom or callbacks)
        parts: dict[str, Any] = {key: getattr(learner, key) for key in keys[:3]}
        if not config.is_sharded:
            named = learner.module.named_modules()
            parts |= {f"model.{name}".rstrip("."): one for name, one in named}
        self._objects = {at: one for at, one in parts.items() if at.partition(".")[0] in custom}
        self._objects |= {f"callbacks.{index}": one for index, one in enumerate(callbacks)}

    def step(self) -> None:
        """Check the model after the first step, and note the state of custom code.

        Raises ConfigError for parameters made in the step, and for untrained tensors.
        """
        self._steps += 1
        if self._steps > 1:
            return
        self.refuse_late()
        self._report_untrained()
        known, own = self._known(), changes.own_code() if self._is_custom else {}
        watched = {**self._objects, **own}.items()
        self._watched = {where: Watched(one, known, *_methods(one)) for where, one in watched}

    def refuse_late(self) -> None:
        """Raise ConfigError for parameters that forward passes have made, resized or removed."""
        module = self._learner.module
        late = {name for name, _ in _shapes(module).items() ^ self._shapes.items()}
        if self._learner.strategy.shards == 1:
            named = module.named_parameters()
            late |= {name for name, each in named if id(each) not in self._parameters}
        if late:
            raise ConfigError(
                f"model: {listed(sorted(late))}: made, resized or removed in a forward pass, so"
                " that no optimizer trains it or no checkpoint can be loaded; make it in __init__,"
                " as large as it gets; if its size is not known there, use a lazy layer such as"
                " nn.LazyLinear"
            )
        changed = sorted(trained_names(module) ^ self._learner.trained)
        if changed and self._learner.strategy.world_size > self._learner.strategy.shards == 1:
            raise ConfigError(f"model: {listed(changed)}: requires_grad has changed: {UNEQUAL}")

    def _report_untrained(self) -> None:
        """Raise ConfigError for tensors of the model that get gradients and are not parameters."""
        for where, owner in self._objects.items():
            names = [
                name
                for attribute, value in changes.attributes(owner).items()
                for name, one in named_leaves(value, f"{where}.{attribute}")
                if one.is_leaf and one.grad is not None and id(one) not in self._parameters
            ]
            problem = (
                f"{listed(names)}: gets gradients, but no optimizer trains it and no checkpoint"
                " holds it; make it an nn.Parameter or a submodule of the model, several an"
                " nn.ModuleList or nn.ModuleDict, or freeze it by requires_grad_(False)"
            )
            if names and where.startswith("model"):
                raise ConfigError(problem)
            if names and where == "task" and self._warns:
                warn(problem)

    def end(self, *, within_epoch: bool) -> None:
        """Warn of state that a checkpoint lacks: before the first, and at two epochs' ends.

        Evaluations and callbacks may change some, too, and state of each sample changes in the
        second epoch.
        """
        self.refuse_late()
        if self._steps < 2 or (within_epoch and self._reported is not None):
            return
        reported = self._reported or set()
        lost = [name for name in self._lost() if name not in reported]
        self._reported = {*reported, *lost}
        self._epochs += not within_epoch
        if self._epochs == 2:
            self._watched = {}
        if lost and self._warns:
            warn(
                f"{listed(lost)}: changes while training, and no checkpoint holds it: a resumed run"
                " begins it again; keep it in state_dict and load_state_dict of a task, an"
                " optimizer, a scheduler or a callback, or in a model's buffer, or get_extra_state"
                " and set_extra_state"
            )

    def _lost(self) -> list[str]:
        """Return the state that a checkpoint lacks; random numbers stay as they were."""
        device, known = next(self._learner.module.parameters()).device, self._known()
        before, lost = random_state.state_dict(device), list[str]()
        for where, watched in self._watched.items():
            try:
                lost += [f"{where}.{name}" for name in watched.lost(known)]
            except Exception as error:
                raise in_words(error, f"loading the state of {where}") from error
        random_state.load_state_dict(before, device)
        return lost

    def _known(self) -> dict[int, object]:
        """Return the objects that a checkpoint has, by their identity."""
        module, optimizer = self._learner.module, self._learner.optimizer
        found = [*module.modules(), *module.state_dict(keep_vars=True).values()]
        found += [optimizer, optimizer.state, optimizer.param_groups, self._learner.scheduler]
        return {id(each): each for each in found}


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(each, "shape", None) for name, each in module.state_dict().items()}


def _methods(one: object) -> tuple[str, ...]:
    """Return the names of an object's own methods to save and load its state."""
    if isinstance(one, nn.Module):
        own = type(one).get_extra_state is not nn.Module.get_extra_state
        return ("get_extra_state", "set_extra_state") if own else ()
    # Of no attribute that a subclass adds.
    theirs = Task.state_dict, Optimizer.state_dict, Callback.state_dict
    own = isinstance(one, Task | Optimizer | Callback) and type(one).state_dict not in theirs
    return ("state_dict", "load_state_dict") if own or isinstance(one, LRScheduler) else ()


SAMPLES = 8
NEAR, ABOUT = 0.01, 0.2
"""The share by which a sum may differ from that of its halves; ABOUT with noise, or in 16 bits."""
TRAINING = "training_loss"
_Sum = tuple[Tensor, float]


def tried(batches: Iterator[Batch], learner: Learner, worker: Worker) -> Iterator[Batch]:
    """Yield the batches, and check the task's sums on the first. Raises ConfigError for means.

    While a sum is 0, which its mean is too, that is done again on batch 2, 4, 8, ...
    """
    is_due = True
    for number, batch in enumerate(batches, 1):
        if is_due and number & (number - 1) == 0:
            warns = worker.rank == 0 and number == 1
            is_due = check_sums(learner, batch, worker.device, warns=warns)
        yield batch


def check_sums(learner: Learner, batch: Batch, device: torch.device, *, warns: bool) -> bool:
    """Compare `loss` and `measure` of a few samples with those of the two halves.

    Raises ConfigError where they give means, or weights of all workers, and warns where the halves
    don't add up. Weights, the states of task and model, and random numbers stay as they were. A
    batch that can't be halved is not compared. Returns whether a sum is 0, which is not compared
    either.
    """
    if batch.weightless:
        return False
    zero: list[str] | None = None
    for predicted in (False, True):  # accuracies of many classes begin at 0
        try:
            found = _found(learner, batch, device, predicted=predicted)
        except ExptError:
            raise
        except _UncopiedError as error:
            if warns:
                warn(f"sums are not checked: can't copy model and task ({error})")
            return False
        except Exception:  # many classes: training will raise it
            return False
        names = found[0] if zero is None else zero
        zero = [name for name in names if not any(each[name][0].any() for each in found)]
        for name in names:
            if name not in zero:
                _check(learner, name, [each[name] for each in found], warns=warns)
        if not zero:
            return False
    return True


def _check(learner: Learner, name: str, found: list[_Sum], *, warns: bool) -> None:
    whole, again, *others = found
    is_loss = name in (LOSS, TRAINING)
    method = method_of(learner.task, name if is_loss else "measure")
    method += "" if is_loss else f": {name}"
    sums = bool(whole[0].any()) and torch.allclose(2 * again[0], whole[0], rtol=NEAR)
    weights = whole[1] and abs(again[1] / whole[1] - 2) <= NEAR
    if sums or weights:
        raise ConfigError(
            f"{method} has batch.global_size in its {'sum' if sums else 'weight'}, where workers"
            " are added up; give the sum over its own samples, and their number, len(outputs)"
        )
    if not torch.allclose(again[0], whole[0], rtol=ABOUT):
        return  # too noisy to compare
    is_noisy = not torch.allclose(again[0], whole[0], rtol=NEAR)
    near = ABOUT if is_noisy or learner.precision.dtype else NEAR
    # A training loss may compare the samples of a batch.
    may_warn = warns and not is_noisy and name != TRAINING
    _compare(method, whole, *others, near=near, warns=may_warn)


class _UncopiedError(Exception):
    """The model or the task can't be copied."""


def _found(
    learner: Learner, batch: Batch, device: torch.device, *, predicted: bool
) -> list[dict[str, _Sum]]:
    """Return the sums of a few samples: as they are, on more workers, each twice, and of halves."""
    before, found = random_state.state_dict(device), []
    eager = torch.compiler.set_stance("force_eager") if learner.compiled else None
    try:
        with torch.no_grad(), collectives.alone(), eager or contextlib.nullcontext():
            few = mapped(torch.clone, in_parts(batch, SAMPLES)[0])  # views would copy all samples
            twice = functools.partial(mapped, lambda each: torch.cat((each, each)))
            few = few if few.size > 1 else twice(few)
            few = few._replace(global_size=few.size)
            one, other = in_parts(few, -(-few.size // 2))  # raises where it can't be cut
            more = few._replace(global_size=2 * few.size)
            for seed, part in enumerate([few, more, twice(few), one, other]):
                try:  # all that custom code could change in place
                    module, task, part = copy.deepcopy((learner.module, learner.task, part))
                except Exception as error:  # many classes
                    raise _UncopiedError(first_line(error)) from error
                batch_norm.part_from_workers(module)
                random_state.seed(seed)
                with learner.precision.autocast():
                    found.append(_sums(task, module.eval(), part, predicted=predicted))
    finally:
        random_state.load_state_dict(before, device)
    return found


def _sums(task: Task, module: Any, batch: Batch, *, predicted: bool) -> dict[str, _Sum]:
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
        name: (total.detach().double().reshape(-1).cpu(), float(weight))
        for name, (total, weight) in found.items()
    }


def _compare(
    method: str, whole: _Sum, twice: _Sum, one: _Sum, other: _Sum, *, near: float, warns: bool
) -> None:
    if not whole[0].shape == one[0].shape == other[0].shape:
        return  # no sums, which the first step refuses
    total, room = whole[0], near * (one[0].abs() + other[0].abs()) + 1e-9
    weight = one[1] + other[1]
    weighs = abs(whole[1] - weight) <= near * abs(weight)
    off = (total - one[0] - other[0]).abs()
    if not off.isfinite().all() or (weighs and (off <= room).all()):
        return
    mean = (one[0] * one[1] + other[0] * other[1]) / (weight or 1.0)
    # Where outputs depend on the batch, a sum may equal the mean of its halves by chance.
    stays = torch.allclose(twice[0], total, rtol=near)
    if weighs and stays and ((total - mean).abs() <= room).all():
        raise ConfigError(
            f"{method} gives a mean where the sum over the batch is expected; return the sum (such"
            ' as by reduction="sum") and its weight (such as len(outputs))'
        )
    if warns:
        warn(
            f"{method} of a batch is not the sum of its parts: it depends on how samples are"
            " batched, and so on world_size and batch_size; return sums over samples, and weights"
            " (outputs [B, 1] with targets [B] would make pairs, [B, B])"
        )
