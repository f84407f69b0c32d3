"""Many runs on one machine: each starts when its devices are free, one loop watches them all."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import ClassVar

from expt import signals
from expt.config.schema import RunConfig
from expt.data.fingerprint import refuse_changed
from expt.errors import DataError, DeviceLost, ExptError, FolderInUse, Interrupted, RunFailed
from expt.gpus import gpu_uuid
from expt.launch import processes
from expt.launch.job import QUEUED, DataCheck, Job, Observer, has_reached, prepare
from expt.launch.packing import Demand, EqualRuns, FaultyGpus, GpuLocks, Packing, demand_of
from expt.launch.workers import Workers
from expt.launch.workers import start as start_workers
from expt.machine import Machine
from expt.runs.attempt import Attempt, record_end, take_back
from expt.runs.checkpoint_file import FULL, not_written
from expt.runs.paths import PATIENCE_S, FolderLock, is_held
from expt.runs.result import COMPLETED, FAILED, PRUNED, RUNNING, read_result

POLL_S = 0.02
LOCKED_ELSEWHERE_S = 1.0
"""How long a device that another command holds is left alone before it is tried again."""


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """How a pool uses its machine; see hydra_plugins/expt_pool_launcher.py."""

    max_concurrent: int | None = None
    runs_per_gpu: int = 1
    fail_fast: bool = False
    retries: int = 0
    stagger_s: float = 0.0


@dataclass(eq=False)
class _Run:
    """A job of the pool, with all that its attempt holds of the machine."""

    number: int
    job: Job
    avoided: frozenset[str] = frozenset()
    """GPUs that have failed it."""
    lock: FolderLock | None = None
    attempt: Attempt | None = None
    """Its attempt under way."""
    workers: Workers | None = None

    def unlock(self) -> None:
        """Let others have the folder."""
        if self.lock:
            self.lock.release()
        self.lock = self.attempt = None


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
        self._faulty = FaultyGpus(self._gpus)
        self._runs: list[_Run] = []  # by number
        self._numbers: dict[Job, int] = {}
        self._active: dict[int, _Run] = {}  # by number
        self._locked_out: dict[_Run, float] = {}  # when to say so; inf once it is said
        self._queued: list[_Run] = []  # that the next start gives to a packing
        self._equal = EqualRuns()
        self._last: RunConfig | None = None  # of the job that was queued last
        self._next_start = 0.0
        self._held_up: set[str] = set()  # devices, by another command
        self.is_closed = False
        """True if no further job is taken, since others would fail as one has."""
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
                        self._observer.tick([run.job for run in self._active.values()])
                        self._make_ready()
                        if (idle or not more) and not has_room:
                            live = [run.workers for run in self._active.values() if run.workers]
                            wait([one for workers in live for one in workers.sentinels], POLL_S)
                    except KeyboardInterrupt:  # in a call from Python; commands keep the first
                        if not signals.note_interrupt():
                            raise
                left |= any(run.job.status not in (COMPLETED, PRUNED) for run in self._runs)
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
            for run in self._active.values():
                if run.workers:
                    run.workers.ask_to_stop()
        if self._clock() - self._asked_at > signals.grace_s():
            if not self._finishing:
                raise KeyboardInterrupt
            self._stop_all(self._finishing)

    def _drop_waiting(self) -> None:
        self._locked_out.clear()
        self._queued.clear()
        self._equal.waiting.clear()
        self._gpus.drop_waiting()
        self._cores.drop_waiting()

    def _waiting(self) -> bool:
        not_packed = self._locked_out or self._queued or self._equal.waiting
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
        number = self._numbers.setdefault(job, len(self._runs))
        if number == len(self._runs):
            self._runs.append(_Run(number, job))
        run = self._runs[number]
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
            if not self._equal.hold(job):
                self._queued.append(run)
        except ExptError as error:
            self._end(run, error)
        except KeyboardInterrupt:
            signals.note_interrupt()  # the loop stops all runs, see signals.asked
        return True, False

    def _look_at_folders(self) -> None:
        for run, said_at in list(self._locked_out.items()):
            if not is_held(run.job.paths):
                del self._locked_out[run]
                self._queued.append(run)
            elif self._clock() >= said_at:
                self._observer.job_locked_out(run.job)
                self._locked_out[run] = math.inf

    def _start_ready(self) -> None:
        self._look_at_folders()
        self._queued += (self._runs[self._numbers[job]] for job in self._equal.released())
        for run in self._queued:
            self._last = run.job.asked.config
            self._packing(run).add([self._demand(run)])
        self._queued.clear()
        for number, error in self._faulty.stranded():
            self._end(self._runs[number], error)
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
                    packing.add([self._demand(self._runs[number])])
                    continue
                self._held_up -= {*devices}
                self._start(self._runs[number], devices if packing is self._gpus else ())
            for number in held.keys() - self._active.keys():
                if not {*held[number]} <= self._held_up:  # else a search says so of each trial
                    self._observer.job_waiting(self._runs[number].job, held[number])
                self._held_up |= {*held[number]}
            packing.release_unavailable(self._clock())

    def _packing(self, run: _Run) -> Packing:
        return self._gpus if run.job.asked.config.num_gpus else self._cores

    def _demand(self, run: _Run) -> Demand:
        demand = demand_of(run.number, run.job.asked.config, self._machine)
        return dataclasses.replace(demand, avoided=run.avoided)

    def _make_ready(self) -> None:
        if not self._active or self._asked_at is not None:
            return
        for packing in (self._gpus, self._cores):
            for demand in packing.waiting[:1]:  # the likeliest to start next
                self._observer.job_next(self._runs[demand.run].job)

    def _start(self, run: _Run, devices: tuple[str, ...]) -> None:
        job, request = run.job, run.job.asked
        job.devices = devices
        self._active[run.number] = run
        try:
            if not job.retries:
                refuse_changed(request)
            run.lock = FolderLock(job.paths, 0.0 if self._waits_for_folders else None)
            job.started_at, job.status = self._clock(), RUNNING
            self._next_start = job.started_at + self._options.stagger_s
            run.attempt = Attempt(
                request=dataclasses.replace(request, typed_at=request.typed_at or job.started_at),
                number=request.next_attempt(),
                devices=devices,
                lock=run.lock,
            )
            record = read_result(job.paths)
            if request.may_have_run and has_reached(record, request.until_epoch):
                self._end(run, None)  # by another command, meanwhile
                return
            self._observer.job_starting(job)
            run.workers = self._start_workers(run.attempt)
            job.bytes_at_start = job.paths.num_bytes()  # not zero, where it resumes
        except ExptError as error:
            self._stop(run, error)
        except OSError as error:  # a full disk, maybe; other runs may still be able to end
            failure = RunFailed(f"{error.filename or job.paths.folder}: {error.strerror or error}")
            if error.errno in FULL:
                failure = not_written(job.paths.result, str(error.strerror), "the record")
            elif run.lock and (moved := job.paths.moved()):
                failure = RunFailed(moved)
            self._stop(run, failure)

    def _poll(self) -> bool:
        """Poll the runs under way; return whether one has given back its devices."""
        before = len(self._active)
        for run in list(self._active.values()):
            if run.workers is None:
                continue  # stopped meanwhile, because another has failed
            try:
                if not run.workers.poll():
                    self._heed_check(run.job, run.workers)
                    continue
                error: ExptError | None = None
            except ExptError as failure:
                error = self._cause(run.job, failure)
                if isinstance(error, RunFailed) and (error := self._move(run, error)) is None:
                    continue
                record_end(run.job.paths, error)
            if error and run.job.note_failure(error, self._options.retries):
                run.job.try_again()
                self._observer.job_retrying(run.job, error)
                self._requeue(run)
            else:
                self._end(run, error)
        return len(self._active) < before

    def _heed_check(self, job: Job, workers: Workers) -> None:
        """Check the data once training is under way; let it save and end if something is wrong."""
        if job.check and job.trains:
            job.check.begin()
        if job.check and job.check.error and not job.check.is_heeded:
            job.check.is_heeded = True
            workers.ask_to_stop()

    def _cause(self, job: Job, failure: ExptError) -> ExptError:
        """Return why a run has failed: all that is wrong with its data, if it is that."""
        if job.check and isinstance(failure, DataError):
            try:
                with signals.heeded_at_once():
                    job.check.wait()
            except KeyboardInterrupt:
                signals.note_interrupt()
        if job.check and job.check.error:
            return job.check.error
        if self._asked_at is not None:  # a worker that has only just begun dies of the question
            return Interrupted(self._finishing or signals.interruption())
        return failure

    def _move(self, run: _Run, error: RunFailed) -> ExptError | None:
        """Queue a run that GPUs have failed before its first step for others; else return why."""
        job = run.job
        # Where another run trains, a GPU works.
        others = (other.job for other in self._active.values())
        works = {gpu for other in others if other.trains for gpu in other.devices}
        try:
            demand = self._faulty.elsewhere(self._demand(run), error, works, self._clock())
        except ExptError as failure:
            return failure
        run.avoided = demand.avoided
        faults = (fault for gpu, fault in error.gpus.items() if gpu in run.avoided)
        self._observer.job_moved(job, "; ".join(faults))
        take_back(job.asked, error)
        job.status, job.started_at = QUEUED, 0.0
        self._requeue(run)
        return None

    def _requeue(self, run: _Run) -> None:
        self._release(run)
        run.unlock()
        self._queued.append(run)

    def _release(self, run: _Run, *, passed: bool = False) -> None:
        if self._active.pop(run.number, None) is None:
            return
        self._packing(run).end(run.number)
        if passed:
            self._gpus.blame(run.number, run.avoided)
        still_used = {device for other in self._active.values() for device in other.job.devices}
        self._locks.release([device for device in run.job.devices if device not in still_used])
        if run.workers is not None:
            run.workers.close()
        run.workers = None

    def _end(self, run: _Run, error: ExptError | None) -> None:
        """End a job; its folder stays locked until the observer has been called."""
        self._release(run, passed=error is None)
        if self._waits_for_folders and isinstance(error, FolderInUse):
            # a command that was killed is about to end
            self._locked_out[run] = self._clock() + PATIENCE_S
            return
        if run.job.is_trial and isinstance(error, DeviceLost):
            self.is_closed = True
        run.job.end(error, self._clock())
        try:
            self._observer.job_ended(run.job)
        finally:
            run.unlock()
        if run.job.status == FAILED and self._options.fail_fast:
            self.is_closed = True
            self._drop_waiting()
            self._stop_all("another run failed, and fail_fast is on")

    def _stop(self, run: _Run, error: ExptError) -> None:
        """End a job by an error, and the workers and the record of its attempt, if it has begun."""
        if run.workers is not None:
            run.workers.stop()
        if run.attempt and run.attempt.has_begun:
            record_end(run.job.paths, error)
        self._end(run, error)

    def _stop_all(self, why: str) -> None:
        for run in list(self._active.values()):
            self._stop(run, Interrupted(why))
