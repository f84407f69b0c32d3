"""Checks of whether results depend on how samples are batched, which pages promise they don't.

Copies of the model and the task get a few samples of a batch that was used, and parts of them. No
look is taken where using the batch has changed the state of custom modules: looks would, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.data.loading import Batch, leaves
from expt.errors import ConfigError, warn
from expt.tasks.sums import LOSS
from expt.training import batch_norm, collectives, patches
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.training.strategy import can_be_cut, in_parts
from expt.worker.copies import SAMPLES, Copies, Look, first_samples
from expt.worker.sum_check import TRAINING, check_sums

NEAR_OUTPUTS, ABOUT_OUTPUTS = 1e-3, 0.1
"""The share of the largest output by which others may differ; ABOUT in 16 bits."""


class BatchChecks:
    """The checks of a run: in the first steps of this process, and in its first evaluation."""

    def __init__(self, config: RunConfig, learner: Learner, worker: Worker) -> None:
        self._worker, self._number = worker, config.gradient_accumulation
        self._copies = Copies(learner, worker.device)
        can_copy = not config.is_sharded
        has_own_model = can_copy and isinstance(config.model, Target)
        self._has_own_task = can_copy and isinstance(config.task, Target)
        self._is_own = has_own_model or self._has_own_task
        # Gloo compares sizes, and its error is explained.
        may_hang = worker.device.type == "cuda" and worker.world_size > 1 and not config.drop_last
        # Each is done once:
        self._checks_curve = can_copy and self._number != 1
        self._checks_shares = self._is_own and may_hang
        self._checks_outputs = has_own_model and worker.rank == 0

    def of_steps(self, batches: Iterator[Batch], *, begins: bool) -> Iterator[Batch]:
        """Yield an epoch's batches, and look at samples once they were used; a collective.

        Warns where micro-batches change the curve. Where the run `begins` with this epoch, checks
        the sums of a custom task: while one is 0, which its mean is too, on batch 2, 4, 8, ...
        Raises ConfigError where NCCL would exchange unequal shares.
        """
        if self._checks_shares:
            batches = self._of_equal_shares(batches)
        checks_sums = self._has_own_task and begins
        for number, batch in enumerate(batches, 1):
            is_due = (checks_sums or self._checks_curve) and number.bit_count() == 1
            look = Look(batch) if is_due else None
            yield batch
            if look is None:
                continue
            few = look.samples()
            sizes = collectives.gather_across_workers(few.size if few else 0)
            few = few if len({*sizes}) == 1 else None  # workers may meet in a check
            if checks_sums:
                warns = self._worker.rank == 0 and number == 1
                has_zero = few is not None and check_sums(self._copies, few, warns=warns)
                checks_sums = any(collectives.gather_across_workers(has_zero))
            if self._checks_curve:
                self._checks_curve = False
                self._check_curve(few, batch)

    def _of_equal_shares(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; refuse the first of unequal shares, on which NCCL would hang."""
        for batch in batches:
            share, surplus = divmod(batch.global_size, self._worker.world_size)
            if surplus and self._checks_shares:
                self._checks_shares = False
                if _gathers(self._copies, batch, min(SAMPLES, share)):
                    raise ConfigError(
                        f"drop_last=false: {batch.global_size} samples are unequal shares of"
                        f" {self._worker.world_size} workers, and the model or the loss gathers"
                        " them; use drop_last=true"
                    )
            yield batch

    def _check_curve(self, few: Batch | None, batch: Batch) -> None:
        """Warn where the micro-batches of a worker's share change the curve; a collective."""
        layers = filter(batch_norm.is_batch_norm, self._copies.learner.module.modules())
        norms, compares = any(layer.training for layer in layers), False
        if self._is_own and few and not norms:
            compares = _halves_differ(self._copies, few, trains=True)
        number, share = self._number, -(-batch.global_size // self._worker.world_size)
        # Of auto with norms the strategy reports it once it takes fewer.
        if self._worker.rank or not (compares or (norms and number != "auto")):
            return
        why = "batch norms get" if norms else "the model or the loss compares"
        fewer = "fewer where memory lacks" if number == "auto" else f"{-(-share // number)}"
        warn(
            f"gradient_accumulation={number}: {why} the samples that a worker has at a time,"
            f" {fewer} and not {share}, so that the curve is not that of gradient_accumulation=1"
        )

    def of_evaluation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; warn after the first where outputs depend on the others of a batch."""
        if self._checks_outputs and (first := next(batches, None)) is not None:
            self._checks_outputs = False
            look, begun = Look(first), patches.collectives_begun()
            yield first
            # In a collective it would wait for the others.
            few = look.samples() if begun == patches.collectives_begun() else None
            # A custom task's loss has a check of its own, and says nothing of the model.
            has_loss = not self._has_own_task
            if few and _halves_differ(self._copies, few, trains=False, has_loss=has_loss):
                warn(
                    "model: in an evaluation a sample's outputs depend on the others of its batch"
                    " (as by a batch norm without running statistics, or a mean over dimension 0),"
                    " so that metrics depend on eval_batch_size and world_size"
                )
        yield from batches


def _halves_differ(copies: Copies, few: Batch, *, trains: bool, has_loss: bool = True) -> bool:
    """Return whether outputs, or the loss, of a few samples are seen to differ in the two halves.

    If the model draws numbers where it `trains`, its evaluation decides, in which most code does
    not drop out. Where numbers are drawn there, too, nothing can be seen.
    """
    learner, halves = copies.learner, in_parts(few, -(-few.size // 2))
    # A copy shares its hooks, which may count their calls.
    if len(halves) != 2 or any(vars(one)["_forward_hooks"] for one in learner.module.modules()):
        return False
    alone, loss = (contextlib.nullcontext, TRAINING) if trains else (collectives.alone, LOSS)
    measure = functools.partial(_numbers, copies, loss if has_loss else None)
    found = []
    for mode in (True, False) if trains else (False,):  # both: workers may meet there
        with contextlib.suppress(Exception), copies.trying(), alone():
            several = ([few], 0), ([few], 1), (halves, 2)
            found.append([measure(mode, *each) for each in several])
    near = ABOUT_OUTPUTS if learner.precision.dtype else NEAR_OUTPUTS
    for whole, again, parts in found:
        if _are_near(whole, again, near):
            return not _are_near(whole, parts, near)
    return False


def _are_near(some: Sequence[Tensor], others: Sequence[Tensor], near: float) -> bool:
    """Return whether tensors of numbers differ by no more than a share `near` of the largest."""
    for pair in zip(some, others, strict=True):
        one, other = (each.nan_to_num(0.0, 0.0, 0.0) for each in pair)  # of masks
        if one.shape == other.shape and (one - other).abs().max() > near * one.abs().max():
            return False
    return True


def _numbers(
    copies: Copies, loss: str | None, trains: bool, batches: Sequence[Batch], seed: int
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


def _gathers(copies: Copies, batch: Batch, number: int) -> bool:
    """Return whether workers exchange tensors as large as their number of samples.

    Not where integers are exchanged before, as to pad unequal shares. Samples may come in pairs.
    """
    if number < 4 or not can_be_cut(batch):
        return False
    found = list[list[tuple[int, bool]]]()
    with contextlib.suppress(Exception):  # training will raise it
        for size in (number, number - 2):
            module, task, few = copies.make(first_samples(batch, size), 0)
            with copies.trying(), _Exchanges() as seen:
                task.training_loss(task.forward(module.train(), few), few)
            found.append(seen.tensors)
        pairs = zip(*found, strict=False)
        return next((one != other for one, other in pairs if one != other or one[1]), False)
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
