"""Checks of whether results depend on how samples are batched, which pages promise they don't.

Copies of the model and the task get a few samples of a batch that was used, and parts of them. No
look is taken where using the batch has changed the state of custom modules: looks would, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.data import changes
from expt.data.changes import Watched
from expt.data.loading import ROWS, Batch, PerSample, leaves, mapped
from expt.errors import ConfigError, ExptError, first_line, warn
from expt.tasks.checks import method_of
from expt.tasks.sums import LOSS
from expt.tasks.task import Task
from expt.training import batch_norm, collectives, patches, random_state
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.training.strategy import can_be_cut, copied, in_parts, part_of

SAMPLES = 8
NEAR, ABOUT = 0.01, 0.2
"""The share by which a sum may differ from that of its halves; ABOUT with noise, or in 16 bits."""
NEAR_OUTPUTS, ABOUT_OUTPUTS = 1e-3, 0.1
"""The share of the largest output by which others may differ; ABOUT in 16 bits."""
TRAINING = "training_loss"
_Sum = tuple[Tensor, float]
T = TypeVar("T")


class BatchChecks:
    """The checks of a run: in the first steps of this process, and in its first evaluation."""

    def __init__(self, config: RunConfig, learner: Learner, worker: Worker) -> None:
        self._config, self._learner, self._worker = config, learner, worker
        parts = () if config.is_sharded else ("model", "task")  # which can't be copied
        self._own = {one for one in parts if isinstance(getattr(config, one), Target)}
        self._checks_curve = bool(parts) and config.gradient_accumulation != 1
        self._checks_evaluation = "model" in self._own
        # Gloo compares sizes, and its error is explained.
        is_nccl = worker.device.type == "cuda" and worker.world_size > 1
        self._checks_shares = bool(self._own) and is_nccl and not config.drop_last

    def of_steps(self, batches: Iterator[Batch], *, begins: bool) -> Iterator[Batch]:
        """Yield an epoch's batches, and look at samples once they were used; a collective.

        Warns where micro-batches change the curve. Where the run `begins` with this epoch, checks
        the sums of a custom task: while one is 0, which its mean is too, on batch 2, 4, 8, ...
        Raises ConfigError where NCCL would exchange unequal shares.
        """
        batches = self._with_shares(batches) if self._checks_shares else batches
        checks_sums, number, size = begins and "task" in self._own, 0, self._worker.world_size
        while (checks_sums or self._checks_curve) and (batch := next(batches, None)) is not None:
            number += 1
            look = None if number & (number - 1) else _Look(batch)
            yield batch
            if look is None:
                continue
            few, device = look.samples(), self._worker.device
            sizes = {*collectives.gather_across_workers(few.size if few else 0)}
            few = few if len(sizes) == 1 else None  # workers that meet in a look are all there
            if checks_sums:
                warns = self._worker.rank == 0 and number == 1
                has_zero = few is not None and check_sums(self._learner, few, device, warns=warns)
                checks_sums = any(collectives.gather_across_workers(has_zero))
            if self._checks_curve:
                self._checks_curve = False
                self._look_at_curve(few if self._own else None, -(-batch.global_size // size))
        yield from batches

    def _with_shares(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if self._checks_shares and batch.global_size % self._worker.world_size:
                self._checks_shares = False
                number = min(SAMPLES, batch.global_size // self._worker.world_size)
                if _gathers(self._learner, batch, number, self._worker.device):
                    raise ConfigError(
                        f"drop_last=false: {batch.global_size} samples are unequal shares of"
                        f" {self._worker.world_size} workers, and the model or the loss gathers"
                        " them; use drop_last=true"
                    )
            yield batch

    def of_evaluation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, and warn where a sample's outputs depend on others of its batch."""
        looks, self._checks_evaluation = self._checks_evaluation and not self._worker.rank, False
        if looks and (first := next(batches, None)) is not None:
            look, begun = _Look(first), patches.collectives_begun()
            yield first
            # In a collective it would wait for the others.
            few = look.samples() if begun == patches.collectives_begun() else None
            # A custom task's loss has a check of its own, and says nothing of the model.
            loss = None if "task" in self._own else LOSS
            if few and _depends(self._learner, few, self._worker.device, loss, (False,)):
                warn(
                    "model: in an evaluation a sample's outputs depend on the others of its batch"
                    " (as by a batch norm without running statistics, or a mean over dimension 0),"
                    " so that metrics depend on eval_batch_size and world_size"
                )
        yield from batches

    def _look_at_curve(self, few: Batch | None, share: int) -> None:
        """Warn where the micro-batches of a worker's `share` change the curve; a collective."""
        number, layers = self._config.gradient_accumulation, self._learner.module.modules()
        depends = norms = any(one.training for one in filter(batch_norm.is_batch_norm, layers))
        if few is not None and not norms:
            about = self._learner, few, self._worker.device
            depends = _depends(*about, TRAINING, (True, False))
        # Of auto with norms the strategy reports it once it takes fewer.
        if self._worker.rank or not depends or (number == "auto" and norms):
            return
        why = "batch norms get" if norms else "the model or the loss compares"
        fewer = "fewer where memory lacks" if number == "auto" else f"{-(-share // number)}"
        warn(
            f"gradient_accumulation={number}: {why} the samples that a worker has at a time,"
            f" {fewer} and not {share}, so that the curve is not that of gradient_accumulation=1"
        )


class _Look:
    """A few samples of a batch before it is used, and the state of custom modules then."""

    def __init__(self, batch: Batch) -> None:
        self._few = _cut(batch) if can_be_cut(batch) and not batch.weightless else None
        self._watched = [Watched(one, {}) for one in changes.own_modules_and_classes().values()]

    def samples(self) -> Batch | None:
        """Return them; None where the batch can't be cut, or its use has changed the state."""
        return None if any(each.lost({}) for each in self._watched) else self._few


def _cut(batch: Batch, number: int = SAMPLES) -> Batch:
    """Return a copy of the first samples, which a step may change."""
    few = copied(part_of(batch, slice(number)))
    return few._replace(global_size=few.size)


@contextlib.contextmanager
def _looking(learner: Learner, device: torch.device) -> Iterator[None]:
    """Restore random numbers after the body, which runs without gradients and compiled code."""
    eager = torch.compiler.set_stance("force_eager") if learner.compiled else None
    with random_state.kept(device), torch.no_grad(), eager or contextlib.nullcontext():
        yield


def _copies(learner: Learner, batch: T, seed: int) -> tuple[nn.Module, Task, T]:
    """Return all that custom code may change in place, after seeding random numbers."""
    module, task, batch = copy.deepcopy((learner.module, learner.task, batch), _memo(learner))
    batch_norm.part_from_workers(module)
    random_state.seed(seed)
    return module, task, batch


def _memo(learner: Learner) -> dict[int, Any]:
    """Return copies of tensors that the last step has computed: torch refuses to copy them."""
    parts = (*learner.module.modules(), learner.task)
    kept = (one for part in parts for one in leaves(vars(part)) if not one.is_leaf)
    return {id(one): one.detach().clone() for one in kept}


def _depends(
    learner: Learner, few: Batch, device: torch.device, loss: str | None, modes: Sequence[bool]
) -> bool:
    """Return whether outputs, or a `loss`, of a few samples differ from those of the halves.

    The first of the `modes` in which nothing is drawn decides: in training, or in evaluation,
    where most code does not drop out. False where that can't be seen.
    """
    halves = in_parts(few, -(-few.size // 2))
    # A copy shares its hooks, which may count their calls.
    if len(halves) != 2 or any(vars(one)["_forward_hooks"] for one in learner.module.modules()):
        return False
    near = ABOUT_OUTPUTS if learner.precision.dtype else NEAR_OUTPUTS

    def is_near(one: Tensor, other: Tensor) -> bool:
        one, other = (each.nan_to_num(0.0, 0.0, 0.0) for each in (one, other))  # of masks
        return one.shape != other.shape or bool((one - other).abs().max() <= near * one.abs().max())

    alone = contextlib.nullcontext if loss == TRAINING else collectives.alone
    found = []
    for trains in modes:  # all of them: workers may meet there
        with contextlib.suppress(Exception), _looking(learner, device), alone():
            several = ([few], 0), ([few], 1), (halves, 2)
            found.append([_numbers(learner, *each, loss, trains) for each in several])
    for whole, again, parts in found:
        if all(map(is_near, whole, again)):
            return not all(map(is_near, whole, parts))
    return False


def _numbers(
    learner: Learner, batches: Sequence[Batch], seed: int, loss: str | None, trains: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs, one after another, and the sum of losses."""
    module, task, batches = _copies(learner, batches, seed)
    module.train(trains)
    found, total = [torch.zeros(1)], torch.zeros((), dtype=torch.float64)
    for batch in batches:
        with learner.precision.autocast():
            outputs = task.forward(module, batch)
            total += float(getattr(task, loss)(outputs, batch)[0]) if loss else 0.0
        rows = (each for each in leaves(outputs) if each.dim() and len(each) == batch.size)
        found += [each.double().flatten().cpu() for each in rows]
    return torch.cat(found), total


def _gathers(learner: Learner, batch: Batch, number: int, device: torch.device) -> bool:
    """Return whether workers exchange tensors as large as their number of samples; a collective.

    Not where integers are exchanged before, as to pad unequal shares. Samples may come in pairs.
    """
    if number < 4 or not can_be_cut(batch):
        return False
    found = list[list[tuple[int, bool]]]()
    with contextlib.suppress(Exception):  # training will raise it
        for size in (number, number - 2):
            module, task, few = _copies(learner, _cut(batch, size), 0)
            with _looking(learner, device), learner.precision.autocast(), _Exchanges() as seen:
                task.training_loss(task.forward(module.train(), few), few)
            found.append(seen.tensors)
    pairs = [*zip(*found, strict=False)] if len(found) == 2 else []
    first = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return first < len(pairs) and not any(is_integer for (_, is_integer), _ in pairs[:first])


class _Exchanges(TorchDispatchMode):
    """Notes the size of each tensor that collectives get, and whether it has integers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = list[tuple[int, bool]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.name():
            self.tensors += [(one.numel(), not one.is_floating_point()) for one in leaves(args)]
        return func(*args, **(kwargs or {}))


def check_sums(learner: Learner, batch: Batch, device: torch.device, *, warns: bool) -> bool:
    """Compare `loss` and `measure` of a few samples with those of the two halves.

    Raises ConfigError where they give means, or weights of all workers, and warns where the halves
    don't add up. Weights, the states of task and model, and random numbers stay as they were. A
    batch that can't be halved is not compared. Returns whether a sum is 0, which is not compared
    either.
    """
    if batch.weightless:
        return False
    try:
        copy.deepcopy((learner.module, learner.task), _memo(learner))
    except Exception as error:  # many classes
        if warns:
            warn(f"sums are not checked: can't copy model and task ({first_line(error)})")
        return False
    zero: list[str] | None = None
    for predicted in (False, True):  # accuracies of many classes begin at 0
        try:
            found = _sums_of_parts(learner, batch, device, predicted=predicted)
        except ExptError:
            raise
        except Exception:  # many classes: training will raise it
            return False
        names = found[0] if zero is None else zero
        zero = [name for name in names if not any(each[name][0].any() for each in found)]
        for name in names:
            if name not in zero:
                _compare(learner, name, *(each[name] for each in found), warns=warns)
        if not zero:
            return False
    return True


def _sums_of_parts(
    learner: Learner, batch: Batch, device: torch.device, *, predicted: bool
) -> list[dict[str, _Sum]]:
    """Return the sums of a few samples: as they are, on more workers, each twice, and of halves."""
    found = list[dict[str, _Sum]]()
    twice = functools.partial(mapped, _doubled, parts=ROWS)
    few = _cut(batch if batch.size > 1 else twice(batch))
    one, other = in_parts(few, -(-few.size // 2))  # raises where it can't be cut
    more = few._replace(global_size=2 * few.size)
    with _looking(learner, device), collectives.alone():
        for seed, part in enumerate([few, more, twice(few), one, other]):
            module, task, part = _copies(learner, part, seed)
            with learner.precision.autocast():
                found.append(_sums(task, module.eval(), part, predicted=predicted))
    return found


def _doubled(rows: Tensor | PerSample) -> Tensor | PerSample:
    return torch.cat((rows, rows)) if isinstance(rows, Tensor) else PerSample(2 * rows)


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
    learner: Learner,
    name: str,
    whole: _Sum,
    more: _Sum,
    twice: _Sum,
    one: _Sum,
    other: _Sum,
    *,
    warns: bool,
) -> None:
    if name in (LOSS, TRAINING):
        method = method_of(learner.task, name)
    else:
        method = f"{method_of(learner.task, 'measure')}: {name}"
    (total, weight), weights = whole, one[1] + other[1]
    sums = bool(total.any()) and torch.allclose(2 * more[0], total, rtol=NEAR)
    if sums or (weight and abs(more[1] / weight - 2) <= NEAR):
        raise ConfigError(
            f"{method} has batch.global_size in its {'sum' if sums else 'weight'}, where workers"
            " are added up; give the sum over its own samples, and their number, len(outputs)"
        )
    is_too_noisy = not torch.allclose(more[0], total, rtol=ABOUT)
    if is_too_noisy or not total.shape == one[0].shape == other[0].shape:
        return  # or no sums, which the first step refuses
    is_noisy = not torch.allclose(more[0], total, rtol=NEAR)
    near = ABOUT if is_noisy or learner.precision.dtype else NEAR
    room = near * (one[0].abs() + other[0].abs()) + 1e-9
    weighs = abs(weight - weights) <= near * abs(weights)
    off = (total - one[0] - other[0]).abs()
    if not off.isfinite().all() or (weighs and (off <= room).all()):
        return
    mean = (one[0] * one[1] + other[0] * other[1]) / (weights or 1.0)
    # Where outputs depend on the batch, a sum may equal the mean of its halves by chance.
    stays = torch.allclose(twice[0], total, rtol=near)
    if weighs and stays and ((total - mean).abs() <= room).all():
        raise ConfigError(
            f"{method} gives a mean where the sum over the batch is expected; return the sum (such"
            ' as by reduction="sum") and its weight (such as len(outputs))'
        )
    if warns and not is_noisy and name != TRAINING:  # which may compare the samples of a batch
        warn(
            f"{method} of a batch is not the sum of its parts: it depends on how samples are"
            " batched, and so on world_size and batch_size; return sums over samples, and weights"
            " (outputs [B, 1] with targets [B] would make pairs, [B, B])"
        )
