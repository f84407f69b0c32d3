"""A sweep whose runs are jobs of a cluster: submitted through submitit, watched through their run folders."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from expt import machine, signals
from expt.config import secrets
from expt.config.identity import describe
from expt.config.parse import parse_elsewhere
from expt.errors import ConfigError, ExptError, Interrupted, RunFailed
from expt.launch import forkserver, one_run, slurm_variables
from expt.launch.job import Job, Observer
from expt.runs.paths import RunPaths
from expt.runs.request import Asked
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, RUNNING, read_result
from expt.runs.worker_error import LOG

POLL_S = 0.2
PREEMPTED = signal.SIGUSR2
"""What submitit lets Slurm send to a job that has to go; its own handler then puts the job into the queue again."""
OF_SUBMITIT = ("nodes", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")


def executor_of(options: Mapping[str, Any], tasks: int) -> Any:
    """The submitit executor. Raises ConfigError where there is none."""
    name = options["executor"]
    try:
        import submitit

        timeouts = {f"{name}_max_num_timeout": options["max_num_timeout"]}
        executor = submitit.AutoExecutor(folder=options["submitit_folder"], cluster=name, **timeouts)
    except ImportError:
        raise ConfigError(f"hydra/launcher=submitit_{name}: needs submitit; pip install 'expt[slurm]'") from None
    except RuntimeError as error:  # no srun
        raise ConfigError(f"hydra/launcher=submitit_{name}: {error}") from None
    known = {"_target_", "executor", "submitit_folder", "max_num_timeout", "tasks_per_node", *OF_SUBMITIT}
    shared = {key: options[key] for key in OF_SUBMITIT if options.get(key) is not None}
    own = {f"{name}_{key}": value for key, value in options.items() if key not in known and value not in (None, [], {})}
    executor.update_parameters(name="expt", tasks_per_node=tasks, **shared, **own)
    return executor


class Queue:
    """Does for jobs of a cluster what expt.pool does on one machine."""

    def __init__(self, executor: Any, observer: Observer) -> None:
        self._executor, self._observer = executor, observer
        self._active: dict[Job, Any] = {}

    def run(self, source: Iterator[Job]) -> None:
        """Submit every job that `source` yields, and wait for all. Raises KeyboardInterrupt, with all cancelled."""
        with signals.Heeded():
            self._submit([job for job in source if job.status != COMPLETED])
            while self._active and not signals.asked():
                for job, submitted in list(self._active.items()):
                    if submitted.done():
                        self._end(job, _outcome(job, submitted))
                self._observer.tick(list(self._active))
                time.sleep(POLL_S)
            if self._active:
                self._cancel()
                raise KeyboardInterrupt

    def _submit(self, jobs: list[Job]) -> None:
        wanted = []
        for job in jobs:
            if job.error:
                self._end(job, job.error)
                continue
            self._observer.job_starting(job)
            job.started, job.status = time.time(), RUNNING
            wanted.append(job)
        if wanted:
            with self._executor.batch():  # on Slurm, a job array
                submitted = [self._executor.submit(ClusterRun.of(job)) for job in wanted]
            self._active = dict(zip(wanted, submitted, strict=True))

    def _cancel(self) -> None:
        for submitted in self._active.values():
            submitted.cancel()
        end = time.monotonic() + signals.grace_s()
        while time.monotonic() < end and any(read_result(job.paths).get("status") == RUNNING for job in self._active):
            time.sleep(POLL_S)
        for job in list(self._active):
            self._end(job, Interrupted("interrupted by a person"))

    def _end(self, job: Job, error: ExptError | None) -> None:
        self._active.pop(job, None)
        job.error, job.ended = error, time.time()
        interrupted = isinstance(error, Interrupted)
        job.status = INTERRUPTED if interrupted else FAILED if error else COMPLETED
        self._observer.job_ended(job)


def _outcome(job: Job, submitted: Any) -> ExptError | None:
    """What became of a job that has ended."""
    result = read_result(job.paths)
    status = result.get("status")
    if status == COMPLETED:
        return None
    if status == INTERRUPTED:
        return Interrupted(result.get("error") or "interrupted, and saved")
    if status == FAILED:
        return RunFailed(result["error"])
    problem = str(submitted.exception() or "it ended without a result").strip().splitlines()[-1]
    return RunFailed(f"job {submitted.job_id}: {problem}\n{LOG}{submitted.paths.stderr}")


@dataclass
class ClusterRun:
    """What a job's tasks do, pickled: one run, trained by this task's own workers, or by all tasks together."""

    settings: Mapping[str, Any]
    paths: RunPaths
    about: Mapping[str, Any]
    env: Mapping[str, str]
    argv: list[str] = field(default_factory=lambda: list(sys.argv))

    @classmethod
    def of(cls, job: Job) -> ClusterRun:
        """The run of `job`, which the observer has made ready."""
        assert job.settings is not None
        paths = RunPaths(job.paths.folder.resolve())
        return cls(secrets.hidden(job.settings), paths, secrets.hidden(job.about), secrets.hidden(job.env))

    def __call__(self) -> str:
        """Train. A job that Slurm started again goes on from its last checkpoint."""
        requeue: Callable[[int, None], Any] | Any = signal.getsignal(PREEMPTED)
        sys.argv = self.argv
        os.environ.update(secrets.restored(self.env, {}))
        slurm_variables.adopt(os.environ)
        try:
            self._train()
        except Interrupted:
            if signals.asked_by(PREEMPTED) and callable(requeue):
                requeue(PREEMPTED, None)  # ends this process
            raise
        return str(read_result(self.paths).get("status"))

    def checkpoint(self) -> Any:
        """What submitit puts into the queue when the job has to make room."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _train(self) -> None:
        started = time.time()
        together = machine.is_external_worker()
        if not together:
            forkserver.warm()
        elif os.environ["RANK"] != "0":
            from expt.launch import torchrun  # late: it imports torch

            torchrun.follow(started)
            return
        config = parse_elsewhere(self.settings, machine.detect())
        asked = Asked(
            config=config,
            settings=self.settings,
            paths=self.paths,
            started=started,
            about={**self.about, **describe(config)},
            env=self.env,
            begun=self.paths.result.exists(),  # before this job had to make room; or by an earlier command
        )
        if together:
            from expt.launch import torchrun

            torchrun.lead(asked)
        else:
            one_run.run(asked)
