"""The training of a run by one of its workers, from its first step or a checkpoint to the test."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from expt import progress, signals
from expt.config import own_code
from expt.config.identity import shown
from expt.config.kinds import every_of, metrics_of
from expt.config.length import Length, beyond_the_end, never_measured
from expt.dashboards.tensorboard import Dashboard
from expt.data.loader import StreamLoader
from expt.data.loading import TimedBatches
from expt.errors import sized_by
from expt.models.hugging_face import HuggingFace
from expt.runs import checkpoint_file, tags
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, INTERRUPTED, PRUNED, Best, StoppedEarly, read_result
from expt.tasks.sums import Averages, Sums, loss_is_finite, refuse_weightless
from expt.training import random_state, schedules
from expt.training.collectives import Worker
from expt.training.loop import averages_since_logged, rehearse, train_epoch
from expt.training.optimizer_state import as_built, in_use, switch
from expt.worker import build, comparison, diagnosis, fault, first_weights
from expt.worker.batch_checks import BatchChecks
from expt.worker.callbacks import Callbacks
from expt.worker.checkpoints import TRAINED, Checkpoints, Snapshot
from expt.worker.custom_code import FirstSteps
from expt.worker.history import EarlyStop, History
from expt.worker.judging import Judge
from expt.worker.rank_health import RankHealth
from expt.worker.record import Record, tagged
from expt.worker.steps import Agreement, Steps, Times

LONG_S = 60.0
"""Seconds of training that a run is to keep if an evaluation fails, or is killed."""
Observe = Callable[..., Dashboard]
"""Builds the observer, with the arguments of worker.build.build_dashboard."""


class Run:
    """The run of one worker: it trains, evaluates, saves and records."""

    def __init__(
        self, request: RunRequest, worker: Worker, *, resumes: bool = False, compares: bool = True
    ) -> None:
        """Build all that is trained; without published weights if it `resumes`."""
        config, until = request.config, request.until_epoch
        self.config, self.paths, self.worker = config, request.paths, worker
        self._path, self._base = tuple(sys.path), request.identity.content.get("base")
        self.until_epoch = math.inf if until is None else until
        random_state.seed(config.seed)  # the same weights on every rank
        random_state.set_determinism(config.deterministic, worker.device)
        self.data = build.build_data(config, worker)
        self.every = every_of(config.task)
        worker.beat()
        self.compared = comparison.compare(config, self.data, worker) if compares else None
        base = first_weights.base_of(config, self.paths, worker) if resumes else None
        begins = not resumes
        self.learner = build.build_learner(config, self.data, worker, begins=begins, base=base)
        self.data = self.data.of_type(self.learner.module)
        worker.beat()
        self.built = as_built(self.learner.module, self.learner.optimizer, self.learner.scheduler)
        random_state.seed(config.seed + 1 + worker.rank)  # each its own dropout
        self.position = build.build_position(config, self.data)
        never_measured(config, Length.of(config, self.position.steps_per_epoch))
        self.plan = schedules.plan(config.scheduler, **self.position.length)
        self.sums = Sums(
            self.learner.task,
            worker.device,
            finite_only=config.on_nan == "skip",
            repeats_steps=self.learner.strategy.repeats_steps,
            left_out=self.every,
        )
        self.snapshot = Snapshot(self.learner, self.position, self.sums, worker, self.data.train)
        directions = metrics_of(config.task)
        better = directions[config.objective.partition("/")[0]]
        keep, judges = config.checkpoint.keep_best, config.eval_split is not None
        self.history = History(config.objective, better, keep_best=keep, judges=judges)
        self.early_stop = EarlyStop(config.early_stop, directions, config.max_minutes)
        self.times, self._agreed = Times(config), set[str]()
        self._batches: TimedBatches | None = None  # those left of the epoch
        self._batch_checks = BatchChecks(config, self.learner, worker)
        checks = config.tensorboard.health
        self.health = RankHealth(self.learner, self.position, worker, check_weights=checks)
        self.agreement = Agreement(worker)
        self.callbacks = Callbacks(config.callbacks, worker, self.position, directions)
        self.checkpoints = Checkpoints(config, self.paths, self.learner, worker)
        profiled = self.paths if config.profile and worker.rank == 0 else None
        self.steps = Steps(self.learner, worker, request.waited_since, profiled)
        self.first_steps = FirstSteps(config, self.learner, worker, self.callbacks.built)
        fault.arm(self.learner.module, worker.rank, lambda: self.position.step)

    def train(self, source: Path | None = None, observe: Observe = build.build_dashboard) -> str:
        """Train to the end, from the checkpoint `source` if there is one; return the status."""
        if owed := self._begin(source, observe):
            self._take_stock(owed)
        while not (self.is_done or self.is_pruned or self.agreement.stopping):
            self._train_on()
            self._take_stock()
        if self.is_done:
            self._end_run()
        self.steps.close()
        self.checkpoints.wait()
        first_weights.release_fork(self.paths, self.worker)
        if self.is_done:
            if self.judge.needs_best:
                self.snapshot.load_best(self.paths.best)
            self.judge.test()
            return self.record.end(COMPLETED, self._outcome())
        if self.is_pruned:
            return self.record.end(PRUNED, self._outcome())
        return self.record.end(INTERRUPTED, self.history.reached)

    def _begin(self, source: Path | None, observe: Observe) -> Collection[str]:
        """Load the first weights, or the checkpoint `source`, and begin the record.

        Returns the actions that are due at the checkpoint's step, which was written before them.
        """
        config, worker, position = self.config, self.worker, self.position
        data, module = self.data.info.record, self.learner.module
        weights, owed = dict[str, Any](), list[str]()
        if source is None:
            weights |= first_weights.begin_with(config, module, worker, data, self._base)
        else:
            owed = self._resume(source)
            if isinstance(self.data.train, StreamLoader) and not self.is_done:
                with build.patiently(config, worker):
                    self.data.train.catch_up()
        self.snapshot.refuse_unreadable()
        if unreached := self._unreached():
            worker.warn(unreached)
        self._build_record(observe)
        about: dict[str, Any] = {"compared": self.compared} if self.compared else {}
        if isinstance(module, HuggingFace):
            about["base"] = {**module.base}
        self.record.begin(**position.length, data=data, **about)
        worker.beat()
        if weights:
            file = {"file": str(config.weights), "identity": None}
            known = read_result(self.paths).get("weights_from", file)
            self.record.result(weights_from={**known, **weights})
        return owed

    def _build_record(self, observe: Observe) -> None:
        """Build all that writes and shows results, which continue after the position."""
        config, position, writes = self.config, self.position, self.worker.rank == 0
        events = build.build_events(config, self.paths, position, self.is_done) if writes else None
        self.observer = observe(config, events, self.data, self.learner, position)
        self.record = Record(
            self.paths, position, self.history, self.observer,
            writes=writes, is_done=self.is_done, classes=own_code.targets(config), path=self._path,
        )  # fmt: skip
        self.judge = Judge(
            config, self.data, self.learner, position, self.worker, self._batch_checks,
            self.callbacks, self.health, self.history, self.observer, self.early_stop, self.record,
        )  # fmt: skip

    def _unreached(self) -> str | None:
        """Return a line about settings without effect in so short a run; None without any."""
        config, position = self.config, self.position
        begun = {"done": position.step, "forked": position.began_at}
        length = Length.of(config, position.steps_per_epoch, position.offset, **begun)
        of_callbacks = self.callbacks.beyond(position.total_steps)
        of_schedule = schedules.beyond_the_end(config.scheduler, length)
        unreached = {**of_callbacks, **of_schedule, **never_measured(config, length)}
        is_test_of_rates = isinstance(self.learner.scheduler, schedules.RisingRate)
        return None if is_test_of_rates else beyond_the_end(config, length, unreached)

    @property
    def is_done(self) -> bool:
        """True if there is nothing more to train."""
        return self.ended_by is not None

    @property
    def ended_by(self) -> str | None:
        """The key whose value has ended the run."""
        return self.position.ends_by if self.position.is_run_done else self.early_stop.ended_by

    @property
    def is_pruned(self) -> bool:
        """True after the epoch in which the run pauses."""
        return self.position.epoch >= self.until_epoch and not self.position.is_within_epoch

    @progress.phase("loading the checkpoint")
    @sized_by("model")
    def _resume(self, source: Path) -> list[str]:
        """Load the checkpoint `source`, which rank 0 reads; return the actions that it owes."""
        rehearse(self.learner, self.data.blank, self.config.batch_size, self.worker.device)
        is_fork = source.name == self.paths.forked.name
        if is_fork:
            saved = first_weights.load_fork(self.snapshot, self.config, source)
        else:
            saved = self.snapshot.read(source)
        first_weights.refuse_other(self.config, self.data.info, saved)
        if is_fork:  # best and early stopping begin again
            self.history.log(saved["last"])
            self.history.evaluations = saved["evaluations"]
        else:
            self.snapshot.load_state_dict(saved)
            self._load_numbers(saved)
        self.callbacks.load_state_dict(saved.get("callbacks", []))
        self.learner.strategy.load_state_dict(saved)
        self.learner.precision.skipped.fill_(saved["skipped_steps"])
        return [] if is_fork else saved["owed"]

    def _load_numbers(self, saved: Mapping[str, Any]) -> None:
        """Load the numbers that the checkpoint of this run, not of another, has at its step."""
        self.steps.rates = saved["lr"]
        self.history.load_state_dict(saved, has_best=self.snapshot.is_there(self.paths.best))
        if "early_stop" in saved:
            self.early_stop.load_state_dict(saved["early_stop"])
        self.early_stop.is_time_up |= self.times.is_over(self.history.trained_s)

    def _train_on(self) -> None:
        """Train until something is due: an evaluation, a checkpoint, the epoch's or run's end."""
        config, position = self.config, self.position
        if self._batches is None:
            if not position.is_within_epoch:
                position.begin_epoch()
                self.sums.reset()
            self.history.begin_epoch()
            self.health.begin_epoch()
            epoch = self.data.train.epoch(position.epoch, skip=position.step_in_epoch)
            epoch = position.marked(epoch, self.every)
            epoch = self._batch_checks.of_steps(epoch, begins=position.step == 0)
            self._batches = TimedBatches(self.observer.watch(epoch))
        self.judge.weights_changed()
        with self.steps.under_way():
            train_epoch(
                self.learner,
                self._batches,
                position,
                self.sums,
                log_every=config.log_every,
                on_gradients=self.observer.before_update,
                on_step=self._note_step,
                on_log=self._log_running,
                between_steps=self._between_steps,
            )

    def _between_steps(self) -> bool:
        """Call callbacks, agree on due actions, and return whether there are any."""
        position = self.position
        if position.step == 1:  # an optimizer has its state now
            self.snapshot.refuse_unreadable()
        if self.callbacks.are_due:
            with in_use(self.learner.optimizer):
                self.judge.call_back("on_step_end")
        self._agreed = self.agreement.after_step(self._wishes())
        if not position.steps_left_in_epoch:  # the batches end and close their files
            return False
        return bool(self.times.by_steps(position) | self._agreed) or self.agreement.stopping

    def _wishes(self) -> set[str]:
        """Return the actions that are due by this worker's clock; rank 0 also measures training."""
        return self.times.by_clock(self.history if self.worker.rank == 0 else None)

    def _take_stock(self, owed: Collection[str] = ()) -> None:
        """End the epoch, evaluate and save, each if it is due.

        The actions that a checkpoint has `owed` are done now; the epoch has ended before it.
        """
        ends_epoch = not self.position.is_within_epoch
        if ends_epoch and not owed:
            self._end_epoch()
        due = self.times.by_steps(self.position) | self._agreed | {*owed}
        with self._in_use() as weights:
            if "evaluate" in due and not owed:
                self._save_before(due, weights)
            is_kept = "evaluate" in due and self._judge()
            if ends_epoch:
                self.judge.call_back("on_epoch_end")
            due |= self.agreement.meet(self._wishes() | due)
            self.early_stop.is_time_up |= "end" in due
            if ends_epoch:
                self.health.refuse_unequal()
            saves = "save" in due or self.is_pruned or self.agreement.stopping
            if is_kept or (self._has_ended if self.is_done else saves):
                self._save(weights, self.history.bests if is_kept else ())

    def _save_before(self, due: set[str], weights: list[Tensor]) -> None:
        """Save before an evaluation, if its failure would cost much training.

        The attempt's first may fail, and in a long one workers that are to stop are killed.
        """
        history = self.history
        is_long = history.eval_s > signals.IMPATIENT_S * history.evaluations
        may_fail = is_long or not self.judge.has_judged
        wishes = {"save"} if may_fail and self.times.unsaved_s > LONG_S else set[str]()
        if "save" in self.agreement.meet(wishes):
            self._save(weights, owed=sorted(due), waits=True)

    def _end_run(self) -> None:
        """End the epoch and evaluate, where neither would be due if the run were longer.

        The state is saved before, for a longer run to continue from.
        """
        if self._has_ended:
            return
        earlier, is_within_epoch = self.history.bests, self.history.is_within_epoch
        with self._in_use() as weights:
            self._save(weights, waits=True)
        if self.worker.rank == 0:
            checkpoint_file.keep_as(self.paths.last, self.paths.before_end)
        if is_within_epoch:
            self._end_epoch()
            self.judge.weights_changed()  # an optimizer with other weights rounds them again
        is_kept = self.history.evaluated_at != self.position.step and self._judge()
        if is_within_epoch:
            self.judge.call_back("on_epoch_end")
            self.health.refuse_unequal()
        self._save([], [*self.history.bests, *earlier] if is_kept else ())

    @property
    def _has_ended(self) -> bool:
        """True if the epoch and an evaluation have ended with the last step."""
        history = self.history
        return history.evaluated_at == self.position.step and not history.is_within_epoch

    def _in_use(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Have the weights to be used, which all are after an epoch; see in_use."""
        optimizer = self.learner.optimizer
        return in_use(optimizer) if self.history.is_within_epoch else contextlib.nullcontext([])

    def _end_epoch(self) -> None:
        """Log the epoch's numbers, whether all of its steps are done or the run ends within it."""
        switch(self.learner.optimizer, "eval")
        self.first_steps.refuse_late()
        total = self.health.end_epoch(self.sums.values, wish=self.observer.wants_review)
        waited_s = self._batches.waited_s if self._batches else 0.0
        self._batches = None
        values, seconds = self.sums.averages(total), self.history.end_epoch()
        refuse_weightless(values, self.learner.task, self.position.epoch)
        self._refuse_loss(values)
        points = {
            **tagged(values, "train"),
            tags.SAMPLES_PER_S: values.samples / seconds,
            tags.EPOCH_S: seconds,
            tags.DATA_WAIT_S: waited_s,
        }
        if self.position.step % self.config.log_every:  # else just logged
            points |= self.steps.rates
        if self.config.on_nan == "skip":
            points[tags.SKIPPED_STEPS] = self.learner.precision.skipped.item()
        self.record.log(points)
        if self.config.tensorboard.health:
            self.record.log(self.health.scalars(), all_of="ranks/")
        self.observer.end_epoch()
        scheduler = self.learner.scheduler
        by_epoch = self.learner.scheduler_interval == "epoch"
        if by_epoch and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()

    def _note_step(self) -> None:
        is_first = self.steps.first_s is None
        self.steps.done()
        self.first_steps.step()
        if is_first:
            self.record.note_sources()
        self.record.end_step(self.config.batch_size)

    def _log_running(self, values: Averages | None, samples_per_s: float | None = None) -> None:
        """Log the averages since the last log point, and where this is one the speed."""
        if values is None:
            return
        self._refuse_loss(values)
        points = tagged(values, None, self.worker.warn)
        if samples_per_s is not None:
            points |= {**self.steps.rates, tags.RUNNING_SAMPLES_PER_S: samples_per_s}
        self.record.log(points)

    def _judge(self) -> bool:
        """Evaluate; return whether it is one of the best, whose checkpoints are kept."""
        if self.history.is_within_epoch:  # next to the evaluation's metrics; no log point
            self._log_running(averages_since_logged(self.learner, self.sums))
        return self.judge.judge()

    def _save(
        self,
        weights: list[Tensor],
        bests: Sequence[Best] = (),
        *,
        owed: Sequence[str] = (),
        waits: bool = False,
    ) -> None:
        """Begin to write a checkpoint, or wait until it is written; a collective.

        The optimizer trains at `weights`, if at others than the model's; `bests` are to be kept
        where this is one of them; `owed` are actions at this step that are done after it.
        """
        self.first_steps.end(within_epoch=self.position.is_within_epoch or bool(owed))
        state = self.snapshot.state_dict()
        if weights and self.learner.strategy.shards == 1:  # one worker has all
            state[TRAINED] = weights
        if not all(loss_is_finite(part["sums"]) for part in state["workers"]):
            self._stop_at_loss()
        self.checkpoints.wait()  # it is whole, if the weights are refused now
        first_weights.release_fork(self.paths, self.worker)
        diagnosis.refuse_weights(self.learner.module, self.position, diagnosis.fix_for(self.config))
        self.times.saved()
        about = functools.partial(self._about, owed)
        steps = [best["step"] for best in bests]
        self.checkpoints.save(state, about, bests=steps, waits=waits)

    def _about(self, owed: Sequence[str]) -> dict[str, Any]:
        """Return the entries that rank 0 adds to a checkpoint."""
        bests, step, info = self.history.bests, self.position.step, self.data.info
        about = {
            **self.history.state_dict(),
            **self.record.state_dict(),
            "evaluated": next((one for one in bests if one["step"] == step), None),
            "owed": [*owed],
            "config": shown(self.config),
            "plan": self.plan,
            "built": self.built,
            "lr": self.steps.rates,
            "data": info.record,
            "sizes": info.sizes,
            "steps_per_epoch": self.position.steps_per_epoch,
            **self.learner.strategy.state_dict(),
        }
        if self.config.early_stop:
            about["early_stop"] = self.early_stop.state_dict()
        if self.config.callbacks:
            about["callbacks"] = self.callbacks.state_dict()
        return about

    def _refuse_loss(self, values: Averages) -> None:
        if values.has_weight and not math.isfinite(values.loss):
            self._stop_at_loss()

    def _stop_at_loss(self) -> None:
        self.checkpoints.wait()
        diagnosis.stop_at_loss(
            self.sums, self.position, self.data.train, self.worker, diagnosis.fix_for(self.config)
        )

    def _outcome(self) -> dict[str, Any]:
        history, position, trained_s = self.history, self.position, sum(self.history.epoch_s)
        images = position.samples(self.config.batch_size, self.data.train.size)
        stopped: StoppedEarly | None = None
        if self.is_done and not position.is_run_done:
            reason = self.early_stop.reason
            stopped = {"epoch": position.epoch, "step": position.step, "reason": reason}
        return {
            **history.reached,
            **self.learner.strategy.state_dict(),
            "stopped_early": stopped,
            **({"ended_by": self.ended_by} if self.ended_by else {}),
            "eval_s": history.eval_s,
            "dashboard_s": self.observer.spent_s + self.health.spent_s,
            "samples_per_s": images / trained_s if trained_s else None,
            "first_step_s": self.steps.first_s,
            "steps": position.step,
        }
