"""A loss or weights that are not finite: where it began, said alike by all workers, who stop together."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from expt.config.datasets import Diabetes, Table
from expt.config.schema import RunConfig
from expt.config.tasks import Regression
from expt.data.loading import Loader
from expt.errors import Diverged
from expt.tasks.sums import Sums
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.precision import is_finite

SHOWN_INDICES = 3
MEND = "try a lower optimizer.lr or gradient_clip=1.0; on_nan=skip leaves such a step out"


def mend_of(config: RunConfig) -> str:
    """What to try; numbers of a table that are predicted as they are may be far too large for any usual rate."""
    dataset = config.dataset
    large = (
        isinstance(dataset, Table | Diabetes)
        and not dataset.standardise_targets
        and isinstance(config.task, Regression)
    )
    return MEND.replace("try ", "try dataset.standardise_targets=true, ") if large else MEND


def stop_at_loss(sums: Sums, position: Position, loader: Loader, worker: Worker, mend: str = MEND) -> None:
    """Raise Diverged with the first step, rank and samples whose loss was not finite since the last log point.

    A collective, which every worker must join.
    """
    found = sums.first_not_finite()
    mine: tuple[int, int, float, list[int]] | None = None
    if found is not None:
        ago = found[0]
        indices = loader.indices(position.epoch, position.step_in_epoch - ago - 1).tolist()
        mine = (position.step - ago, worker.rank, found[1], indices)
    everyones = [theirs for theirs in collectives.gather_across_workers(mine) if theirs is not None]
    if not everyones:
        raise Diverged(f"the loss was nan or infinite by step {position.step} (epoch {position.epoch}); {mend}")
    step, rank, loss, indices = min(everyones)
    if rank == worker.rank:
        print(f"samples of step {step}, rank {rank}: {_listed(indices, len(indices))}", file=sys.stderr)
    raise Diverged(
        f"the loss was {loss} at step {step} (epoch {position.epoch}) on rank {rank}; {mend}\n"
        f"the samples there, by their place in the training data: {_listed(indices, SHOWN_INDICES)}"
    )


@torch.no_grad()
def refuse_weights(module: nn.Module, position: Position, mend: str = MEND) -> None:
    """Raise Diverged if a parameter is not finite. Waits for the device; alike on all workers."""
    if not is_finite(p for p in module.parameters() if p.is_floating_point() or p.is_complex()):
        raise Diverged(f"the weights are not finite after step {position.step} (epoch {position.epoch}); {mend}")


def _listed(indices: Sequence[int], most: int) -> str:
    more = f" and {len(indices) - most} more, in its log" if len(indices) > most else ""
    return ", ".join(map(str, indices[:most])) + more
