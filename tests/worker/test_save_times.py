"""When a checkpoint is due."""

from __future__ import annotations

from expt.config.schema import Checkpoint
from expt.training.learner import Position
from expt.worker.steps import SaveTimes


def at(epoch: int, step: int) -> Position:
    """After `step` of 30 steps, 10 an epoch."""
    within = step - (epoch - 1) * 10
    return Position(10, total_steps=30, epoch=epoch, step=step, step_in_epoch=within)


def test_never_of_themselves() -> None:
    times = SaveTimes(Checkpoint(every_steps=None, every_epochs=None, every_minutes=None, keep=0))
    assert not any(times.is_due_by_steps(at(1, step)) for step in range(1, 10))
    assert not any(times.is_due(at(epoch, epoch * 10)) for epoch in (1, 2, 3))


def test_by_epochs_and_by_steps() -> None:
    times = SaveTimes(Checkpoint(every_steps=4, every_epochs=2, every_minutes=None, keep=0))
    assert [step for step in range(1, 13) if times.is_due_by_steps(at(1, step))] == [4, 8, 12]
    assert [times.is_due(at(epoch, epoch * 10)) for epoch in (1, 2)] == [False, True]
    assert times.is_due(at(2, 12)), "within an epoch, too"


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
