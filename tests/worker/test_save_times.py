"""When a checkpoint is due."""

from __future__ import annotations

from expt.config.schema import Checkpoint
from expt.training.learner import Position
from expt.worker.steps import SaveTimes


def at(epoch: int, step: int) -> Position:
    """After `step` of 30 steps, 10 an epoch."""
    within = step - (epoch - 1) * 10
    return Position(10, total_steps=30, epoch=epoch, step=step, step_in_epoch=within)


def test_by_the_clock_since_the_last() -> None:
    now = 0.0
    times = SaveTimes(
        Checkpoint(every_steps=None, every_epochs=None, every_minutes=2, keep=0), clock=lambda: now
    )
    now = 120.0
    assert not times.is_due_by_clock()
    now = 121.0
    assert times.is_due_by_clock()
    assert times.is_due(at(1, 10))
    times.saved()
    assert not times.is_due_by_clock()
    now = 242.0
    assert times.is_due_by_clock()
