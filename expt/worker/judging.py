"""Evaluations of a run: metrics, the best until then, pictures, and the test at its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from expt.config.kinds import every_of, metrics_of
from expt.config.schema import RunConfig
from expt.dashboards.tensorboard import Dashboard
from expt.data.build import Data
from expt.runs import tags
from expt.tasks.sums import Averages
from expt.training import schedules
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.loop import evaluate
from expt.training.own_state import unchanged
from expt.worker import build
from expt.worker.batch_checks import BatchChecks
from expt.worker.callbacks import Callbacks
from expt.worker.history import EarlyStop, History
from expt.worker.rank_health import RankHealth
from expt.worker.record import Record, tagged


@dataclass(eq=False)
class Judge:
    """Measures the weights of a run, and shows and records the results."""

    config: RunConfig
    data: Data
    learner: Learner
    position: Position
    worker: Worker
    checks: BatchChecks
    callbacks: Callbacks
    health: RankHealth
    history: History
    observer: Dashboard
    early_stop: EarlyStop
    record: Record
    has_judged: bool = False
    """True once an evaluation of this attempt has ended."""
    _is_at_best: bool = False
    """True while the model has the weights of the best evaluation."""

    def weights_changed(self) -> None:
        """Note that the model has other weights than those of the last evaluation."""
        self._is_at_best = False

    def judge(self) -> bool:
        """Evaluate; return whether it is one of the best, whose checkpoints are kept."""
        began, split = time.perf_counter(), self.config.eval_split
        self._expect()
        if split is None:
            self.early_stop.look(self.history.last, self.position.step)
        else:
            self._measure(split)
        self._advance_scheduler()
        if self.history.is_within_epoch:
            for clock in (self.history, self.health, self.observer):
                clock.leave_out(time.perf_counter() - began)
        step, self.has_judged = self.position.step, True
        is_kept = self.history.note_evaluation(self.position.epoch, step)
        self._is_at_best = is_kept and self.history.bests[0]["step"] == step
        if split is not None:
            if not self._draws_best:
                self.observer.end_evaluation(split, is_last=self._is_last)
            self.record.best()
        return is_kept

    def _expect(self) -> None:
        """Have the observer prepare for an evaluation, which may be the run's last."""
        readings = [] if self.history.is_within_epoch else self.health.readings[:1]
        wishes = self.config.tensorboard.images is True or any(one.wish for one in readings)
        may_end = self.position.is_run_done or self.early_stop.may_be_due
        self.observer.expect_evaluation(review=wishes, may_end=may_end)

    def _measure(self, split: str) -> None:
        """Measure the metrics that are due in this evaluation, and forget those that are not."""
        self.history.evaluations += 1
        every = every_of(self.config.task).items()
        rare = [name for name, number in every if self.history.evaluations % number]
        self.history.forget(tags.metric(name, split) for name in rare)
        within = unchanged(self.learner.task, self.worker.device)
        with contextlib.nullcontext() if self.config.evaluates_epochs else within:
            self._evaluate(split, rare)

    def _advance_scheduler(self) -> None:
        if self.learner.scheduler_interval == "epoch":
            better, every = metrics_of(self.config.task), every_of(self.config.task)
            always = {name: way for name, way in better.items() if every.get(name, 1) == 1}
            split = self.config.eval_split or "train"
            schedules.advance_after_evaluation(
                self.learner.scheduler, self.history.last, always, split
            )

    @property
    def _is_last(self) -> bool:
        """True if the run has ended."""
        return self.position.is_run_done or self.early_stop.ended_by is not None

    @property
    def _draws_best(self) -> bool:
        """True if the best weights are to be drawn at the run's end, and the last are others."""
        return self._is_last and self.observer.draws_end and not self._is_at_best

    @property
    def _tests(self) -> bool:
        """True if there is a test, and evaluations were not of the test set."""
        return self.config.eval_split != "test" and self.data.test is not None

    @property
    def needs_best(self) -> bool:
        """True if `test` needs the weights of the best checkpoint, and the model has others."""
        return not self._is_at_best and (self._tests or self._draws_best)

    def test(self) -> None:
        """Test the best weights, which the model has now.

        They are also drawn, where the run's end is drawn and the last evaluation was not the best.
        """
        split = self.config.eval_split
        if self._draws_best and split is not None:
            self._look(split)
            self.observer.end_evaluation(split, is_last=True)
        if self._tests:
            self._evaluate("test")
            self.observer.end_evaluation("test", is_last=True)

    def call_back(self, moment: str, split: str | None = None) -> None:
        """Call a method of each callback; of a sharded model a collective."""
        model = self.learner.strategy.whole(self.learner.evaluated)
        self.callbacks.call(moment, model, self.record, split or self.config.eval_split or "")

    def _evaluate(self, split: str, left_out: Sequence[str] = ()) -> None:
        """Measure a split, but for the metrics `left_out`."""
        began = time.perf_counter()
        values = self._look(split, left_out)
        self.history.eval_s += time.perf_counter() - began
        self.record.log(tagged(values, split, self.worker.warn))
        if split == self.config.eval_split:
            self.early_stop.look(self.history.last, self.position.step)
        self.call_back("on_evaluation_end", split)

    def _look(self, split: str, left_out: Sequence[str] = ()) -> Averages:
        """Return the averages of a split, and have the observer see it."""
        loader = self.data.evaluated(split)
        assert loader is not None
        review = self.observer.review()
        now = self.position.progress(is_evaluation=True, left_out=tuple(left_out))
        batches = build.evaluation_batches(loader, split, self.worker, now)
        batches = self.checks.of_evaluation(batches)
        return evaluate(self.learner, batches, self.worker.device, review, left_out)
