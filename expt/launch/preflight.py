"""A few steps of runs, by workers that the pool starts, and the time that whole runs take."""

from __future__ import annotations

import dataclasses
import heapq
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.status import Status

from expt.config.schema import RunConfig
from expt.errors import ExptError
from expt.launch.job import Job, Observer
from expt.launch.packing import Packing, demand_of
from expt.launch.pool import Pool, PoolOptions
from expt.machine import Machine
from expt.runs import continuing
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import Record, read_result
from expt.runs.view.text import Console


@dataclass(frozen=True)
class Tried:
    """The cost of a run, or the reason that it cannot run."""

    error: ExptError | None
    record: Record

    def seconds(self, request: RunRequest) -> float:
        """Return the time of a run of this kind, from where it begins, if nothing stops it."""
        found, per_epoch = self.record["metrics"], self.record["steps_per_epoch"]
        config, source = request.config, continuing.find(request)
        done = source.checkpoint.step if source and source.rule == "resume" else 0
        steps = max(1, config.total_steps(per_epoch) - done)
        steps_s = found["first_step_s"] + (steps - 1) * found["step_s"]
        steps_s = min(steps_s, (config.max_minutes or math.inf) * 60)
        evaluations = math.ceil(steps / (config.eval_every_steps or per_epoch))
        if config.eval_every_minutes:
            evaluations = math.ceil(steps_s / config.eval_every_minutes / 60)
        return found["start_s"] + steps_s + evaluations * found["eval_s"]


def try_out(
    requests: Sequence[RunRequest], machine: Machine, options: PoolOptions, console: Console
) -> list[Tried]:
    """Take a few steps of each request, several at a time if there is room.

    Raises KeyboardInterrupt, with all stopped.
    """
    with (
        tempfile.TemporaryDirectory(prefix="expt-preflight-") as folder,
        console.status("trying out") as status,
    ):
        jobs = list[Job]()
        for number, request in enumerate(requests):
            paths = RunPaths(Path(folder, str(number)))
            config = dataclasses.replace(request.config, resume=None, max_restarts=0)
            new: dict[str, Any] = {"typed_at": None, "may_have_run": False, "shorter": None}
            tried = dataclasses.replace(
                request, config=config, paths=paths, instead="preflight", **new
            )
            jobs.append(Job(paths, tried))
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
    runs: Iterable[tuple[RunConfig, float]], machine: Machine, options: PoolOptions
) -> float:
    """Return the seconds that runs of known lengths take, packed as the pool packs them."""
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
