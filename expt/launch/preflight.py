"""Runs tried out on this machine: a few steps of each, in folders that are gone afterwards."""

from __future__ import annotations

import dataclasses
import heapq
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.status import Status

from expt.config.schema import RunConfig
from expt.errors import ExptError
from expt.launch.job import Job, Observer, Options
from expt.launch.packing import Packing, demand_of
from expt.launch.pool import Pool
from expt.machine import Machine
from expt.runs import continuing
from expt.runs.paths import RunPaths
from expt.runs.request import Preflight, RunRequest
from expt.runs.result import Record, read_result


@dataclass(frozen=True)
class Tried:
    """What a run would take, or why it cannot run."""

    error: ExptError | None
    record: Record

    def seconds(self, request: RunRequest) -> float:
        """Of a whole run alike but for its length, from its turn on, if nothing stops it early."""
        found, per_epoch, config = (
            self.record["metrics"],
            self.record["steps_per_epoch"],
            request.config,
        )
        steps = min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)
        done = min(steps, continuing.steps_done(request, per_epoch))
        if done == steps:  # it ends with its test
            return found["start_s"] + found["eval_s"]
        evaluations = math.ceil(steps / per_epoch) - done // per_epoch
        steps_s = found["first_step_s"] + (steps - done - 1) * found["step_s"]
        return found["start_s"] + steps_s + evaluations * found["eval_s"]


def try_out(
    requests: Sequence[RunRequest], machine: Machine, options: Options, console: Console
) -> list[Tried]:
    """Take a few steps of each, side by side where there is room.

    Raises KeyboardInterrupt, with all stopped.
    """
    with (
        tempfile.TemporaryDirectory(prefix="expt-preflight-") as folder,
        console.status("trying out") as status,
    ):
        jobs = [Job(RunPaths(Path(folder, str(number))), None) for number in range(len(requests))]
        for job, request in zip(jobs, requests, strict=True):
            config = dataclasses.replace(request.config, resume=None, max_restarts=0)
            job.request = dataclasses.replace(
                request,
                config=config,
                paths=job.paths,
                instead=Preflight(),
                typed_at=None,
                may_have_run=False,
                goes_on_from=None,
            )
        once = dataclasses.replace(options, retries=0, fail_fast=False)
        Pool(machine, once, _Shown(status, len(jobs))).run(iter(jobs))
        return [Tried(job.error, read_result(job.paths)) for job in jobs]


class _Shown(Observer):
    def __init__(self, status: Status, total: int) -> None:
        self._status, self._total, self._done = status, total, 0

    def job_ended(self, job: Job) -> None:
        self._done += 1
        self._status.update(f"trying out {self._total} kinds of runs, {self._done} done")


def together_s(
    runs: Iterable[tuple[RunConfig, float]], machine: Machine, options: Options
) -> float:
    """How long runs of known lengths [s] take together, packed as the pool packs them and started
    without delay.
    """
    lengths, ends, now = list[float](), list[tuple[float, int, Packing]](), 0.0
    share, most = options.runs_per_gpu, options.max_concurrent
    gpus = Packing(machine.gpus, share=share, max_concurrent=most)
    cores = Packing([f"cpu{index}" for index in range(machine.cpus)], max_concurrent=most)
    for number, (config, length) in enumerate(runs):
        (gpus if config.num_gpus else cores).add([demand_of(number, config, machine)])
        lengths.append(length)
    while True:
        for packing, other in ((gpus, cores), (cores, gpus)):
            while ready := packing.start_next(elsewhere=len(other.running)):
                heapq.heappush(ends, (now + lengths[ready[0]], ready[0], packing))
        if not ends:
            return now
        now, number, packing = heapq.heappop(ends)
        packing.end(number)
