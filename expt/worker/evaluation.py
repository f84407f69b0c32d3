"""A run's weights measured once more, by one of the workers: nothing is trained, and the run is not
touched.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from expt.config.schema import RunConfig
from expt.config.tasks import in_evaluations_alone
from expt.dashboards.events import Writer
from expt.dashboards.pictures import Review, RunPictures
from expt.data import build as evaluation_data
from expt.data.build import EvaluationData
from expt.data.loading import LoaderOptions, Shard
from expt.inference.load import rebuilt, saved
from expt.runs import tags
from expt.runs.paths import RunPaths
from expt.runs.request import Evaluation
from expt.runs.result import COMPLETED, EvaluationOf, update_result
from expt.tasks import extra_metrics
from expt.tasks.averages import Averages
from expt.tasks.task import Facts, Task
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.compiling import compile_module, mode_of
from expt.training.learner import Evaluator
from expt.training.loop import evaluate
from expt.training.precision import Precision
from expt.worker import build, random_state
from expt.worker.pictures import build_pictures
from expt.worker.record import tagged


def carry_out(
    evaluation: Evaluation,
    config: RunConfig,
    paths: RunPaths,
    worker: Worker,
    beat: Callable[[], None],
) -> str:
    """Measure, and leave the numbers in the folder of `paths`; returns "completed"."""
    random_state.seed(config.seed)
    random_state.set_determinism(config.deterministic, worker.device)
    record, state = _saved(evaluation, worker)
    beat()
    model = rebuilt(record, state, worker.device, amp=config.amp)
    data = _data(evaluation, config, record["data"], worker)
    beat()
    compiled = mode_of(config.compile, steps=0)
    compile_module(model.model, compiled)
    evaluator = Evaluator(
        module=model.model,
        precision=Precision(config.amp, worker.device),
        task=_task(config, record["data"], data),
        extra_metrics=extra_metrics.build(in_evaluations_alone(config.task), worker.device),
    )
    pictures = None
    if config.tensorboard.images is not False:
        pictures = build_pictures(
            config, record["data"], data.class_names, are_images=data.are_images
        )
    review = pictures.review() if pictures else None
    began = time.perf_counter()
    values = evaluate(evaluator, build.each_told(data.batches(), beat), worker.device, review)
    eval_s = time.perf_counter() - began
    _show(values, evaluation.split, paths, state["position"]["step"], worker, pictures, review)
    if worker.rank == 0:
        about = _about(evaluation, state["position"], values, data)
        metrics = tagged(values, functools.partial(tags.metric, split=evaluation.split), warns=True)
        update_result(paths, status=COMPLETED, evaluation_of=about, metrics=metrics, eval_s=eval_s)
    return COMPLETED


def _task(config: RunConfig, trained_on: Any, data: EvaluationData) -> Task:
    origin = trained_on.get("target_origin", 0.0)
    facts = Facts(shapes=trained_on, class_names=data.class_names, target_origin=origin)
    task: Task = config.task.build(facts)
    return task


def _saved(evaluation: Evaluation, worker: Worker) -> tuple[Any, dict[str, Any]]:
    """The run's record and what its checkpoint has of the model: what rank 0 reads, for a run may
    be under way.
    """
    read: tuple[Any, dict[str, Any]] | None = None
    if worker.rank == 0:
        record, state = saved(evaluation.run, evaluation.which)
        kept = ("model", "ema", "config", "position")
        read = record, {key: value for key, value in state.items() if key in kept}
    return collectives.from_rank_0(read, worker.device)


def _data(
    evaluation: Evaluation, config: RunConfig, trained_on: Any, worker: Worker
) -> EvaluationData:
    options = LoaderOptions(
        batch_size=config.batch_size,
        shard=Shard(worker.rank, worker.world_size),
        device=worker.device,
        mean=config.dataset.mean,
        std=config.dataset.std,
        channels_last=config.channels_last,
    )
    with build.in_turn(config, worker):
        return evaluation_data.load(
            config.dataset,
            config.task,
            evaluation.split,
            trained_on,
            options,
            own=evaluation.own_data,
            num_workers=build.num_readers(config),
        )


def _show(
    values: Averages,
    split: str,
    paths: RunPaths,
    step: int,
    worker: Worker,
    pictures: RunPictures | None,
    review: Review | None,
) -> None:
    """Write the event file beside the result, with the run's step: a collective, where there are
    pictures.
    """
    events = Writer(paths.folder) if worker.rank == 0 else None
    if events:
        known = {name: value for name, value in values.values.items() if not math.isnan(value)}
        events.write(step, {tags.metric(name, split): value for name, value in known.items()})
    if pictures and review:
        pictures.draw(review, split, events, step)
    if events:
        events.close()


def _about(
    evaluation: Evaluation, position: Any, values: Averages, data: EvaluationData
) -> EvaluationOf:
    about: EvaluationOf = {
        "run": str(evaluation.run),
        "checkpoint": evaluation.which,
        "epoch": position["epoch"],
        "step": position["step"],
        "split": evaluation.split,
        "own_data": evaluation.own_data,
        "samples": values.samples,
    }
    if evaluation.dataset is not None:
        about["dataset"] = evaluation.dataset
    if data.class_names:
        about["class_names"] = list(data.class_names)
    return about
