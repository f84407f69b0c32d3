"""Evaluate the weights of runs without training: one, or the mean of several."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from expt import progress
from expt.config import keys, own_code
from expt.config.identity import shown
from expt.config.kinds import metrics_of, only_in_evaluations
from expt.config.schema import RunConfig
from expt.dashboards.events import Writer
from expt.dashboards.pictures import Review, RunPictures, Seen, by_class
from expt.data import build as evaluation_data
from expt.data.build import EvaluationData
from expt.data.loading import Batch, LoaderOptions, Progress, Shard
from expt.errors import decimals, listed, sized_by, warn
from expt.features import Classes, Features
from expt.inference.ensemble import Ensemble, Member, Together
from expt.inference.load import located, read, rebuilt
from expt.inference.plan import shared
from expt.runs import provenance
from expt.runs.request import Evaluation, RunRequest, Trained
from expt.runs.result import COMPLETED, EvaluationOf, update_result
from expt.tasks import extra_metrics
from expt.tasks.sums import Averages
from expt.tasks.task import Facts, Task
from expt.training import collectives, random_state
from expt.training.collectives import Worker
from expt.training.compiling import compile_module, mode_of
from expt.training.learner import Evaluator
from expt.training.loop import evaluate
from expt.training.own_state import load_own_state
from expt.training.precision import Precision
from expt.training.strategy import Strategy
from expt.worker import build
from expt.worker.build import build_pictures
from expt.worker.checkpoints import read_together
from expt.worker.record import tagged

ROUNDING = 0.01
"""How much a number may differ from the run's, relative to it, on another device for example."""
ROUNDING_OF_LOSSES = 1e-5
"""How much small losses and errors may differ; shares of samples, as accuracy, by two samples."""
MOST_COUNTED = 2000
"""Classes whose confusion matrix an evaluation counts: of more it would fill the memory."""


def measure_weights(evaluation: Evaluation, request: RunRequest, worker: Worker) -> str:
    """Evaluate the weights of runs, write the numbers to the folder, and return "completed"."""
    config, split = request.config, evaluation.split
    random_state.seed(config.seed)
    random_state.set_determinism(config.deterministic, worker.device)
    ways, rounds = shared(evaluation.runs, split)
    pairs = zip(evaluation.runs, ways, strict=True)
    weights = [_Weights.load(run, way, worker) for run, way in pairs]
    members = [one.member for one in weights]
    with sized_by("data"):
        data = {way: _data(evaluation, way, config, worker) for way in dict.fromkeys(ways)}
    worker.beat()
    for way, each in data.items():
        evaluation_data.keep_doubles(members[way].trained, each.loaders)
    features, evaluator = data[0].features, _evaluator(config, members, evaluation.flips, worker)
    pictures, review = _pictures(config, features)
    together = Together([{way: data[way] for way in several} for several in rounds])
    began = time.perf_counter()
    batches = build.evaluation_batches(together, split, worker, weights[0].progress)
    values = evaluate(evaluator, batches, worker.device, review)
    eval_s = time.perf_counter() - began
    seen = review.gather() if review else None
    if worker.rank == 0:
        about = _about(evaluation, weights[0].progress, values, features, seen)
        metrics, events = tagged(values, split, worker.warn), Writer(request.paths.folder)
        known = {tag: value for tag, value in metrics.items() if not math.isnan(value)}
        events.write(about["step"], known)
        if pictures:
            pictures.draw(seen, split, events, about["step"])
        events.close()
        if evaluation.own_data and len(members) == 1 and not evaluation.flips:
            weights[0].warn_of_others(metrics, values.samples, config)
        update_result(
            request.paths,
            status=COMPLETED,
            evaluation_of=about,
            metrics=metrics,
            eval_s=eval_s,
            data=features.record,
        )
    return COMPLETED


def _pictures(config: RunConfig, features: Features) -> tuple[RunPictures | None, Review | None]:
    """Return the pictures to draw, and the confusions to count, which may be many more."""
    shows, names = config.tensorboard.images is not False, features.targets.names
    if pictures := build_pictures(config, features) if shows else None:
        return pictures, pictures.review()
    counts = config.task.takes.has_one_class and len(names) <= MOST_COUNTED
    return None, Review(len(names), keep=0) if counts else None


class _Weights(NamedTuple):
    """The weights of a run, its record, and the rest of its checkpoint's state."""

    member: Member
    record: Any
    state: Mapping[str, Any]

    @classmethod
    def load(cls, run: Trained, way: int, worker: Worker) -> _Weights:
        """Load the weights of a run; a collective."""
        with sized_by("model"):
            with progress.phase("loading the checkpoint"):
                # Only rank 0 looks: the run may be under way, and ranks would find different files.
                found = located(run.run, run.which, warns=False) if worker.rank == 0 else None
                record, file = collectives.from_rank_0(found)
                state = read_together(file, worker, lambda _: read(file))
            worker.beat()
            trained = rebuilt(record, state, worker.device, amp=run.config.amp)
        compile_module(trained.model, mode_of(run.config.compile, steps=0))
        task = run.config.task.build(Facts(targets=trained.features.targets))
        load_own_state(task, state["workers"], worker.device, worker.rank)
        unmapped = {key: value for key, value in state.items() if key not in ("model", "ema")}
        return cls(Member(trained, task, way), record, unmapped)

    @property
    def progress(self) -> Progress:
        """How far the run had come with these weights."""
        at, planned = self.state["position"], self.record["total_steps"]
        return Progress(epoch=at["epoch"], step=at["step"], planned=planned, is_evaluation=True)

    def known(self) -> Mapping[str, float]:
        """Return the numbers that the run itself has measured of these weights, by their tags."""
        step, best = self.state["position"]["step"], self.record.get("best") or {}
        is_tested = self.record.get("status") == COMPLETED and best.get("step") == step
        at_end = self.record["metrics"] if is_tested else {}  # others are of the last epoch
        tested = {tag: value for tag, value in at_end.items() if tag.endswith("/test")}
        return {**tested, **(self.state["last"] if self.state.get("evaluated_at") == step else {})}

    def warn_of_others(self, metrics: Mapping[str, float], samples: int, now: RunConfig) -> None:
        """Warn where numbers differ from the run's own by more than rounding."""
        known, better = self.known(), metrics_of(now.task)
        changed = _changed(self.record["config"], now)
        for tag, value in metrics.items():
            name, _, split = tag.rpartition("/")
            is_another = any(f"{key}.".startswith(f"task.metrics.{name}.") for key in changed)
            if split == "train" or is_another:  # the run's is a mean over steps, or of other code
                continue
            was = known.get(tag, value)
            near = 2 / max(1, samples) if better.get(name) == "max" else ROUNDING_OF_LOSSES
            if math.isfinite(was) and not math.isclose(value, was, rel_tol=ROUNDING, abs_tol=near):
                there = f"{decimals(was)} where the run measured these weights"
                cause = _cause(self.record, changed)
                warn(f"{tag}: {decimals(value)} here, and {there}; {cause}")
                return


@dataclass(frozen=True, kw_only=True)
class _Averaging(Evaluator):
    """Several models, or one, and all that an evaluation of their mean needs."""

    ensemble: Ensemble

    def outputs(self, task: Task, batch: Batch) -> tuple[Any, Batch]:
        return self.ensemble(task, batch)


def _evaluator(
    config: RunConfig, members: Sequence[Member], flips: bool, worker: Worker
) -> Evaluator:
    module, targets = members[0].trained.model, members[0].trained.features.targets
    if len(members) > 1:
        module = nn.ModuleList(member.trained.model for member in members)
    return _Averaging(
        module=module,
        precision=Precision(config.amp, worker.device),
        task=members[0].task,
        strategy=Strategy(module),
        extra_metrics=extra_metrics.build(
            only_in_evaluations(config.task), worker.device, targets, warns=worker.rank == 0
        ),
        ensemble=Ensemble(members, flips),
    )


def _changed(then: Mapping[str, Any], now: RunConfig) -> list[str]:
    """Return the keys that can change an evaluation's numbers and differ from those of the run."""
    before, after = keys.flat(then), keys.flat(shown(now))
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    found = ((key, keys.meaning_in(after if key in after else before, key)) for key in differ)
    return [
        key
        for key, meant in found
        if key.startswith("task.metrics.")
        or (meant.evaluate and meant.result == "changes" and not meant.own_machine)
    ]


def _cause(record: Any, changed: Sequence[str]) -> str:
    """Return why numbers may be others than the run's: that which has changed since, if it has."""
    imported, versions = record.get("distributions", {}), provenance.other_versions(record)
    causes = [versions[key] for key in versions if key in imported]
    if own_code.has_other_source(record):
        causes.insert(0, "the source of its classes has changed")
    if causes:
        return "; ".join(causes)
    settings = f"it has another {listed(changed)}, " if changed else ""
    return (
        f"{settings}a file that its classes read has changed, its samples or classes come in"
        " another order in each process, e.g. by that of a set, or its evaluation draws random"
        " numbers"
    )


def _data(evaluation: Evaluation, way: int, config: RunConfig, worker: Worker) -> EvaluationData:
    run = evaluation.runs[way]
    options = LoaderOptions(
        batch_size=config.batch_size,
        shard=Shard(worker.rank, worker.world_size),
        device=worker.device,
        channels_last=config.channels_last,
        eval_batch_size=config.samples_per_evaluation,
    )
    with build.in_turn(run.config, worker):
        return evaluation_data.load(
            run.config.dataset,
            config.task,
            evaluation.split,
            run.features,
            options,
            own=evaluation.own_data,
            num_workers=build.num_readers(config),
        )


def _about(
    evaluation: Evaluation, at: Progress, values: Averages, features: Features, seen: Seen | None
) -> EvaluationOf:
    """Return the entry of the result that says which weights and samples were measured."""
    about: EvaluationOf = {
        "run": str(evaluation.runs[0].run),
        "checkpoint": evaluation.runs[0].which,
        "epoch": at.epoch,
        "step": at.step,
        "split": evaluation.split,
        "own_data": evaluation.own_data,
        "samples": values.samples,
    }
    if evaluation.dataset is not None:
        about["dataset"] = evaluation.dataset
    if len(evaluation.runs) > 1:
        about["mean_of"] = [run.label for run in evaluation.runs]
    if evaluation.flips:
        about["flips"] = True
    if isinstance(features.targets, Classes):
        about["class_names"] = list(features.targets.names)
    if seen:
        about["by_class"] = by_class(seen[0], features.targets.names)
    return about
