"""Runs that a command starts here: one run, evaluations side by side, and a preflight.

Their workers are started by the pool; with `debug=true` the only one is this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.status import Status

from expt import machine, signals
from expt.config import own_code
from expt.config.schema import RunConfig
from expt.errors import (
    INTERRUPTED_BEFORE,
    INTERRUPTED_UNWRITTEN,
    ConfigError,
    DataError,
    Diverged,
    ExptError,
    FolderInUse,
    Interrupted,
    RunFailed,
)
from expt.gpus import is_simulated
from expt.launch.job import Job, Observer, prepare
from expt.launch.packing import Packing, demand_of
from expt.launch.pool import Pool, PoolOptions
from expt.machine import Machine
from expt.runs import continuing
from expt.runs.attempt import Attempt
from expt.runs.failure import mistake_in
from expt.runs.paths import RunPaths, at_work
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, Record, read_result
from expt.runs.view.progress import Printed, RunDisplay, show_printed, watched
from expt.runs.view.summary import print_summary
from expt.runs.view.text import Console, cells, resume_command, say, shown_path


class Launcher:
    """The launcher of runs on this machine; with `debug=true` this process is the worker."""

    def follow(self, typed_at: float) -> RunPaths | None:
        """Train as rank 0 decides, and return the run's folder; None if this process decides.

        To be called before any other part of a run.
        """
        return None

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """Decide for all workers in the body; they hear if the configuration is refused."""
        return contextlib.nullcontext()

    def earlier_folder(self) -> Path | None:
        """Return the folder in which this job's run began, if its workers were started again."""
        return None

    def carry_out(self, request: RunRequest, console: Console | None = None) -> None:
        """Carry out the request in its folder. Raises ConfigError, RunFailed or Interrupted.

        A new folder of a run that is refused is removed: the fixed command may name it again.
        """
        config, paths, console = request.config, request.paths, console or Console()
        is_new, job, live = paths.is_new(), Job(paths, request), not config.debug
        display = RunDisplay(
            paths, console, epochs=config.epochs, print_every=config.print_every, live=live
        )
        try:
            if config.debug:
                with at_work(paths):
                    _run_in_process(request, display, console)
            else:
                with display:
                    Pool(machine.detect(), PoolOptions(), _Shown(display, console)).run(iter([job]))
            if job.error:
                if paths.last.exists() or paths.forked.exists():
                    job.error.args = (f"{job.error}{how_to_continue(request, job.error)}",)
                raise job.error
        except KeyboardInterrupt:
            again = f"interrupted; to continue: {resume_command(paths)}"
            raise Interrupted(again if paths.result.exists() else INTERRUPTED_BEFORE) from None
        except ConfigError as error:
            if is_new and not isinstance(error, FolderInUse) and not paths.has_trained():
                paths.remove_refused()
            raise
        print_summary(console, paths)


class _Shown(Observer):
    def __init__(self, display: RunDisplay, console: Console) -> None:
        self._display, self._console = display, console

    def data_found(self, about: str) -> None:
        say(self._console, about)

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        self._display.waiting(devices)

    def tick(self, active: Sequence[Job]) -> None:
        if active:  # else it was refused, or is at its end
            self._display.update()


def how_to_continue(request: RunRequest, error: ExptError) -> str:
    """Return how to continue after the `error` of a run that has a checkpoint.

    Empty where that would fail again.
    """
    paths, command = request.paths, resume_command(request.paths)
    run = shlex.quote(shown_path(paths.folder))
    anew = f"then type its settings with resume={run} to continue in a new folder"
    if isinstance(error, RunFailed) and not isinstance(error, Diverged):
        if request.identity.content.get("code") and mistake_in(str(error)):
            return f"\nmend it, {anew}"
        return f"\nto continue from its last checkpoint: {command}"
    # a sample that nobody had read before, and not a refusal, after which the record is as before
    if isinstance(error, ConfigError) and read_result(paths).get("error") == str(error):
        if request.identity.content.get("code"):  # an edit makes another run
            return f"; {anew}"
        if isinstance(error, DataError) and request.identity.content.get("data"):
            again = f"continue by {command}, else begin with weights={run}@last"
            return f"; with the data as before {again}"
        return f"; then continue by {command}"
    return ""


def _run_in_process(request: RunRequest, display: RunDisplay, console: Console) -> None:
    """Run the single worker of `debug=true` here, where pdb works."""
    from expt.training import collectives  # late: it imports torch
    from expt.worker.main import run_as, torch_kept

    signals.raise_dropped()
    gpus = () if is_simulated() else request.config.gpu_indices
    alone = collectives.worker_from(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, gpus=gpus
    )
    here = machine.detect()
    used = tuple(here.gpus[index] for index in request.config.gpu_indices)
    attempt = Attempt(request=request, devices=used)
    with own_code.as_on_disk():  # in a notebook it may have been edited since the run before this
        about, _ = prepare(request)
        if about:
            say(console, about)
        recorded = attempt.recorded()
        with torch_kept(alone.device), recorded as source, watched(display):
            run_as(alone, request, source)


def carry_out(requests: Sequence[RunRequest], console: Console) -> list[ExptError]:
    """Run the evaluations and return the failures.

    Nothing is left of refused and interrupted ones. Raises Interrupted, and ConfigError where the
    only one is refused.
    """
    jobs = [Job(request.paths, request) for request in requests]
    try:
        with console.status("starting") as status:
            observer = _ShownEvaluations(console, status)
            Pool(machine.detect(), PoolOptions(), observer).run(iter(jobs))
    except KeyboardInterrupt:
        raise Interrupted(INTERRUPTED_UNWRITTEN) from None
    finally:
        for job in jobs:
            if job.status != COMPLETED and (
                job.error is None or isinstance(job.error, ConfigError | Interrupted)
            ):
                _remove(job.paths)
    if len(jobs) == 1 and jobs[0].error:
        raise jobs[0].error
    return [job.error for job in jobs if job.error]


def _remove(paths: RunPaths) -> None:
    """Remove the folder of an evaluation, and with the last one the folder around it."""
    shutil.rmtree(paths.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        paths.folder.parent.rmdir()


class _ShownEvaluations(Observer):
    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._printed: dict[Job, Printed] = {}
        self._done = 0

    def job_starting(self, job: Job) -> None:
        self._printed[job] = Printed(job.paths)

    def job_ended(self, job: Job) -> None:
        self._done += 1
        self._show(job, last=True)

    def tick(self, active: Sequence[Job]) -> None:
        names = ", ".join(str(job.paths.folder.parents[1].name) for job in active)
        done = f", {self._done} done" if self._done else ""
        self._status.update(*cells(f"evaluating {names}{done}"))  # a str would be markup
        for job in active:
            self._show(job)

    def _show(self, job: Job, *, last: bool = False) -> None:
        if job in self._printed:
            lines = self._printed[job].new(last=last)
            show_printed(self._console, ((f"rank {rank}", line) for rank, line in lines))


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
        Pool(machine, once, _ShownTrials(status, len(jobs))).run(iter(jobs))
        return [Tried(job.error, read_result(job.paths)) for job in jobs]


class _ShownTrials(Observer):
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
