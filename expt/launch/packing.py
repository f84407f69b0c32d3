"""Which waiting run starts next, and on which devices: list scheduling with backfill.

Larger runs come first; devices that are left go to the first that fits. The first run that does not
fit keeps a claim on as many devices as it needs, busy ones before idle ones: smaller runs may use
the idle ones meanwhile, but nothing new starts on a claimed device, so no run starves.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from expt.config.groups import planned_steps
from expt.config.identity import LENGTH, digest
from expt.config.length import effective, resumable
from expt.config.schema import RunConfig
from expt.errors import DeviceFull, DeviceLost, OutOfMemory, RunFailed
from expt.gpus import setting
from expt.launch.job import QUEUED, Job
from expt.machine import Machine
from expt.runs.result import COMPLETED, RUNNING, read_result

LEFT_ALONE_S = 300.0
"""How long a GPU that has failed a run is left alone, while others are in use."""


@dataclass(frozen=True)
class Demand:
    """The devices that a run needs: a number of them, or certain ones."""

    run: int
    count: int
    devices: tuple[str, ...] | None = None
    avoided: frozenset[str] = frozenset()
    """Those that have failed it."""
    batch_size: int = 1
    """The samples that its workers share."""

    def fit(self, free: Iterable[str]) -> tuple[str, ...] | None:
        """Return the devices for the run, out of the free ones; None if they don't suffice."""
        able = [device for device in free if device not in self.avoided]
        wanted = self.devices or tuple(able[: self.count])
        return wanted if len(wanted) == self.count and {*wanted} <= {*able} else None


def demand_of(run: int, config: RunConfig, machine: Machine) -> Demand:
    """Return the demand of a run: GPUs, or cores of the machine where it uses none."""
    if not config.num_gpus:
        return Demand(run, min(config.world_size * config.threads, machine.cpus))
    named = None if isinstance(config.gpus, int) else config.gpus
    devices = None if named is None else tuple(machine.gpus[index] for index in named)
    return Demand(run, config.num_gpus, devices, batch_size=config.batch_size)


class Packing:
    """The devices of a machine, each shared by up to `share` runs, and the waiting runs."""

    def __init__(
        self, devices: Sequence[str], *, share: int = 1, max_concurrent: int | None = None
    ) -> None:
        self.devices = list(devices)
        """Those on which runs may start, in the machine's order."""
        self._share = share
        self._max_concurrent = max_concurrent
        self.waiting: list[Demand] = []
        """The runs that have not started, in the order in which they may."""
        self.running: dict[int, tuple[str, ...]] = {}
        """The devices of each run under way, in the order of their starts."""
        self._unavailable: dict[str, float] = {}
        self._left_alone: dict[str, float] = {}
        self._failed: dict[str, set[int]] = {}
        self._claim: tuple[Demand, frozenset[str]] | None = None

    def add(self, demands: Iterable[Demand]) -> None:
        """Add runs that wait; see `pop_impossible`."""
        for demand in demands:
            bisect.insort(self.waiting, demand, key=lambda waiting: (-waiting.count, waiting.run))

    @property
    def num_free(self) -> int:
        """Devices on which a run could start now, as far as is known."""
        load = self._load()
        return sum(load[device] < self._share for device in self.devices)

    def start_next(self, *, elsewhere: int = 0) -> tuple[int, tuple[str, ...]] | None:
        """Take the next run that can start now, and its devices; None if none can.

        `elsewhere` is how many runs of other schedules count towards `max_concurrent`.
        """
        most = self._max_concurrent
        if not self.waiting or (most is not None and len(self.running) + elsewhere >= most):
            return None
        load = self._load()
        # The least loaded first, those that have failed runs last, else in the machine's order.
        free = sorted(
            (device for device in self.devices if load[device] < self._share),
            key=lambda name: (name in self._left_alone, load[name]),
        )
        if not free:
            return None
        if self._claim and (devices := self._claim[0].fit(free)):
            return self._take(self._claim[0], devices)
        unclaimed = self._unclaimed(free)
        for demand in self.waiting:
            if not unclaimed:
                break
            if devices := demand.fit(unclaimed):
                return self._take(demand, devices)
            if self._claim is None:
                self._claim = demand, self._devices_to_claim(demand, load)
                unclaimed = self._unclaimed(free)
        return None

    def end(self, run: int) -> None:
        """Give back the devices of a run."""
        del self.running[run]

    def blame(self, run: int, devices: Iterable[str]) -> None:
        """Start no more runs on devices that have failed this one and another."""
        for device in devices:
            self._failed.setdefault(device, set()).add(run)
            if len(self._failed[device]) > 1 and device in self.devices:
                self.devices.remove(device)
                self._claim = None  # it may be of this one

    def close(self, devices: Iterable[str], *, until: float, while_busy: bool = False) -> None:
        """Start no runs on these until then; `while_busy`, only while others are in use."""
        closed = self._left_alone if while_busy else self._unavailable
        closed |= dict.fromkeys(devices, until)
        self._claim = None  # it may be of one of these

    def pop_impossible(self) -> Demand | None:
        """Take out a waiting run that can never start, since too few devices are left."""
        found = next((each for each in self.waiting if each.fit(self.devices) is None), None)
        if found is not None:
            self.waiting.remove(found)
            self._claim = None
        return found

    def release_unavailable(self, now: float) -> None:
        """Count devices as idle again whose time may be over."""
        for closed in (self._unavailable, self._left_alone):
            for device in [device for device, until in closed.items() if until <= now]:
                del closed[device]

    def drop_waiting(self) -> None:
        """Drop the runs that wait."""
        self.waiting, self._claim = [], None

    def _take(self, demand: Demand, devices: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        self.waiting.remove(demand)
        self.running[demand.run] = devices
        if self._claim and self._claim[0] == demand:
            self._claim = None
        return demand.run, devices

    def _unclaimed(self, free: Sequence[str]) -> list[str]:
        return [device for device in free if not self._claim or device not in self._claim[1]]

    def _devices_to_claim(self, demand: Demand, load: Mapping[str, int]) -> frozenset[str]:
        if demand.devices is not None:
            return frozenset(demand.devices)
        # Those of the longest-running runs come first: they should be free the soonest. Nobody
        # knows when another command gives up the devices that it holds: those come last.
        running = itertools.chain(*self.running.values())
        busy = [device for device in running if load[device] >= self._share]
        last = {**self._unavailable, **self._left_alone}
        idle = [device for device in self.devices if device not in {*busy, *last}]
        able = {*self.devices} - demand.avoided
        in_order = [each for each in dict.fromkeys((*busy, *idle, *last)) if each in able]
        return frozenset(in_order[: demand.count])

    def _load(self) -> Counter[str]:
        load = Counter(itertools.chain(*self.running.values()))
        load.update(dict.fromkeys(self._unavailable, self._share))
        if self.running:
            load.update(dict.fromkeys(self._left_alone.keys() - self._unavailable, self._share))
        return load


class FaultyGpus:
    """The GPUs that have failed runs of this command."""

    def __init__(self, packing: Packing) -> None:
        self._packing, self._every = packing, tuple(packing.devices)
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
        size, tried = demand.batch_size, range(min(most, len(able)), 0, -1)
        few = next((number for number in tried if number == most or not size % number), 0)
        chosen = sorted(map(self._every.index, able[:few]))
        fix = f"use {setting(chosen)}" if chosen else "`expt doctor` says more"
        of = f"{len(wanted)} named" if demand.devices else len(wanted)
        left = len({*able} & {*wanted})
        have = "has" if left == 1 else "have"
        text = f"{most} of {of} GPUs needed, {left} {have} not failed; {fix}"
        faults = {gpu: self._faults[gpu] for gpu in wanted if gpu in {*self._faults} - {*able}}
        return DeviceLost("\n".join((text, *faults.values())), gpus=faults)


class EqualRuns:
    """The jobs of one command, in groups that differ by their length only, and may be equally long.

    The number of steps is known once the first of them has its data; the first is trained, and the
    others begin from its last checkpoint, with nothing left to train.
    """

    def __init__(self) -> None:
        self._alike = defaultdict[str, list[Job]](list)
        self._steps_per_epoch: dict[str, int] = {}
        """Known once a run of the group has its data; 0 where samples are not counted."""
        self.waiting: dict[Job, str] = {}
        """The jobs that wait, each with the key of its group."""

    def hold(self, job: Job) -> bool:
        """Return whether a job is to wait for an earlier one; it is `released` then."""
        request = job.asked
        is_plain = request.config.fork is None and request.config.resume in (None, "auto")
        if job.is_trial or request.instead or not is_plain:
            return False
        but = (*LENGTH, *resumable())
        key = digest(request.config, request.identity.content, but=but)
        self._alike[key].append(job)
        if next(self._earlier(key, job), None) is not None:
            self.waiting[job] = key
        return job in self.waiting

    def released(self) -> Iterator[Job]:
        """Yield the jobs that wait no longer."""
        for key in {*self.waiting.values()} - self._steps_per_epoch.keys():
            known = map(_steps_per_epoch, self._alike[key])
            if (steps := next((one for one in known if one is not None), None)) is not None:
                self._steps_per_epoch[key] = steps
        for job, key in list(self.waiting.items()):
            first = next(self._earlier(key, job), None)
            if first is None or first.status == COMPLETED:
                del self.waiting[job]
                if first and first.paths.last.exists():
                    job.request = dataclasses.replace(job.asked, shorter=first.paths.folder)
                yield job

    def _earlier(self, key: str, job: Job) -> Iterator[Job]:
        """Yield the earlier jobs that are, or may turn out to be, as long as this one."""
        steps, mine = self._steps_per_epoch.get(key), job.asked.identity
        for one in itertools.takewhile(lambda one: one is not job, self._alike[key]):
            if steps is None:
                may_equal = one.status in (QUEUED, RUNNING)
            else:
                may_equal = _length(one, steps) == _length(job, steps)
                may_equal &= one.status in (QUEUED, RUNNING, COMPLETED)
            if may_equal and one.asked.identity != mine:  # else it is the same run
                yield one


def _steps_per_epoch(job: Job) -> int | None:
    if not (job.trains or job.status == COMPLETED):
        return None
    record = read_result(job.paths)
    return 0 if record.get("data", {}).get("is_uncounted") else record.get("steps_per_epoch")


def _length(job: Job, steps_per_epoch: int) -> tuple[Any, ...]:
    config = job.asked.config
    steps_per_epoch = steps_per_epoch or config.steps_of_uncounted or 1
    total = config.total_steps(steps_per_epoch)
    plan = planned_steps(config.scheduler, steps_per_epoch=steps_per_epoch, total_steps=total)
    counts = effective(config, steps_per_epoch)
    return total, plan, config.max_minutes, counts, getattr(config.scheduler, "kwargs", None)


class GpuLocks:
    """A file lock for each GPU in use, so that two commands do not take the same.

    It ends with its holder. `uuid_of` a device is its name for all commands, whatever number it has
    in each.
    """

    def __init__(self, uuid_of: Callable[[str], str] = str) -> None:
        self._uuid_of = functools.cache(uuid_of)
        self._folder = Path(os.environ.get("EXPT_LOCKS", Path(tempfile.gettempdir()) / "expt-gpus"))
        self._held: dict[str, FileLock] = {}

    def acquire(self, devices: Sequence[str]) -> list[str]:
        """Lock all of `devices`, or none; return those that another command holds."""
        new = [device for device in devices if device not in self._held]
        missed = [device for device in new if not self._try(device)]
        if missed:
            self.release([device for device in new if device not in missed])
        return missed

    def release(self, devices: Sequence[str]) -> None:
        """Let other commands have `devices`."""
        for device in devices:
            self._held.pop(device).release()

    def _try(self, device: str) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            self._folder.chmod(0o777)  # other people's commands on this machine take part
        lock = FileLock(self._folder / f"{self._uuid_of(device)}.lock", timeout=0, mode=0o666)
        try:
            lock.acquire()
        except Timeout:
            return False
        self._held[device] = lock
        return True
