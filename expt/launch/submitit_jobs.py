"""A sweep whose runs are jobs of a cluster: submitted by submitit, watched by their run folders."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from expt import machine, signals
from expt.config import kept_code, secrets
from expt.errors import (
    RECORDED,
    ConfigError,
    DeviceLost,
    ExptError,
    Interrupted,
    RunFailed,
    require,
)
from expt.launch import forkserver
from expt.launch.job import Job, Observer, has_reached
from expt.launch.launcher import adopt, launcher
from expt.runs.attempt import record_end, take_back
from expt.runs.failure import LOG
from expt.runs.paths import RunPaths
from expt.runs.request import received
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, RUNNING, read_result

POLL_S = 0.2
RESULT_S = 5.0
"""The seconds that the files of a job which ended on another node may take to be seen here."""
PREEMPTED = signal.SIGUSR2
"""The signal that submitit has Slurm send before a job's end; its handler queues the job again."""
MOST_MOVES = 3
"""How often a job is submitted again because GPUs of its node can't be used."""
OF_SUBMITIT = ("nodes", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")


def executor_of(options: Mapping[str, Any], tasks: int) -> Any:
    """Return the submitit executor. Raises ConfigError where there is none."""
    name = options["executor"]
    require(f"hydra/launcher=submitit_{name}", "submitit", extra="slurm")
    import submitit

    timeouts = {f"{name}_max_num_timeout": options["max_num_timeout"]}
    folder = options["submitit_folder"]
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=name, **timeouts)
    except RuntimeError as error:  # no srun
        raise ConfigError(f"hydra/launcher=submitit_{name}: {error}") from None
    known = {"_target_", "executor", "submitit_folder", "max_num_timeout", "tasks_per_node"}
    known |= {*OF_SUBMITIT}
    shared = {key: options[key] for key in OF_SUBMITIT if options.get(key) is not None}
    own = {
        f"{name}_{key}": value
        for key, value in options.items()
        if key not in known and value not in (None, [], {})
    }
    executor.update_parameters(name="expt", tasks_per_node=tasks, **shared, **own)
    return executor


class Queue:
    """The jobs of a cluster, run as expt.launch.pool runs them on one machine."""

    batch: ClassVar[int | None] = 8
    is_closed: ClassVar[bool] = False
    """The same two as in expt.launch.pool.Pool."""

    def __init__(self, executor: Any, observer: Observer, exclude: str | None = None) -> None:
        """Submit to the `executor`; with `exclude` Slurm takes none of these nodes."""
        self._executor, self._observer = executor, observer
        self._excluded = {exclude: None} if exclude else {}
        self._active: dict[Job, Any] = {}
        self._cancelled = set[Job]()  # by this command
        self._silent_since: dict[Job, float] = {}  # that have ended, and have not said how
        self._finishing: str | None = None

    def has_room(self) -> bool:
        """Return True: the cluster makes jobs wait."""
        return True

    def finish(self, why: str) -> None:
        """Have the jobs under way save and end, without an interruption of the command."""
        if self._finishing is None:
            self._finishing = why
            for job in self._active:
                self._cancel(job)

    def run(self, source: Iterator[Job | None]) -> None:
        """Submit the jobs that `source` yields before None, and wait for them.

        Raises KeyboardInterrupt, with all cancelled.
        """
        with signals.Heeded():
            jobs = itertools.takewhile(lambda job: job is not None, source)
            wanted = [job for job in jobs if job is not None and job.status != COMPLETED]
            self._submit([] if self._finishing else wanted)
            while self._active and not signals.asked():
                for job, submitted in list(self._active.items()):
                    if not signals.asked() and self._has_ended(job, submitted):
                        error = self._outcome(job, submitted)
                        if not (isinstance(error, DeviceLost) and self._move(job, error)):
                            self._end(job, error)
                self._observer.tick(list(self._active))
                time.sleep(POLL_S)
            if self._active:
                if not signals.asked_by(signal.SIGHUP):  # the jobs need no terminal
                    self._cancel_all()
                raise KeyboardInterrupt

    def _move(self, job: Job, error: DeviceLost) -> bool:
        """Submit a job whose GPUs can't be used to other nodes; return False if that can't be."""
        node = read_result(job.paths).get("node")
        if node is None or self._executor.cluster != "slurm" or job.retries == MOST_MOVES:
            return False
        self._excluded[node] = None
        self._executor.update_parameters(slurm_exclude=",".join(self._excluded))
        self._observer.job_moved(job, str(error).partition("\n")[0])
        take_back(job.asked, error)
        job.retries += 1
        self._submit([job])
        return True

    def _submit(self, jobs: list[Job]) -> None:
        wanted = []
        for job in jobs:
            if job.error:
                self._end(job, job.error)
                continue
            self._observer.job_starting(job)
            job.started_at, job.status = time.monotonic(), RUNNING
            # else nobody there could import it
            kept_code.keep(job.asked.config, job.paths.code)
            wanted.append(job)
        if wanted:
            with self._executor.batch():  # on Slurm, a job array
                submitted = [
                    self._executor.submit(ClusterJob(job.asked.to_send(), sys.argv))
                    for job in wanted
                ]
            self._active |= dict(zip(wanted, submitted, strict=True))

    def _has_ended(self, job: Job, submitted: Any) -> bool:
        if not submitted.done():
            return False
        result = read_result(job.paths)
        has_told = has_reached(result, job.asked.until_epoch)
        has_told |= result.get("status") in (INTERRUPTED, FAILED)
        has_result = all(task.paths.result_pickle.exists() for task in _tasks(submitted))
        if job in self._cancelled or has_told or has_result:
            return True
        return time.monotonic() >= self._silent_since.setdefault(job, time.monotonic()) + RESULT_S

    def _outcome(self, job: Job, submitted: Any) -> ExptError | None:
        error = outcome(job, None if job in self._cancelled else submitted)
        if error is None or self._finishing is None:
            return error
        stopped = Interrupted(self._finishing)
        if _is_running(job):
            record_end(job.paths, stopped)
        return stopped

    def _cancel(self, job: Job) -> None:
        if job not in self._cancelled:
            self._cancelled.add(job)
            self._active[job].cancel(check=False)

    def _cancel_all(self) -> None:
        for job in self._active:
            self._cancel(job)
        end = time.monotonic() + signals.grace_s()
        while saving := [
            job
            for job, submitted in self._active.items()
            if _is_running(job) and not submitted.done()
        ]:
            if time.monotonic() > end:
                break
            time.sleep(POLL_S)
        for job in list(self._active):
            error = Interrupted(signals.interruption())
            if job not in saving and _is_running(job):
                record_end(job.paths, error)
            self._end(job, error)

    def _end(self, job: Job, error: ExptError | None) -> None:
        for known in (self._active, self._silent_since):
            known.pop(job, None)
        job.end(error, time.monotonic())
        self._observer.job_ended(job)


def outcome(job: Job, submitted: Any) -> ExptError | None:
    """Return the error of an ended job; without `submitted` this command has cancelled it."""
    result = read_result(job.paths)
    status = result.get("status")
    # else it was pruned before, and has not continued
    if has_reached(result, job.asked.until_epoch):
        return None
    if status == INTERRUPTED:
        return Interrupted(result.get("error") or "interrupted, and saved")
    if status == FAILED:
        return RECORDED.get(result.get("error_kind", ""), RunFailed)(result["error"])
    if submitted is None:
        return Interrupted("cancelled, before it could save")
    return RunFailed(
        f"job {submitted.job_id}: {_problem(submitted)}\n{LOG}{submitted.paths.stderr}"
    )


def _is_running(job: Job) -> bool:
    return read_result(job.paths).get("status") == RUNNING


def _tasks(submitted: Any) -> list[Any]:
    return [submitted.task(number) for number in range(submitted.num_tasks)]


def _problem(submitted: Any) -> str:
    for each in (submitted, *_tasks(submitted)):
        each._results_timeout_s = 0  # else submitit waits 15 s for each that has none
    return str(submitted.exception() or "it ended without a result").strip().splitlines()[-1]


@dataclass
class ClusterJob:
    """The work of each task of a job, pickled: it carries out one request."""

    sent: Mapping[str, Any]
    """See expt.runs.request.RunRequest.to_send."""
    argv: list[str]

    def __call__(self) -> str:
        """Train. A job that Slurm started again resumes from its last checkpoint."""
        requeue: Callable[[int, None], Any] | Any = signal.getsignal(PREEMPTED)
        sys.argv = self.argv
        os.environ.update(secrets.restored(self.sent["env"]))
        adopt(os.environ)
        try:
            with signals.interrupts_noted():  # this process is a command
                self._train(time.monotonic())
        except Interrupted:
            if signals.asked_by(PREEMPTED) and callable(requeue):
                requeue(PREEMPTED, None)  # ends this process
            raise
        return str(read_result(RunPaths(Path(self.sent["folder"]))).get("status"))

    def checkpoint(self) -> Any:
        """Return the job that submitit puts into the queue when this one has to make room."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _train(self, started_at: float) -> None:
        kept_code.find_kept(RunPaths(Path(self.sent["folder"])).code, trust=True)
        if not machine.is_external_worker():
            forkserver.warm()
        how = launcher()
        if how.follow(started_at) is None:
            how.carry_out(received(self.sent, machine.detect(), typed_at=started_at))
