"""`preflight=true`: a few steps of each kind of run, to show the cost of all."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.status import Status
from rich.table import Table

from expt.command import terminal
from expt.config.constraints import word
from expt.config.identity import digest, shown
from expt.config.keys import flat, meaning_in
from expt.config.schema import RunConfig
from expt.errors import INTERRUPTED_UNWRITTEN, ConfigError, ExptError, Interrupted, RunFailed
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
    requests = [equal[0].asked for equal in kinds.values()]
    try:
        found = try_out(requests, machine, options, Console(stderr=True))
    except KeyboardInterrupt:
        raise Interrupted(INTERRUPTED_UNWRITTEN) from None
    tried = [*zip(kinds.values(), found, strict=True)]
    refused = {job: job.error for job in jobs if job.error}
    refused |= {job: each.error for equal, each in tried if each.error for job in equal}
    if len(jobs) == 1 and refused:
        raise refused[jobs[0]]
    console = Console()
    if rows := [(equal, each) for equal, each in tried if not each.error]:
        count = "runs" if total is None else "tried"
        console.print(_table(rows, of_sweep=len(jobs) > 1, count=count))
    able = [(job.asked, each) for equal, each in rows for job in equal]
    lengths = [(request.config, each.seconds(request)) for request, each in able]
    named = [{"run": request.paths.folder.name, **each.record["metrics"]} for request, each in able]
    seconds = ({"seconds": length} for _, length in lengths)
    terminal.put(preflight=[a | b for a, b in zip(named, seconds, strict=True)])
    _print_total(console, lengths, machine, options, total)
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


def _table(rows: Sequence[tuple[Sequence[Job], Tried]], *, of_sweep: bool, count: str) -> Table:
    needed = ("each needs", "memory of a worker", "a step", "an evaluation", "a run")
    table = plain_table(("runs like", count, *needed), left=["runs like"])
    for equal, tried in rows:
        config, found = equal[0].asked.config, tried.record["metrics"]
        cores = f"{config.world_size * config.threads} cores"
        needs = f"{config.num_gpus} GPU" if config.num_gpus else cores
        memory = mebibytes(found["memory/worker_mib"])
        if "memory/gpu_mib" in found:
            memory = f"{mebibytes(found['memory/gpu_mib'])} of the GPU, {memory}"
        lengths = sorted(tried.seconds(job.asked) for job in equal)
        a_run = " to ".join(dict.fromkeys(about(length) for length in (lengths[0], lengths[-1])))
        step, evaluation = brief(found["step_s"]), brief(found["eval_s"])
        name = equal[0].name if of_sweep else f"{word(config.model)} on {word(config.dataset)}"
        table.add_row(*cells(name, len(equal), needs, memory, step, evaluation, a_run))
    return table


def _print_total(
    console: Console,
    lengths: Sequence[tuple[RunConfig, float]],
    machine: Machine,
    options: PoolOptions,
    total: int | None,
) -> None:
    by = "" if total is None else f", judged by the {len(lengths)} tried"
    if total is not None:
        lengths = [*itertools.islice(itertools.cycle(lengths), total)]
    if not lengths:
        return
    seconds = together_s(lengths, machine, options)
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + seconds))
    what = "1 run takes" if len(lengths) == 1 else f"{len(lengths)} runs take"
    where = f"{len(machine.gpus)} GPUs" if lengths[0][0].num_gpus else f"{machine.cpus} cores"
    say(console, f"{what} about {about(seconds)} on {where}{by}: until {end}, if started now")


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
