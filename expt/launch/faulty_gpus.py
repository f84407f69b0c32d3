"""GPUs that fail runs before their first step, and the others on which such runs start again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator

from expt.errors import DeviceFull, DeviceLost, OutOfMemory, RunFailed
from expt.gpus import setting
from expt.launch.packing import Demand, Packing

LEFT_ALONE_S = 300.0
"""How long a GPU that has failed a run is left alone, while others are in use."""


class FaultyGpus:
    """The GPUs that have failed runs of this command; `batch_size_of` a run is by its number."""

    def __init__(self, packing: Packing, batch_size_of: Callable[[int], int]) -> None:
        self._packing, self._batch_size_of = packing, batch_size_of
        self._every = tuple(packing.devices)
        self._faults = dict[str, str]()

    def elsewhere(
        self, demand: Demand, error: RunFailed, works: Collection[str], now: float
    ) -> Demand:
        """Return the demand of a run that GPUs have failed before its first step, without them.

        A GPU that `works` for another run is not to blame, and neither of two that fail the run in
        the same way. Raises the error of a run that cannot start elsewhere.
        """
        packing = self._packing
        gpus = {gpu: fault for gpu, fault in error.gpus.items() if gpu not in works}
        if not gpus:  # runs of this command share it
            raise OutOfMemory(str(error)) if isinstance(error, DeviceFull) else error
        if type(error) is RunFailed and demand.avoided:
            packing.close(demand.avoided, until=now, while_busy=True)
            raise error
        self._faults |= gpus
        if type(error) is DeviceLost:
            packing.blame(demand.run, gpus)
        demand = dataclasses.replace(demand, avoided=demand.avoided | {*gpus})
        if demand.fit(packing.devices) is None:
            raise error if type(error) is RunFailed else self._too_few(demand)
        packing.close(gpus, until=now + LEFT_ALONE_S, while_busy=True)
        return demand

    def stranded(self) -> Iterator[tuple[int, DeviceLost]]:
        """Take out each waiting run that can never start, since too few GPUs are left, and why."""
        while self._faults and (demand := self._packing.pop_impossible()):
            yield demand.run, self._too_few(demand)

    def _too_few(self, demand: Demand) -> DeviceLost:
        """Return the error of a run that needs more GPUs than are left for it, or others."""
        wanted, most = demand.devices or self._every, demand.count
        able = [gpu for gpu in self._every if gpu in {*self._packing.devices} - demand.avoided]
        able.sort(key=lambda gpu: gpu not in wanted)
        # With fewer, those among which the batch can be divided.
        size, tried = self._batch_size_of(demand.run), range(min(most, len(able)), 0, -1)
        few = next((number for number in tried if number == most or not size % number), 0)
        chosen = sorted(map(self._every.index, able[:few]))
        fix = f"use {setting(chosen)}" if chosen else "`expt doctor` says more"
        of = f"{len(wanted)} named" if demand.devices else len(wanted)
        left = len({*able} & {*wanted})
        have = "has" if left == 1 else "have"
        text = f"{most} of {of} GPUs needed, {left} {have} not failed; {fix}"
        faults = {gpu: self._faults[gpu] for gpu in wanted if gpu in {*self._faults} - {*able}}
        return DeviceLost("\n".join((text, *faults.values())), gpus=faults)
