"""Time the first steps of a run, and an evaluation, for `python -m expt plan preflight=true`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

import torch

from expt.data.loading import Batch
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, update_result
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.loop import evaluate, train_epoch
from expt.worker.run import Run

STEPS = 3
"""The first is slower than the others."""
SHORT_S, SHORT_STEPS = 0.02, 30
"""Shorter steps than SHORT_S vary more: SHORT_STEPS of them are timed."""


def time_steps(request: RunRequest, worker: Worker) -> str:
    """Train and evaluate on a few batches, write the times, and return "completed"."""
    run = Run(request, worker, compares=False)
    start_s = time.monotonic() - request.waited_since
    steps_s = _time_steps(run)
    eval_s = _time_evaluation(run)
    run.health.end_epoch(run.sums.values, wish=lambda: False)
    if worker.rank == 0:
        memory = {x: mib for x, mib in run.health.scalars().items() if x.startswith("memory/")}
        tried = {
            "start_s": start_s,
            "first_step_s": steps_s[0],
            "step_s": statistics.median(steps_s[1:] or steps_s),
            "eval_s": eval_s,
            **memory,
        }
        steps_per_epoch = run.position.steps_per_epoch
        update_result(run.paths, status=COMPLETED, metrics=tried, steps_per_epoch=steps_per_epoch)
    return COMPLETED


def _time_steps(run: Run) -> list[float]:
    """Return the seconds of each of the run's first steps."""
    steps_s: list[float] = []
    device, most, began = run.worker.device, STEPS, time.perf_counter()

    def done() -> bool:
        nonlocal began, most
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        steps_s.append(time.perf_counter() - began)
        run.worker.beat()
        if len(steps_s) == STEPS:
            total_s = collectives.sum_across_workers(torch.tensor(steps_s[-1], device=device))
            if total_s.item() < SHORT_S * run.worker.world_size:
                most = SHORT_STEPS
        began = time.perf_counter()
        return len(steps_s) >= most

    run.position.begin_epoch()
    batches = run.position.marked(run.data.train.epoch(run.position.epoch), run.every)
    every = run.position.total_steps + 1  # no log point
    train_epoch(run.learner, batches, run.position, run.sums, log_every=every, between_steps=done)
    return steps_s


def _time_evaluation(run: Run) -> float:
    """Return the seconds that an evaluation would take, by its first batches."""
    if (loader := run.data.evaluated(run.config.eval_split)) is None:
        return 0.0
    seen, now = 0, run.position.progress(is_evaluation=True)

    def first() -> Iterator[Batch]:
        nonlocal seen
        for batch in itertools.islice(loader.evaluation(), STEPS):
            seen += batch.size
            run.worker.beat()
            yield batch._replace(progress=now)

    began = time.perf_counter()
    evaluate(run.learner, first(), run.worker.device)
    mine = loader.size / run.worker.world_size
    return (time.perf_counter() - began) * max(1.0, mine / max(1, seen))
