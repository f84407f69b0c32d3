"""A loss or weights that are not finite: where it began, said alike by all workers, who stop
together.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import torch
from torch import nn

from expt.config.schema import RunConfig
from expt.data.loading import Loader, named_leaves
from expt.data.samples import IterableLoader
from expt.errors import DataError, Diverged
from expt.tasks.sums import Sums
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.precision import is_finite

SHOWN_INDICES = 3
MEND = "try a lower optimizer.lr or gradient_clip=1.0; on_nan=skip leaves such a step out"


def mend_of(config: RunConfig) -> str:
    """What to try; numbers of a table that are predicted as they are may be far too large for any
    usual rate.
    """
    dataset = config.dataset
    large = (
        dataset.has_rows and not dataset.standardise_targets and config.task.TARGETS == "numbers"
    )
    return MEND.replace("try ", "try dataset.standardise_targets=true, ") if large else MEND


def stop_at_loss(
    sums: Sums, position: Position, loader: Loader, worker: Worker, mend: str = MEND
) -> None:
    """Raise Diverged with the first step, rank and samples whose loss was not finite since the last
    log point.

    DataError where it is the samples that are not. A collective, which every worker must join.
    """
    found = sums.first_not_finite()
    mine: tuple[int, int, float, list[int], str] | None = None
    if found is not None:
        ago = found[0]
        number = position.step_in_epoch - ago - 1
        indices = loader.indices(position.epoch, number).tolist()
        mine = (
            position.step - ago,
            worker.rank,
            found[1],
            indices,
            _bad_samples(loader, position.epoch, number),
        )
    everyones = [theirs for theirs in collectives.gather_across_workers(mine) if theirs is not None]
    if not everyones:
        raise Diverged(
            f"the loss was nan or infinite by step {position.step} (epoch {position.epoch}); {mend}"
        )
    step, rank, loss, indices, bad = min(everyones)
    if bad:
        raise DataError(
            f"the loss was {loss} at step {step} (epoch {position.epoch}) on rank {rank}, for"
            f" {bad}; mend it, or leave such samples out"
        )
    if rank == worker.rank:
        print(
            f"samples of step {step}, rank {rank}: {_listed(indices, len(indices))}",
            file=sys.stderr,
        )
    raise Diverged(
        f"the loss was {loss} at step {step} (epoch {position.epoch}) on rank {rank}; {mend}\n"
        f"the samples there, by their place in the training data: {_listed(indices, SHOWN_INDICES)}"
    )


def _bad_samples(loader: Loader, epoch: int, number: int) -> str:
    """Which of this worker's samples in an epoch's batch are not finite, and where; empty where
    that is no news.

    A model may know what to make of nan, as of a target that nobody knows: then the batch before
    has some, too."""
    if isinstance(loader, IterableLoader):  # which would have to be read from its beginning
        return ""
    with contextlib.suppress(Exception):  # what is read once more, only to say more
        usual = _not_finite(loader, epoch, number - 1) if number else {}
        found = _not_finite(loader, epoch, number)
        return next((told for name, told in found.items() if name not in usual), "")
    return ""


@torch.no_grad()
def _not_finite(loader: Loader, epoch: int, number: int) -> dict[str, str]:
    """By its name each tensor of the batch that holds what is not finite, and in words where it
    does.
    """
    batch, indices = next(loader.epoch(epoch, skip=number)), loader.indices(epoch, number)
    told = {}
    for name, tensor in (
        *named_leaves(batch.inputs, "inputs"),
        *named_leaves(batch.targets, "targets"),
    ):
        if tensor.dtype.is_floating_point and len(bad := (~tensor.isfinite()).nonzero()):
            rows = [int(indices[row]) for row in bad[:, 0].unique().tolist()]
            column = f", column {int(bad[0, 1])}," if tensor.dim() == 2 else ""
            samples = (
                f"the training sample{'s' if len(rows) > 1 else ''}"
                f" {_listed(rows, SHOWN_INDICES, '')}"
            )
            told[name] = (
                f"{name}{column} of {samples} hold{'s' * bool(column)}"
                f" {tensor[tuple(bad[0])].item()}"
            )
    return told


@torch.no_grad()
def refuse_weights(module: nn.Module, position: Position, mend: str = MEND) -> None:
    """Raise Diverged if a parameter is not finite. Waits for the device; alike on all workers."""
    if not is_finite(p for p in module.parameters() if p.is_floating_point() or p.is_complex()):
        raise Diverged(
            f"the weights are not finite after step {position.step} (epoch {position.epoch});"
            f" {mend}"
        )


def _listed(indices: Sequence[int], most: int, where: str = ", in its log") -> str:
    more = f" and {len(indices) - most} more{where}" if len(indices) > most else ""
    return ", ".join(map(str, indices[:most])) + more
