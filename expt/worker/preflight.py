"""A run tried out by one of its workers: everything is built, a few steps are taken and timed, and
nothing is kept.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from expt.config.schema import RunConfig
from expt.runs.paths import RunPaths
from expt.runs.request import Preflight
from expt.runs.result import COMPLETED, update_result
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.loop import evaluate, train_epoch
from expt.worker import rank_health
from expt.worker.run import Run


def carry_out(
    preflight: Preflight,
    config: RunConfig,
    paths: RunPaths,
    worker: Worker,
    *,
    typed_at: float,
    beat: Callable[[], None],
) -> str:
    """Train and evaluate on the first batches, and leave what that took in result.json; returns
    "completed".
    """
    run = Run(config, paths, worker, typed_at=typed_at, beat=beat, compares=False)
    start_s = time.monotonic() - typed_at
    steps_s = _steps(run, preflight)
    eval_s = _evaluation(run, preflight.steps)
    reading = rank_health.reading(
        steps=1, seconds=0.0, all_reduce_s=None, device=worker.device, wish=False
    )
    own = rank_health.row(
        reading,
        torch.zeros(()),
        rank=worker.rank,
        world_size=worker.world_size,
        device=worker.device,
    )
    found = rank_health.readings(collectives.sum_across_workers(own))
    if worker.rank == 0:
        tried = {
            "start_s": start_s,
            "first_step_s": steps_s[0],
            "step_s": statistics.median(steps_s[1:] or steps_s),
            "eval_s": eval_s,
        }
        tried |= {
            name: value
            for name, value in rank_health.scalars(found).items()
            if name.startswith("memory/")
        }
        update_result(
            paths, status=COMPLETED, metrics=tried, steps_per_epoch=run.position.steps_per_epoch
        )
    return COMPLETED


def _steps(run: Run, preflight: Preflight) -> list[float]:
    """Seconds of each of the run's first steps, which are really taken."""
    steps_s, device, began, most = (
        list[float](),
        run.worker.device,
        time.perf_counter(),
        preflight.steps,
    )

    def done() -> bool:
        nonlocal began, most
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        steps_s.append(now - began)
        began = now
        run.beat()
        if len(steps_s) == preflight.steps:
            total_s = collectives.sum_across_workers(torch.tensor(steps_s[-1], device=device))
            if total_s.item() < preflight.short_s * run.worker.world_size:
                most = preflight.short_steps
            began = time.perf_counter()
        return len(steps_s) >= most

    run.position.begin_epoch()
    batches = run.data.train.epoch(run.position.epoch, skip=0)
    every = run.position.total_steps + 1  # no log point: nobody looks on
    train_epoch(run.learner, batches, run.position, run.sums, log_every=every, between_steps=done)
    return steps_s


def _evaluation(run: Run, most: int) -> float:
    """Seconds that an evaluation of the run would take, by its first batches."""
    loader = run.data.val if run.config.eval_split == "val" else run.data.test
    assert loader is not None
    seen = 0

    def counted(batches: Any) -> Any:
        nonlocal seen
        for batch in itertools.islice(batches, most):
            seen += batch.size
            run.beat()
            yield batch

    began = time.perf_counter()
    evaluate(run.learner, counted(loader.evaluation()), run.worker.device)
    mine = loader.size / run.worker.world_size
    return (time.perf_counter() - began) * max(1.0, mine / max(1, seen))
