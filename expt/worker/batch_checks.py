"""Checks of whether results depend on how samples are batched, which pages promise they don't.

Copies of the model and the task get a few samples of a batch that was used, and parts of them. No
look is taken where using the batch has changed the state of custom modules: looks would, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.data.loading import ROWS, Batch, PerSample, leaves, mapped
from expt.errors import ConfigError, ExptError, first_line, warn
from expt.tasks.checks import method_of
from expt.tasks.sums import LOSS
from expt.tasks.task import Task
from expt.training import batch_norm, collectives, patches
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.training.strategy import can_be_cut, in_parts
from expt.worker.copies import SAMPLES, Copies, Look, first_samples

NEAR, ABOUT = 0.01, 0.2
"""The share by which a sum may differ from that of its halves; ABOUT with noise, or in 16 bits."""
NEAR_OUTPUTS, ABOUT_OUTPUTS = 1e-3, 0.1
"""The share of the largest output by which others may differ; ABOUT in 16 bits."""
TRAINING = "training_loss"


class BatchChecks:
    """The checks of a run: in the first steps of this process, and in its first evaluation."""

    def __init__(self, config: RunConfig, learner: Learner, worker: Worker) -> None:
        self._worker = worker
        copies, can_copy = Copies(learner, worker.device), not config.is_sharded
        has_own_model = can_copy and isinstance(config.model, Target)
        has_own_task = can_copy and isinstance(config.task, Target)
        is_own = has_own_model or has_own_task
        self._sums = SumCheck(copies) if has_own_task else None
        cuts = can_copy and config.gradient_accumulation != 1
        self._curve = _CurveCheck(config, copies, worker, is_own=is_own) if cuts else None
        # Gloo compares sizes, and its error is explained.
        may_hang = worker.device.type == "cuda" and worker.world_size > 1 and not config.drop_last
        self._shares = _ShareCheck(copies, worker) if is_own and may_hang else None
        # A custom task's loss has a check of its own, and says nothing of the model.
        loss = None if has_own_task else LOSS
        looks = has_own_model and worker.rank == 0
        self._outputs = _OutputCheck(copies, loss) if looks else None

    def of_steps(self, batches: Iterator[Batch], *, begins: bool) -> Iterator[Batch]:
        """Yield an epoch's batches, and look at samples once they were used; a collective.

        Warns where micro-batches change the curve. Where the run `begins` with this epoch, checks
        the sums of a custom task: while one is 0, which its mean is too, on batch 2, 4, 8, ...
        Raises ConfigError where NCCL would exchange unequal shares.
        """
        if self._shares is not None:
            batches = self._shares.of_steps(batches)
        sums, number = self._sums if begins else None, 0
        while (sums or self._curve) and (batch := next(batches, None)) is not None:
            number += 1
            if number & (number - 1):
                yield batch
                continue
            look = Look(batch)
            yield batch
            few = _of_all_workers(look.samples())
            if sums is not None:
                warns = self._worker.rank == 0 and number == 1
                has_zero = few is not None and sums.check(few, warns=warns)
                if not any(collectives.gather_across_workers(has_zero)):
                    sums = None
            if self._curve is not None:
                self._curve.check(few, batch)
                self._curve = None
        yield from batches

    def of_evaluation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, and warn where a sample's outputs depend on others of its batch."""
        outputs, self._outputs = self._outputs, None
        return batches if outputs is None else outputs.of_evaluation(batches)


def _of_all_workers(few: Batch | None) -> Batch | None:
    """Return a worker's samples if all have as many: those that meet in a look are all there."""
    sizes = {*collectives.gather_across_workers(few.size if few else 0)}
    return few if len(sizes) == 1 else None


class _CurveCheck:
    """The check of whether micro-batches change the curve."""

    def __init__(self, config: RunConfig, copies: Copies, worker: Worker, *, is_own: bool) -> None:
        self._number, self._copies, self._worker = config.gradient_accumulation, copies, worker
        self._is_own = is_own

    def check(self, few: Batch | None, batch: Batch) -> None:
        """Warn where the micro-batches of a worker's share of a batch do; a collective."""
        layers = filter(batch_norm.is_batch_norm, self._copies.learner.module.modules())
        norms = any(layer.training for layer in layers)
        depends = norms
        if few is not None and self._is_own and not norms:
            depends = _depends(self._copies, few, TRAINING, (True, False))
        number, share = self._number, -(-batch.global_size // self._worker.world_size)
        # Of auto with norms the strategy reports it once it takes fewer.
        if self._worker.rank or not depends or (number == "auto" and norms):
            return
        why = "batch norms get" if norms else "the model or the loss compares"
        fewer = "fewer where memory lacks" if number == "auto" else f"{-(-share // number)}"
        warn(
            f"gradient_accumulation={number}: {why} the samples that a worker has at a time,"
            f" {fewer} and not {share}, so that the curve is not that of gradient_accumulation=1"
        )


class _OutputCheck:
    """The check of whether outputs of a custom model depend on the others of their batch."""

    def __init__(self, copies: Copies, loss: str | None) -> None:
        self._copies, self._loss = copies, loss

    def of_evaluation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, and warn after the first where they do."""
        if (first := next(batches, None)) is not None:
            look, begun = Look(first), patches.collectives_begun()
            yield first
            # In a collective it would wait for the others.
            few = look.samples() if begun == patches.collectives_begun() else None
            if few and _depends(self._copies, few, self._loss, (False,)):
                warn(
                    "model: in an evaluation a sample's outputs depend on the others of its batch"
                    " (as by a batch norm without running statistics, or a mean over dimension 0),"
                    " so that metrics depend on eval_batch_size and world_size"
                )
        yield from batches


def _depends(copies: Copies, few: Batch, loss: str | None, modes: Sequence[bool]) -> bool:
    """Return whether outputs, or a `loss`, of a few samples differ from those of the halves.

    The first of the `modes` in which nothing is drawn decides: in training, or in evaluation,
    where most code does not drop out. False where that can't be seen.
    """
    learner, halves = copies.learner, in_parts(few, -(-few.size // 2))
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
        with contextlib.suppress(Exception), copies.trying(), alone():
            several = ([few], 0), ([few], 1), (halves, 2)
            found.append([_numbers(copies, *each, loss, trains) for each in several])
    for whole, again, parts in found:
        if all(map(is_near, whole, again)):
            return not all(map(is_near, whole, parts))
    return False


def _numbers(
    copies: Copies, batches: Sequence[Batch], seed: int, loss: str | None, trains: bool
) -> tuple[Tensor, Tensor]:
    """Return each of the outputs, of all batches, one after another, and the sum of losses."""
    module, task, batches = copies.make(batches, seed)
    module.train(trains)
    found, total = list[list[Tensor]](), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        outputs = task.forward(module, batch)
        total += float(getattr(task, loss)(outputs, batch)[0]) if loss else 0.0
        rows = (each for each in leaves(outputs) if each.dim() and len(each) == batch.size)
        found.append([each.double().flatten().cpu() for each in rows])
    return torch.cat([torch.zeros(1), *itertools.chain(*zip(*found, strict=True))]), total


class _ShareCheck:
    """The check of whether workers would exchange unequal shares, on which NCCL hangs."""

    def __init__(self, copies: Copies, worker: Worker) -> None:
        self._copies, self._worker, self._is_left = copies, worker, True

    def of_steps(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; raise ConfigError before the first of unequal shares; a collective."""
        for batch in batches:
            share, surplus = divmod(batch.global_size, self._worker.world_size)
            if self._is_left and surplus:
                self._is_left = False
                if self._gathers(batch, min(SAMPLES, share)):
                    raise ConfigError(
                        f"drop_last=false: {batch.global_size} samples are unequal shares of"
                        f" {self._worker.world_size} workers, and the model or the loss gathers"
                        " them; use drop_last=true"
                    )
            yield batch

    def _gathers(self, batch: Batch, number: int) -> bool:
        """Return whether workers exchange tensors as large as their number of samples.

        Not where integers are exchanged before, as to pad unequal shares. Samples may come in
        pairs.
        """
        if number < 4 or not can_be_cut(batch):
            return False
        found = list[list[tuple[int, bool]]]()
        with contextlib.suppress(Exception):  # training will raise it
            for size in (number, number - 2):
                module, task, few = self._copies.make(first_samples(batch, size), 0)
                with self._copies.trying(), _Exchanges() as seen:
                    task.training_loss(task.forward(module.train(), few), few)
                found.append(seen.tensors)
        if len(found) < 2:
            return False
        for one, other in zip(found[0], found[1], strict=False):
            _, is_integer = one
            if one != other or is_integer:
                return one != other
        return False


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


class SumCheck:
    """The check of whether `loss` and `measure` of a custom task give sums over samples."""

    def __init__(self, copies: Copies) -> None:
        self._copies, self._learner = copies, copies.learner

    def check(self, batch: Batch, *, warns: bool) -> bool:
        """Compare the sums of a few samples with those of the two halves.

        Raises ConfigError where they are means, or weights of all workers, and warns where the
        halves don't add up. Weights, the states of task and model, and random numbers stay as they
        were. A batch that can't be halved is not compared. Returns whether a sum is 0, which is
        not compared either.
        """
        if batch.weightless:
            return False
        try:
            with self._copies.trying():
                self._copies.make(None, seed=0)
        except Exception as error:  # many classes
            if warns:
                warn(f"sums are not checked: can't copy model and task ({first_line(error)})")
            return False
        compared = set[str]()
        for predicted in (False, True):  # accuracies of many classes begin at 0
            try:
                found = self._found(batch, predicted=predicted)
            except ExptError:
                raise
            except Exception:  # many classes: training will raise it
                return False
            for name, sums in found.items():
                if name not in compared and not sums.are_zero:
                    self._compare(name, sums, warns=warns)
                    compared.add(name)
            if compared >= found.keys():
                return False
        return True

    def _found(self, batch: Batch, *, predicted: bool) -> dict[str, _Sums]:
        """Return each sum by its name."""
        found = list[dict[str, _Sum]]()
        twice = functools.partial(mapped, _doubled, parts=ROWS)
        few = first_samples(batch if batch.size > 1 else twice(batch))
        one, other = in_parts(few, -(-few.size // 2))  # raises where it can't be cut
        shared = few._replace(global_size=2 * few.size)
        with self._copies.trying(), collectives.alone():
            for seed, part in enumerate([few, shared, twice(few), one, other]):
                module, task, part = self._copies.make(part, seed)
                found.append(_sums(task, module.eval(), part, predicted=predicted))
        return {name: _Sums(*(each[name] for each in found)) for name in found[0]}

    def _compare(self, name: str, sums: _Sums, *, warns: bool) -> None:
        task = self._learner.task
        method = f"{method_of(task, 'measure')}: {name}"
        if name in (LOSS, TRAINING):
            method = method_of(task, name)
        (total, weight), shared = sums.whole, sums.shared
        is_divided = bool(total.any()) and torch.allclose(2 * shared.total, total, rtol=NEAR)
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
        near = ABOUT if is_noisy or self._learner.precision.dtype else NEAR
        room = near * (one.abs() + other.abs()) + 1e-9
        weights = sums.one.weight + sums.other.weight
        weighs = abs(weight - weights) <= near * abs(weights)
        off = (total - one - other).abs()
        if not off.isfinite().all() or (weighs and (off <= room).all()):
            return
        mean = (one * sums.one.weight + other * sums.other.weight) / (weights or 1.0)
        # Where outputs depend on the batch, a sum may equal the mean of its halves by chance.
        stays = torch.allclose(sums.twice.total, total, rtol=near)
        if weighs and stays and ((total - mean).abs() <= room).all():
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
        name: _Sum(total.detach().double().reshape(-1).cpu(), float(weight))
        for name, (total, weight) in found.items()
    }
