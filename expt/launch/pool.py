"""Many runs on one machine: each starts when its devices are free, one loop watches them all."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, ClassVar

from expt import errors, signals
from expt.config.schema import RunConfig
from expt.data.fingerprint import refuse_changed
from expt.errors import DataError, DeviceLost, ExptError, FolderInUse, Interrupted, RunFailed
from expt.gpus import gpu_uuid, setting
from expt.launch import processes
from expt.launch.equal_runs import EqualRuns
from expt.launch.job import QUEUED, DataCheck, Job, Observer, has_reached, prepare
from expt.launch.packing import Demand, GpuLocks, Packing, demand_of
from expt.launch.workers import Workers
from expt.launch.workers import start as start_workers
from expt.machine import Machine
from expt.runs.attempt import Attempt, record_end, take_back
from expt.runs.checkpoint_file import FULL, not_written
from expt.runs.paths import PATIENCE_S, FolderLock, is_held
from expt.runs.result import COMPLETED, FAILED, PRUNED, RUNNING, read_result

POLL_S = 0.02
LEFT_ALONE_S = 300.0
"""How long a GPU that has failed a run is left alone, while others are in use."""
LOCKED_ELSEWHERE_S = 1.0
"""How long a device that another command holds is left alone before it is tried again."""
LEAST = {
    "max_concurrent": 1, "runs_per_gpu": 1, "retries": 0, "stagger_s": 0,
    # On a cluster:
    "nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 1, "timeout_min": 1,
    "max_num_timeout": 0, "signal_delay_s": 0, "array_parallelism": 1,
}  # fmt: skip
"""The least value of each key of `hydra.launcher`."""


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """How a pool uses its machine; see hydra_plugins/expt_pool_launcher.py."""

    max_concurrent: int | None = None
    runs_per_gpu: int = 1
    fail_fast: bool = False
    retries: int = 0
    stagger_s: float = 0.0


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of a launcher by which nothing would ever start."""
    for key, least in LEAST.items():
        value = options.get(key)
        if value is not None and not (isinstance(value, int | float) and value >= least):
            raise errors.ConfigError(
                f"hydra.launcher.{key}={value}: is not possible; give a number of at least {least}"
            )


class Pool:
    """The devices of a machine, on which jobs run to their ends.

    A job whose folder is locked by another command is refused, or with `waits_for_folders` waits
    for the lock, so that a search does not continue with other trials.
    """

    batch: ClassVar[int | None] = None
    """Trials of a search that are chosen together; None: each when there is room for it."""

    def __init__(
        self,
        machine: Machine,
        options: PoolOptions,
        observer: Observer,
        *,
        waits_for_folders: bool = False,
        start: Callable[[Attempt], Workers] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._options, self._observer = machine, options, observer
        self._start_workers = start or start_workers
        self._waits_for_folders, self._clock = waits_for_folders, clock
        cores = [f"cpu{index}" for index in range(machine.cpus)]
        self._gpus = Packing(
            machine.gpus, share=options.runs_per_gpu, max_concurrent=options.max_concurrent
        )
        self._cores = Packing(cores, max_concurrent=options.max_concurrent)
        self._locks = GpuLocks() if machine.simulated else GpuLocks(gpu_uuid)
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}  # the keys of _jobs
        self._demands: dict[int, Demand] = {}  # of the jobs that have been queued
        self._active: dict[int, Job] = {}
        self._workers: dict[int, Workers] = {}  # of the active jobs
        self._folders: dict[int, FolderLock] = {}  # of the active jobs
        self._in_use: dict[int, float] = {}  # since when these wait for another command's end
        self._queued: list[int] = []  # that the next start gives to a packing
        self._equal = EqualRuns()
        self._last: RunConfig | None = None  # of the job that was queued last
        self._next_start = 0.0
        self._held_up: set[str] = set()  # devices, by another command
        self.is_closed = False
        """True if no further job is taken, since others would fail as one has."""
        self._faults: dict[str, str] = {}  # of GPUs that have failed a run
        self._finishing: str | None = None  # why those that run are to end
        self._asked_at: float | None = None  # when the workers were asked to stop

    def run(self, source: Iterator[Job | None]) -> None:
        """Run every job that `source` yields; each is taken between two polls of the others.

        None is "nothing now"; a job that was pruned may come again, see Job.continue_until. A job's
        failure is kept in the job. Raises KeyboardInterrupt, with everything stopped and recorded.
        """
        more, left, idle = True, False, False
        with signals.Heeded():
            try:
                while more or self._active or self._waiting():
                    try:
                        if signals.asked() or self._finishing:
                            left |= more
                            more = False
                            self._ask_to_stop()
                        elif more:
                            more, idle = self._take(source)
                        self._start_ready()
                        has_room = self._poll()
                        self._observer.tick(list(self._active.values()))
                        self._make_ready()
                        if (idle or not more) and not has_room:
                            live = self._workers.values()
                            wait([one for workers in live for one in workers.sentinels], POLL_S)
                    except KeyboardInterrupt:  # in a call from Python; commands keep the first
                        if not signals.note_interrupt():
                            raise
                left |= any(job.status not in (COMPLETED, PRUNED) for job in self._jobs.values())
                if self._asked_at is not None and left and not self._finishing:
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                self._stop_all(signals.interruption())
                raise
            except BaseException as error:
                self._stop_all(f"the command itself failed: {type(error).__name__}: {error}")
                raise
            finally:
                processes.wait_for_leaving()

    def finish(self, why: str) -> None:
        """Start no further job, and let those that run save and end, without an interruption."""
        self._finishing = self._finishing or why

    def has_room(self) -> bool:
        """Return whether a job as large as the last could start now."""
        most = self._options.max_concurrent
        if self._waiting() or self.is_closed or self._finishing:
            return False
        if most is not None and len(self._active) >= most:
            return False
        if self._last is None:
            return bool((self._gpus if self._machine.gpus else self._cores).num_free)
        packing = self._gpus if self._last.num_gpus else self._cores
        return packing.num_free >= demand_of(0, self._last, self._machine).count

    def _ask_to_stop(self) -> None:
        """Let the workers save and end, and start no others.

        Raises KeyboardInterrupt if they take too long.
        """
        if self._asked_at is None:
            self._asked_at = self._clock()
            self._drop_waiting()
            for workers in self._workers.values():
                workers.ask_to_stop()
        if self._clock() - self._asked_at > signals.grace_s():
            if not self._finishing:
                raise KeyboardInterrupt
            self._stop_all(self._finishing)

    def _drop_waiting(self) -> None:
        self._in_use.clear()
        self._queued.clear()
        self._equal.drop_waiting()
        self._gpus.drop_waiting()
        self._cores.drop_waiting()

    def _waiting(self) -> bool:
        not_packed = self._in_use or self._queued or self._equal
        return bool(not_packed or self._gpus.waiting or self._cores.waiting)

    def _take(self, source: Iterator[Job | None]) -> tuple[bool, bool]:
        """Take the next job; return whether there may be more, and whether there is none now."""
        if self.is_closed:
            return False, True
        try:
            job = next(source)
        except StopIteration:
            return False, True
        if job is None:
            return True, True
        number = self._numbers.setdefault(job, len(self._numbers))
        self._jobs[number] = job
        if job.status == COMPLETED:
            return True, False
        try:
            if job.error:
                raise job.error
            with signals.heeded_at_once():
                # Once for all its workers, before any could try the same.
                about, check = prepare(job.asked)
                job.check = DataCheck(check) if check and not job.asked.instead else None
                if about:
                    self._observer.data_found(about)
            if not self._equal.hold(number, job):
                self._queued.append(number)
        except ExptError as error:
            self._end(number, error)
        except KeyboardInterrupt:
            pass  # the loop stops all runs, see signals.asked
        return True, False

    def _look_at_folders(self) -> None:
        for number, since in list(self._in_use.items()):
            job = self._jobs[number]
            if not is_held(job.paths):
                del self._in_use[number]
                self._queued.append(number)
            elif self._clock() >= since + PATIENCE_S:  # nobody who was killed, and is about to end
                self._observer.job_locked_out(job)
                self._in_use[number] = math.inf  # once

    def _start_ready(self) -> None:
        self._look_at_folders()
        for number in (*self._queued, *self._equal.released()):
            self._last = config = self._jobs[number].asked.config
            if number not in self._demands:  # else a restart avoids the GPUs that have failed it
                self._demands[number] = demand_of(number, config, self._machine)
            (self._gpus if config.num_gpus else self._cores).add([self._demands[number]])
        self._queued.clear()
        while self._faults and (demand := self._gpus.pop_impossible()):
            self._end(demand.run, self._too_few(demand))
        for packing in (self._gpus, self._cores):
            held = dict[int, list[str]]()
            while self._clock() >= self._next_start:
                ready = packing.start_next(elsewhere=len(self._active) - len(packing.running))
                if ready is None:
                    break
                number, devices = ready
                missed = self._locks.acquire(devices) if packing is self._gpus else None
                if missed:
                    held.setdefault(number, []).extend(missed)
                    packing.close(missed, until=self._clock() + LOCKED_ELSEWHERE_S)
                    packing.end(number)
                    packing.add([self._demands[number]])
                    continue
                self._held_up -= {*devices}
                self._start(number, devices if packing is self._gpus else ())
            for number in held.keys() - self._active.keys():
                if not {*held[number]} <= self._held_up:  # else a search says so of each trial
                    self._observer.job_waiting(self._jobs[number], held[number])
                self._held_up |= {*held[number]}
            packing.release_unavailable(self._clock())

    def _make_ready(self) -> None:
        if not self._active or self._asked_at is not None:
            return
        for packing in (self._gpus, self._cores):
            for demand in packing.waiting[:1]:  # the likeliest to start next
                self._observer.job_next(self._jobs[demand.run])

    def _start(self, number: int, devices: tuple[str, ...]) -> None:
        job, request = self._jobs[number], self._jobs[number].asked
        job.devices, self._active[number] = devices, job
        try:
            if not job.retries:
                refuse_changed(request)
            lock = self._folders[number] = FolderLock(
                job.paths, 0.0 if self._waits_for_folders else None
            )
            job.started_at, job.status = self._clock(), RUNNING
            self._next_start = job.started_at + self._options.stagger_s
            record = read_result(job.paths)
            if request.may_have_run and has_reached(record, request.until_epoch):
                self._end(number, None)  # by another command, meanwhile
                return
            self._observer.job_starting(job)
            attempt = Attempt(
                request=dataclasses.replace(request, typed_at=request.typed_at or job.started_at),
                number=request.next_attempt(),
                devices=devices,
                lock=lock,
            )
            self._workers[number] = self._start_workers(attempt)
            job.bytes_at_start = job.paths.num_bytes()  # not zero, where it resumes
        except ExptError as error:
            self._end(number, error)
        except OSError as error:  # a full disk, maybe; other runs may still be able to end
            failure = RunFailed(f"{error.filename or job.paths.folder}: {error.strerror or error}")
            if error.errno in FULL:
                failure = not_written(job.paths.result, str(error.strerror), "the record")
            if read_result(job.paths).get("status") == RUNNING:
                record_end(job.paths, failure)
            self._end(number, failure)

    def _poll(self) -> bool:
        """Poll the runs under way; return whether one has given back its devices."""
        before = len(self._active)
        for number, job in list(self._active.items()):
            if number not in self._active:
                continue  # stopped meanwhile, because another has failed
            try:
                if not self._workers[number].poll():
                    self._heed_check(number)
                    continue
                error: ExptError | None = None
            except ExptError as failure:
                error = self._cause(number, failure)
                if isinstance(error, RunFailed) and (error := self._move(number, error)) is None:
                    continue
                record_end(job.paths, error)
            if error and job.note_failure(error, self._options.retries):
                self._retry(number, error)
            else:
                self._end(number, error)
        return len(self._active) < before

    def _heed_check(self, number: int) -> None:
        """Check the data once training is under way; let it save and end if something is wrong."""
        job = self._jobs[number]
        if job.check and job.trains:
            job.check.begin()
        if job.check and job.check.error and not job.check.is_heeded:
            job.check.is_heeded = True
            self._workers[number].ask_to_stop()

    def _cause(self, number: int, failure: ExptError) -> ExptError:
        """Return why a run has failed: all that is wrong with its data, if it is that."""
        check = self._jobs[number].check
        if check and isinstance(failure, DataError):
            with contextlib.suppress(KeyboardInterrupt), signals.heeded_at_once():
                check.wait()
        if check and check.error:
            return check.error
        if self._asked_at is not None:  # a worker that has only just begun dies of the question
            return Interrupted(self._finishing or signals.interruption())
        return failure

    def _retry(self, number: int, error: ExptError) -> None:
        job = self._jobs[number]
        job.try_again()
        self._observer.job_retrying(job, error)
        self._release(number)
        self._folders.pop(number).release()
        self._queued.append(number)

    def _move(self, number: int, error: RunFailed) -> ExptError | None:
        """Queue a run again that GPUs have failed before its first step, for others.

        Else return its error: if two GPUs fail it in the same way, neither is to blame.
        """
        job, packing = self._jobs[number], self._gpus
        # Where another run trains, a GPU works.
        works = {gpu for other in self._active.values() if other.trains for gpu in other.devices}
        gpus = {gpu: fault for gpu, fault in error.gpus.items() if gpu not in works}
        if not gpus:  # runs of this command share it
            return errors.OutOfMemory(str(error)) if isinstance(error, errors.DeviceFull) else error
        demand = self._demands[number]
        if type(error) is RunFailed and demand.avoided:
            packing.close(demand.avoided, until=self._clock(), while_busy=True)
            return error
        self._faults |= gpus
        if type(error) is DeviceLost:
            packing.blame(number, gpus)
        demand = dataclasses.replace(demand, avoided=demand.avoided | {*gpus})
        if demand.fit(packing.devices) is None:
            return error if type(error) is RunFailed else self._too_few(demand)
        self._observer.job_moved(job, "; ".join(gpus.values()))
        take_back(job.paths, error)
        job.status, job.started_at = QUEUED, 0.0
        self._release(number)
        self._folders.pop(number).release()
        packing.close(gpus, until=self._clock() + LEFT_ALONE_S, while_busy=True)
        self._demands[number] = demand
        self._queued.append(number)
        return None

    def _too_few(self, demand: Demand) -> DeviceLost:
        """Return the error of a run that needs more GPUs than are left for it, or others."""
        every, wanted = self._machine.gpus, demand.devices or self._machine.gpus
        able = [gpu for gpu in every if gpu in {*self._gpus.devices} - demand.avoided]
        able.sort(key=lambda gpu: gpu not in wanted)
        size, most = self._jobs[demand.run].asked.config.batch_size, demand.count
        # With fewer, those among which the batch can be divided.
        few = next((n for n in range(min(most, len(able)), 0, -1) if n == most or not size % n), 0)
        chosen = sorted(map(every.index, able[:few]))
        fix = f"use {setting(chosen)}" if chosen else "`expt doctor` says more"
        of = f"{len(wanted)} named" if demand.devices else len(wanted)
        left = len({*able} & {*wanted})
        have = "has" if left == 1 else "have"
        text = f"{demand.count} of {of} GPUs needed, {left} {have} not failed; {fix}"
        faults = {gpu: self._faults[gpu] for gpu in wanted if gpu in {*self._faults} - {*able}}
        return DeviceLost("\n".join((text, *faults.values())), gpus=faults)

    def _release(self, number: int, *, passed: bool = False) -> None:
        if (job := self._active.pop(number, None)) is None:
            return
        (self._gpus if job.devices else self._cores).end(number)
        if passed:
            self._gpus.blame(number, self._demands[number].avoided)
        still_used = {device for other in self._active.values() for device in other.devices}
        self._locks.release([device for device in job.devices if device not in still_used])
        if workers := self._workers.pop(number, None):
            workers.close()

    def _end(self, number: int, error: ExptError | None) -> None:
        """End a job; its folder stays locked until the observer has been called."""
        job = self._jobs[number]
        self._release(number, passed=error is None)
        if self._waits_for_folders and isinstance(error, FolderInUse):
            self._in_use[number] = self._clock()
            return
        self.is_closed |= job.is_trial and isinstance(error, DeviceLost)
        job.end(error, self._clock())
        try:
            self._observer.job_ended(job)
        finally:
            if lock := self._folders.pop(number, None):
                lock.release()
        if job.status == FAILED and self._options.fail_fast:
            self.is_closed = True
            self._drop_waiting()
            self._stop_all("another run failed, and fail_fast is on")

    def _stop_all(self, why: str) -> None:
        error = Interrupted(why)
        for number, job in list(self._active.items()):
            if workers := self._workers.get(number):
                workers.stop()
                record_end(job.paths, error)
            self._end(number, error)
