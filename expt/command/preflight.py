"""`preflight=true`: a few steps of each kind of run, to show the cost of all."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from expt import progress
from expt.command import terminal
from expt.config.constraints import word
from expt.config.identity import digest, shown
from expt.config.keys import flat, meaning_in
from expt.config.length import Length
from expt.config.schema import RunConfig
from expt.errors import (
    INTERRUPTED_UNWRITTEN,
    ConfigError,
    ExptError,
    Interrupted,
    RunFailed,
    counted,
)
from expt.launch.job import Job, Observer
from expt.launch.packing import Packing, demand_of
from expt.launch.pool import Pool, PoolOptions
from expt.machine import Machine
from expt.runs import continuing
from expt.runs.failure import in_one_line
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, Record, read_result
from expt.runs.view.text import Console, about, brief, cells, mebibytes, plain_table, say


def preflight(
    jobs: Sequence[Job], machine: Machine, options: PoolOptions, total: int | None = None
) -> None:
    """Try out a run of each kind among those that are not complete, and print their costs.

    With a `total` they are samples of a search with that many trials left. Raises
    ConfigError where some can't run by their settings, RunFailed where one can't for another
    reason, and Interrupted on Ctrl-C; nothing is written.
    """
    kinds: dict[str, list[Job]] = {}
    for job in jobs:
        if job.request is not None and job.status != COMPLETED:
            kinds.setdefault(_kind(job.request.config), []).append(job)
    try:
        found = try_out([each[0].asked for each in kinds.values()], machine, options)
    except KeyboardInterrupt:
        raise Interrupted(INTERRUPTED_UNWRITTEN) from None
    refused = {job: job.error for job in jobs if job.error}
    estimates = list[list[Estimate]]()  # of each kind
    for equal, tried in zip(kinds.values(), found, strict=True):
        if tried.error:
            refused |= dict.fromkeys(equal, tried.error)
        else:
            requests, measured = [job.asked for job in equal], tried.record["metrics"]
            estimates.append([Estimate(one, measured, tried.seconds(one)) for one in requests])
    if len(jobs) == 1 and refused:
        raise refused[jobs[0]]
    console, every = Console(), [*itertools.chain(*estimates)]
    documents = [
        {"run": one.paths.folder.name, **measured, "seconds": seconds}
        for one, measured, seconds in every
    ]
    terminal.put(preflight=documents)
    if every:
        count = "runs" if total is None else "tried"
        console.print(_table(estimates, of_sweep=len(jobs) > 1, count=count))
    if every and total != 0:
        lengths = [(each.request.config, each.seconds) for each in every]
        say(console, _total(lengths, machine, options, total))
    for job, why in refused.items():
        say(console, f"cannot run   {job.name}: {in_one_line(str(why), with_log=False)}")
    if refused:
        by_settings = all(isinstance(why, ConfigError) for why in refused.values())
        text = f"{len(refused)} of {len(jobs)} runs cannot run as they are"
        raise ConfigError(text) if by_settings else RunFailed(text)


def _kind(config: RunConfig) -> str:
    """Return a text that is equal for runs that cost the same."""
    settings = flat(shown(config))
    free = [key for key in settings if not meaning_in(settings, key).cost]
    return f"{digest(config, {}, but=free)} {config.threads}"


class Tried(NamedTuple):
    """The cost of a run, or the reason that it cannot run."""

    error: ExptError | None
    record: Record

    def seconds(self, request: RunRequest) -> float:
        """Return the time of a run of this kind, from where it begins, if nothing stops it."""
        found, per_epoch = self.record["metrics"], self.record["steps_per_epoch"]
        config, source, done, trained_s = request.config, continuing.find(request), 0, 0.0
        if source is not None:
            before = source.checkpoint
            done = before.step * per_epoch // before.state.get("steps_per_epoch", per_epoch)
            trained_s = before.trained_s if source.rule == "resume" else 0.0
        length = Length.of(config, per_epoch, done=done)
        steps = max(1.0, length.has("further steps"))
        steps_s = found["first_step_s"] + (steps - 1) * found["step_s"]
        capped_s = max(0.0, min(steps_s, length.minutes * 60 - trained_s))
        if config.eval_every_minutes:
            evaluations = capped_s / config.eval_every_minutes / 60
        else:
            evaluations = capped_s / steps_s * steps / length.per_evaluation
        return found["start_s"] + capped_s + math.ceil(evaluations) * found["eval_s"]


class Estimate(NamedTuple):
    """The time of a run, by the measurements of one of its kind."""

    request: RunRequest
    measured: Mapping[str, Any]
    seconds: float


def _table(estimates: Sequence[Sequence[Estimate]], *, of_sweep: bool, count: str) -> Table:
    needed = ("each needs", "memory of a worker", "a step", "an evaluation", "a run")
    table = plain_table(("runs like", count, *needed), left=["runs like"])
    for equal in estimates:
        request, found = equal[0].request, equal[0].measured
        config = request.config
        cores = f"{config.world_size * config.threads} cores"
        needs = f"{config.num_gpus} GPU" if config.num_gpus else cores
        memory = mebibytes(found["memory/worker_mib"])
        if "memory/gpu_mib" in found:
            memory = f"{mebibytes(found['memory/gpu_mib'])} of the GPU, {memory}"
        lengths = sorted(each.seconds for each in equal)
        a_run = " to ".join(dict.fromkeys(about(length) for length in (lengths[0], lengths[-1])))
        step, evaluation = brief(found["step_s"]), brief(found["eval_s"])
        single = f"{word(config.model)} on {word(config.dataset)}"
        name = request.paths.folder.name if of_sweep else single
        table.add_row(*cells(name, len(equal), needs, memory, step, evaluation, a_run))
    return table


def _total(
    runs: Sequence[tuple[RunConfig, float]],
    machine: Machine,
    options: PoolOptions,
    total: int | None,
) -> str:
    """Return a line with the time of all runs; of `total` ones these are samples."""
    by = "" if total is None else f", judged by the {len(runs)} tried"
    lengths = [*itertools.islice(itertools.cycle(runs), len(runs) if total is None else total)]
    seconds = together_s(lengths, machine, options)
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + seconds))
    takes = "1 run takes" if len(lengths) == 1 else f"{len(lengths)} runs take"
    devices = {False: counted(machine.cpus, "core"), True: counted(len(machine.gpus), "GPU")}
    on_gpus = {bool(config.num_gpus) for config, _ in lengths}
    where = " and ".join(devices[kind] for kind in sorted(on_gpus))
    return f"{takes} about {about(seconds)} on {where}{by}: until {end}, if started now"


def try_out(requests: Sequence[RunRequest], machine: Machine, options: PoolOptions) -> list[Tried]:
    """Take a few steps of each request, several at a time if there is room.

    Raises KeyboardInterrupt, with all stopped.
    """
    with (
        tempfile.TemporaryDirectory(prefix="expt-preflight-") as folder,
        progress.phase("trying out kinds of runs", len(requests)) as here,
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
        Pool(machine, once, _Counted(here)).run(iter(jobs))
        return [Tried(job.error, read_result(job.paths)) for job in jobs]


class _Counted(Observer):
    def __init__(self, phase: progress.Phase) -> None:
        self._phase = phase

    def job_ended(self, job: Job) -> None:
        self._phase.done += 1


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
