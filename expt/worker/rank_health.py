"""Compare ranks: a row of numbers of each, gathered with the sums of an epoch."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expt.errors import RunFailed, listed
from expt.runs import tags
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.sharding import local

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = 48  # of a checksum: float64 holds as many exactly
UNEQUAL = (
    "gradients are not averaged, or something other than the optimizer changes parameters; let the"
    " task call model(...), not model.module, and leave requires_grad alone, or use world_size=1"
)


class Reading(NamedTuple):
    """The numbers that one rank reports after an epoch; nan is unknown."""

    step_ms: float
    """The mean time of a step, without the wait for other ranks' gradients where that is known."""
    all_reduce_share: float
    """The share of a step's time for averaging gradients, and waiting for those of others."""
    memory_mib: float
    gpu_memory_mib: float
    gpu_utilisation: float
    """Percent of the last moments in which the GPU was busy."""
    wish: float
    """1 where this rank wants pictures of the next evaluation; rank 0's counts."""
    weights: float = 0.0
    """The checksum of the parameters, if they are compared."""


NUMBERS, CHECKSUM = len(Reading._fields), Reading._fields.index("weights")


class RankHealth:
    """The readings of one rank, and after each epoch those of all."""

    def __init__(
        self, learner: Learner, position: Position, worker: Worker, *, check_weights: bool
    ) -> None:
        self._learner, self._position, self._worker = learner, position, worker
        self._check_weights = check_weights and worker.world_size > 1
        self._rounds_differently = False
        self.spent_s = 0.0
        """The seconds of all readings, without the collective, which the sums need anyway."""
        self.readings: list[Reading] = []
        """Those of every rank, of the last epoch."""
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue it."""
        self._began, self._from_step = time.perf_counter(), self._position.step
        self._all_reduce_s = self._learner.strategy.all_reduce_s

    def leave_out(self, seconds: float) -> None:
        """Leave seconds of the epoch out, in which nothing was trained."""
        self._began += seconds

    def end_epoch(self, sums: Tensor, *, wish: Callable[[], bool]) -> Tensor:
        """Return the sum of `sums` over all workers; the same collective gathers the readings."""
        device = self._worker.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the sums are waited for anyway
        now = time.perf_counter()
        steps = self._position.step - self._from_step
        waited_s = self._learner.strategy.all_reduce_s
        mine = reading(
            steps=steps,
            seconds=now - self._began,
            all_reduce_s=None if waited_s is None else waited_s - (self._all_reduce_s or 0.0),
            device=device,
            wish=wish(),
        )
        own = self._row(mine)
        self.spent_s += time.perf_counter() - now
        largest = len(self._learner.task.reductions)
        total = collectives.sum_across_workers(torch.cat([own, sums]), largest)
        rows = total[: len(own)].view(-1, NUMBERS)
        self.readings = [Reading(*numbers) for numbers in rows.tolist()]
        return total[len(own) :]

    def _row(self, mine: Reading) -> Tensor:
        """Return a table of all ranks, with zeros for others; doesn't wait for the device."""
        rank, size = self._worker.rank, self._worker.world_size
        table = torch.zeros(size, NUMBERS, dtype=torch.float64)
        table[rank] = torch.tensor(mine, dtype=torch.float64)
        table = table.to(self._worker.device)
        if self._check_weights:
            table[rank, CHECKSUM] = checksum(self._learner.module.parameters())
        return table.flatten()

    def refuse_unequal(self) -> None:
        """Raise RunFailed if the ranks have different weights; with unlike devices warn once.

        A collective, and after another one that follows when rank 0 has shown the readings.
        """
        ranks, shards = self._unequal(), self._learner.strategy.shards
        if not ranks or self._rounds_differently:
            return
        which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        first = "rank 0" if shards == 1 else "the first replica"
        where = f"after epoch {self._position.epoch} the weights of {which} differ from"
        kinds = collectives.kinds_of_devices(self._worker.device)
        if len(kinds) == 1:
            raise RunFailed(f"{where} those of {first}: {UNEQUAL}")
        self._rounds_differently = True
        why = f"{listed(sorted(kinds))} may round differently"
        self._worker.warn(f"{where} those of {first}: {why}; if not by that, {UNEQUAL}")

    def _unequal(self) -> list[int]:
        """Return the ranks whose weights differ from those of the first replica."""
        weights, shards = [one.weights for one in self.readings], self._learner.strategy.shards
        return [rank for rank, one in enumerate(weights) if one != weights[rank % shards]]

    def scalars(self) -> dict[str, float]:
        """Return the curves of the readings for TensorBoard."""
        found = self.readings
        values = {tags.WORKER_MIB: max(one.memory_mib for one in found)}
        if not math.isnan(found[0].gpu_memory_mib):
            values[tags.GPU_MIB] = max(one.gpu_memory_mib for one in found)
        if not math.isnan(found[0].gpu_utilisation):
            values["ranks/gpu_utilisation"] = statistics.fmean(one.gpu_utilisation for one in found)
        if len(found) > 1:
            steps_ms = [one.step_ms for one in found]
            values |= {
                "ranks/step_ms_min": min(steps_ms),
                "ranks/step_ms_median": statistics.median(steps_ms),
                "ranks/step_ms_max": max(steps_ms),
                "ranks/unequal_weights": float(len(self._unequal())),
            }
            share = statistics.fmean(one.all_reduce_share for one in found)
            if not math.isnan(share):
                values["ranks/all_reduce_share"] = share
        return values


def reading(
    *, steps: int, seconds: float, all_reduce_s: float | None, device: torch.device, wish: bool
) -> Reading:
    """Return this rank's reading, without a checksum; None of `all_reduce_s` is unknown."""
    waited_s = min(max(all_reduce_s or 0.0, 0.0), seconds)  # estimated from few steps
    on_gpu = device.type == "cuda"
    return Reading(
        step_ms=(seconds - waited_s) / max(1, steps) * 1000,
        all_reduce_share=waited_s / seconds if all_reduce_s is not None and seconds else math.nan,
        memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # Linux counts in KiB
        gpu_memory_mib=torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else math.nan,
        gpu_utilisation=_utilisation(device) if on_gpu else math.nan,
        wish=float(wish),
    )


def _utilisation(device: torch.device) -> float:
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # NVML has no number for a slice of a GPU, and some drivers have none
        return math.nan


@torch.no_grad()
def checksum(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return a checksum of the parameters' bits, as float64; doesn't wait for the device."""
    total: Tensor | None = None
    for parameter in parameters:
        own = local(parameter)
        values = torch.view_as_real(own) if own.is_complex() else own
        part = values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
        # Each has another weight, so that a swap of two is noticed; the product wraps around.
        total = part if total is None else total * 1_000_003 + part
    return torch.zeros(()).double() if total is None else (total & ((1 << _BITS) - 1)).double()
