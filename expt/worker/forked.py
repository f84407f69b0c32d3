"""How a run begins as a fork of another: from its checkpoint, with the settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from expt.config import constraints
from expt.config.groups import Plateau, TargetScheduler
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.config.tasks import metrics_of
from expt.errors import ConfigError, warn
from expt.runs import checkpoint_file
from expt.runs.paths import RunPaths
from expt.training import optim
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.training.optimizer_state import Earlier, carry_over
from expt.worker.snapshot import Snapshot

State = Mapping[str, Any]


def load(snapshot: Snapshot, config: RunConfig, source: Path) -> State:
    """Go on from another run's checkpoint `source`, which rank 0 reads; returns what it holds.

    A collective.

    Raises ConfigError where its weights don't fit the model.
    """
    learner, position = snapshot.learner, snapshot.position
    before = recorded(snapshot.config_of(source))
    optimizer = optim.build_optimizer(
        before.optimizer, learner.module, unguarded=config.patches.unguarded
    )
    optimizer.state.clear()  # memory that nothing needs
    saved = snapshot.read(source, written_by=optimizer)
    _load_weights(learner, saved, config)
    position.load_state_dict(saved["position"])
    position.begin_fork(saved.get("steps_per_epoch") or position.steps_per_epoch)
    place, warns = _place(snapshot, config), snapshot.worker.rank == 0
    _carry_over(learner, config, before, optimizer, saved, place=place, warns=warns)
    if saved["scaler"]:
        learner.precision.scaler.load_state_dict(saved["scaler"])
    snapshot.load_workers(
        saved["workers"], sums=position.is_within_epoch, random=before.seed == config.seed
    )
    return saved


def _load_weights(learner: Learner, saved: State, config: RunConfig) -> None:
    try:
        learner.module.load_state_dict(saved["model"])
        if learner.ema is not None:
            if "ema" in saved:
                learner.ema.load_state_dict(saved["ema"])
            else:  # it begins with these weights
                learner.ema.module.load_state_dict(saved["model"])
    except RuntimeError as error:
        told = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"fork={config.fork}: the weights of its checkpoint are not those of this model"
            f" ({told}); begin a further run, with what fits of them, by weights=RUN@last"
        ) from error


def _place(snapshot: Snapshot, config: RunConfig) -> int:
    """How often the schedule has been advanced, had it always been this one."""
    position = snapshot.position
    if snapshot.learner.scheduler_interval == "epoch":
        return position.epoch - position.is_within_epoch
    return position.step - position.offset


def _carry_over(
    learner: Learner,
    config: RunConfig,
    before: RunConfig,
    optimizer: Optimizer,
    saved: State,
    *,
    place: int,
    warns: bool,
) -> None:
    """`optimizer` is as it was `before`, without its state, which is in `saved`."""
    optim.scale_lr(
        optimizer,
        before.lr_scaling,
        before.batch_size / (before.base_batch_size or before.batch_size),
    )
    steps_per_epoch = saved.get("steps_per_epoch") or 1
    total_steps = before.epochs * steps_per_epoch
    scheduler = optim.build_scheduler(
        before.scheduler,
        optimizer,
        steps_per_epoch=steps_per_epoch,
        total_steps=min(total_steps, before.max_steps or total_steps),
        better=metrics_of(before.task),
    )
    same_optimizer = _kind(before.optimizer) == _kind(config.optimizer)
    if warns and not same_optimizer:
        was, now = constraints.word(before.optimizer), constraints.word(config.optimizer)
        warn(
            f"fork={config.fork}: was trained by {was}; the state of {now} (its momentum) begins"
            " anew"
        )
    carry_over(
        learner.optimizer,
        learner.scheduler,
        Earlier(optimizer, scheduler, saved["optimizer"], saved["scheduler"]),
        same_optimizer=same_optimizer,
        same_schedule=_goes_on(before.scheduler, config.scheduler),
        place=place,
    )


def _kind(chosen: Any) -> str:
    """Equal for optimisers of which one can go on from the other's state."""
    name = constraints.word(chosen)
    return "adam" if name == "adamw" else name


def _goes_on(before: Any, now: Any) -> bool:
    """Whether what a schedule has come to counts for the other."""
    if isinstance(before, Plateau) and isinstance(now, Plateau):
        return before.metric == now.metric
    return bool(before == now) if isinstance(now, TargetScheduler) else type(before) is type(now)


def release(paths: RunPaths, worker: Worker) -> None:
    """Remove the other run's checkpoint, on rank 0, where the run has one of its own by now."""
    if worker.rank == 0 and paths.forked.exists() and paths.last.exists():
        for path in paths.checkpoints.glob(f"{paths.forked.name}*"):
            path.unlink()
        if paths.parts:
            checkpoint_file.remove_unnamed(paths.checkpoints)
