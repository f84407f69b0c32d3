"""One rank of a run: builds everything, in order, and trains. What it has to tell goes into the run folder."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from expt import signals
from expt.config.identity import hyperparameters, shown
from expt.config.schema import RunConfig
from expt.data.build import Data
from expt.data.loading import Batch, TimedBatches
from expt.runs import checkpoint, provenance, tags
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, INTERRUPTED, read_result
from expt.tensorboard.log import Log
from expt.training import collectives, metrics
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.loop import evaluate, rehearse, train_epoch
from expt.worker import build, divergence, fault, random_state, rank_health, snapshot
from expt.worker.agreement import Agreement
from expt.worker.history import is_better
from expt.worker.profiling import StepProfiler
from expt.worker.rank_health import RankHealth


class Run:
    """The training of one run, as one of its workers sees it."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        worker: Worker,
        started: float,
        source: Path | None,
        beat: Callable[[], None],
    ) -> None:
        self.config, self.paths, self.worker, self.started = config, paths, worker, started
        self.beat = beat
        random_state.seed(config.seed)  # the same weights on every rank
        random_state.set_determinism(config.deterministic, worker.device)
        self.data = build.build_data(config, worker)
        self.learner = build.build_learner(config, self.data, worker)
        random_state.seed(config.seed + 1 + worker.rank)  # but not the same dropout
        self.position, self.total_steps = Position(), build.total_steps(config, self.data)
        self.sums = metrics.Sums(worker.device, finite_only=config.on_nan == "skip")
        self.best: dict[str, Any] | None = None
        self.epoch_s: list[float] = []
        self.eval_s = 0.0  # of all evaluations
        self.first_step_s: float | None = None
        self.lr = self.data_wait_s = self.skipped_before = 0.0
        self.elapsed_s = 0.0  # of this epoch, before this attempt
        self.saved_at, self.began = time.monotonic(), time.perf_counter()
        self.agreement, self.stopping = Agreement(worker), False
        self.dashboard = build.build_dashboard(config, self.data, self.learner, worker)
        checked = config.tensorboard.health
        self.health, self.draws = RankHealth(self.learner, self.position, worker, check_weights=checked), False
        self.provenance = provenance.of(read_result(paths))
        self.log: Log | None = None
        self.writer = checkpoint.Writer(paths.last, paths.best, keep=config.checkpoint.keep)
        saved = self._put_back(source) if source is not None else None
        if worker.rank == 0:
            settings, at = hyperparameters(shown(config)), self.position.step if saved else None
            charts = tags.layout(config.eval_split, worker.world_size)
            self.log = Log(paths, settings, charts, continued_at=at)
            self.log.last.update(saved["last"] if saved else {})
        self.profiler: StepProfiler | None = None
        if config.profile and worker.rank == 0:
            self.profiler = StepProfiler(paths.trace, paths.operators, worker.device)
        fault.arm(self.learner.module, worker.rank, lambda: self.position.step)

    def train(self) -> str:
        """Every epoch, the test at the end, and the completion record; returns its status."""
        if self.log:
            self.log.result(steps_per_epoch=len(self.data.train), total_steps=self.total_steps, data=_about(self.data))
        while self.position.step < self.total_steps and not self.stopping:
            if not 0 < self.position.step_in_epoch < len(self.data.train):  # else it goes on within an epoch
                self.position.epoch, self.position.step_in_epoch = self.position.epoch + 1, 0
                self.sums.reset()
            self._epoch()
        if self.profiler:
            self.profiler.close()
        self.writer.wait()
        if self.position.step < self.total_steps:
            if self.log:
                self.log.interrupt()
            return INTERRUPTED
        self._test()
        if self.log:
            self.log.complete(self._outcome())
        return COMPLETED

    def _epoch(self) -> None:
        self.began = time.perf_counter() - self.elapsed_s
        position = self.position
        read = self.data.train.epoch(position.epoch, skip=position.step_in_epoch)
        batches = TimedBatches(self.dashboard.watch(read, position))
        self.health.begin_epoch()
        train_epoch(
            self.learner,
            batches,
            position,
            self.sums,
            log_every=self.config.log_every,
            stop_at=self.total_steps,
            on_step=self._after_step,
            on_log=self._log_training,
            between_steps=self._between_steps,
            on_gradients=self.dashboard.before_update,
        )
        if self.stopping and position.step_in_epoch < len(self.data.train) and position.step < self.total_steps:
            return
        total, readings = self.health.end_epoch(self.sums.values, wish=self.dashboard.wants_pictures)
        values, self.draws = metrics.averages(total), bool(readings[0].wish)
        self.epoch_s.append(time.perf_counter() - self.began)
        self.data_wait_s = batches.waited_s
        self._log_training(values, self.epoch_s[-1], epoch_ended=True)
        if self.log:
            self.dashboard.show(self.log.events, position.step)
        self._show_health(readings)
        self.elapsed_s = 0.0
        self._evaluate(self.config.eval_split)
        self._end_epoch()

    def _after_step(self, step: int) -> None:
        self.beat()
        self.lr = self.learner.optimizer.param_groups[0]["lr"]
        if self.first_step_s is None:
            if self.worker.device.type == "cuda":
                torch.cuda.synchronize(self.worker.device)
            self.first_step_s = time.time() - self.started
        if self.profiler:
            self.profiler.step()

    def _log_training(self, values: metrics.Averages, seconds: float, *, epoch_ended: bool = False) -> None:
        """The averages since the last log point; at an epoch's end those of the epoch, so as to compare with val."""
        if not math.isfinite(values.loss):
            self._stop_at_loss()
        if not self.log:
            return
        # A log point that falls on the epoch's last step gives way to the epoch's own.
        last = self.position.step_in_epoch == len(self.data.train) or self.position.step == self.total_steps
        if last and not epoch_ended:
            return
        points = {
            tags.loss("train"): values.loss,
            tags.accuracy("train"): values.accuracy,
            tags.LR: self.lr,
            tags.SAMPLES_PER_S: values.samples / seconds,
        }
        if epoch_ended:
            points |= {tags.EPOCH_S: seconds, tags.DATA_WAIT_S: self.data_wait_s}
            if self.config.on_nan == "skip":
                points[tags.SKIPPED_STEPS] = self.skipped_before + self.learner.precision.skipped.item()
        self.log.values(self.position, points)

    def _show_health(self, readings: list[rank_health.Reading]) -> None:
        """Raises RunFailed if the ranks' weights differ."""
        if self.config.tensorboard.health:
            if self.log:
                self.log.values(self.position, rank_health.scalars(readings))
                self.log.flush()
            rank_health.refuse_unequal(readings, self.position.epoch)

    def _evaluate(self, split: str) -> metrics.Averages:
        loader = self.data.val if split == "val" else self.data.test
        assert loader is not None
        began = time.perf_counter()
        collectives.broadcast_buffers(self.learner.module)  # each rank has batch-norm statistics of its own
        review, batches = self.dashboard.review() if self.draws else None, _each_told(loader.evaluation(), self.beat)
        values = evaluate(self.learner, batches, metrics.Sums(self.worker.device), observe=review)
        self.eval_s += time.perf_counter() - began
        if self.log:
            points = {tags.loss(split): values.loss, tags.accuracy(split): values.accuracy}
            self.log.values(self.position, points)
        self.dashboard.draw(review, split, self.log, self.position)
        return values

    def _between_steps(self) -> bool:
        """Save within an epoch, where that is due; its end has a checkpoint of its own."""
        position, due = self.position, self.config.checkpoint
        timed, stop = self.agreement.after_step([self._minutes_passed(), signals.asked()])
        self.stopping |= stop
        if position.step_in_epoch == len(self.data.train) or position.step == self.total_steps:
            return False
        if timed or stop or (due.every_steps and position.step % due.every_steps == 0):
            self._save()
        return self.stopping

    def _stop_at_loss(self) -> None:
        self.writer.wait()
        parts = self.config.gradient_accumulation
        divergence.stop_at_loss(self.sums, self.position, self.data.train, self.worker, parts)

    def _minutes_passed(self) -> bool:
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and self.worker.rank == 0 and time.monotonic() - self.saved_at > minutes * 60

    def _end_epoch(self) -> None:
        """Note the best so far, and save where that is due."""
        position, due, name = self.position, self.config.checkpoint, self.config.objective
        improved = False
        if self.log:
            value = self.log.last.get(name)
            improved = value is not None and is_better(value, self.best["value"] if self.best else None, name)
            if improved:
                self.best = {"metric": name, "value": value, "epoch": position.epoch}
            if self.best:
                self.log.values(position, {tags.best(name): self.best["value"]})
        by_count = bool(due.every_epochs and position.epoch % due.every_epochs == 0)
        by_steps = bool(due.every_steps and position.step % due.every_steps == 0)
        at_end = by_count or by_steps or position.step == self.total_steps or self._minutes_passed()
        at_end, stop = self.agreement.meet([at_end or improved, signals.asked()])
        self.stopping |= stop
        if at_end or self.stopping:
            self._save(improved=improved)

    def _save(self, *, improved: bool = False) -> None:
        """Begin to write a checkpoint; a collective."""
        state = snapshot.take(self.learner, self.position, self.sums, self.worker)
        if not divergence.all_finite(part["sums"] for part in state["workers"]):
            self._stop_at_loss()
        self.writer.wait()  # should what follows end the run: the checkpoint before this is whole then
        divergence.refuse_weights(self.learner.module, self.position)
        self.saved_at = time.monotonic()
        if not self.log:
            return
        in_epoch = 0 < self.position.step_in_epoch < len(self.data.train)
        more = {
            "best": self.best,
            "is_best": improved,
            "epoch_s": self.epoch_s,
            "eval_s": self.eval_s,
            "elapsed_s": time.perf_counter() - self.began if in_epoch else 0.0,
            "last": self.log.last,
            "metrics_bytes": self.log.metrics_bytes,
            "config": shown(self.config),
            "provenance": self.provenance,
        }
        self.writer.save({**state, **more}, is_best=improved)

    def _put_back(self, source: Path) -> dict[str, Any]:
        """Go on from the checkpoint `source`, which rank 0 reads."""
        read = checkpoint.load(source) if self.worker.rank == 0 else None
        saved: dict[str, Any] = collectives.from_rank_0(read, self.worker.device)
        rehearse(self.learner, self.data.info.image_shape, self.config.batch_size, self.worker.device)
        snapshot.put_back(saved, self.learner, self.position, self.sums, self.worker)
        self.skipped_before = saved["last"].get(tags.SKIPPED_STEPS, 0.0)
        self.best, self.epoch_s, self.elapsed_s = saved["best"], saved["epoch_s"], saved["elapsed_s"]
        self.eval_s = saved["eval_s"]
        return saved

    def _test(self) -> None:
        """Once, on the weights of the best checkpoint; not where the test set was looked at after each epoch."""
        if self.config.eval_split == "test":
            return
        if self.log and self.paths.best.exists():
            self.learner.module.load_state_dict(checkpoint.load(self.paths.best)["model"])
        collectives.broadcast_parameters(self.learner.module)
        self._evaluate("test")

    def _outcome(self) -> dict[str, Any]:
        assert self.log is not None
        name = self.config.objective
        trained, steps = sum(self.epoch_s), self.position.step
        return {
            "metrics": self.log.last,
            "best": self.best,
            # The objective is what the run is chosen by: the best that any epoch reached, and test's one value.
            "objective": {"name": name, "value": self.best["value"] if self.best else self.log.last.get(name)},
            "epoch_s": self.epoch_s,
            "eval_s": self.eval_s,
            "dashboard_s": self.dashboard.spent_s + self.health.spent_s,
            "samples_per_s": steps * self.config.batch_size / trained if trained else None,
            "first_step_s": self.first_step_s,
            "steps": steps,
        }


def _each_told(batches: Iterable[Batch], tell: Callable[[], None]) -> Iterator[Batch]:
    """The batches, calling `tell` before each."""
    for batch in batches:
        tell()
        yield batch


def _about(data: Data) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(data.info).items() if key != "class_names"}
