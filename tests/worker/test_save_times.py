"""When an evaluation, a checkpoint and the end are due."""

from __future__ import annotations

import pytest

from expt.training.learner import Position
from expt.worker.record import History
from expt.worker.steps import Times
from tests.conftest import Configured, as_typed

NEVER = as_typed("checkpoint.every_epochs=null eval_every_steps=99")


def at(step: int) -> Position:
    """After `step` of 30 steps, 10 an epoch."""
    epoch = -(-step // 10)
    return Position(10, 30, epoch=epoch, step=step, step_in_epoch=step - (epoch - 1) * 10)


@pytest.mark.parametrize(
    ("words", "evaluate", "save"),
    [
        (NEVER, [], []),
        ((), [10, 20, 30], [10, 20, 30]),
        (
            as_typed("checkpoint.every_steps=8 checkpoint.every_epochs=2 eval_every_steps=7"),
            [7, 14, 21, 28],
            [8, 16, 20, 24],
        ),
    ],
)
def test_by_steps_and_by_epochs(
    words: list[str], evaluate: list[int], save: list[int], configured: Configured
) -> None:
    times = Times(configured(*words))
    due = {step: times.by_steps(at(step)) for step in range(1, 31)}
    for what, steps in {"evaluate": evaluate, "save": save}.items():
        assert [step for step in due if what in due[step]] == steps
    assert times.by_clock(History("loss/val", "min")) == set()


def test_by_the_clocks_since_the_last(configured: Configured) -> None:
    now = trained = 0.0
    history = History("loss/val", "min", clock=lambda: trained)
    words = as_typed("checkpoint.every_minutes=2 eval_every_minutes=3 max_minutes=4")
    times = Times(configured(*NEVER, *words), clock=lambda: now)
    history.begin_epoch()
    now = 120.0
    assert times.by_clock(history) == set()
    now, trained = 121.0, 180.0
    assert times.by_clock(history) == {"save", "evaluate"}
    assert times.by_clock(None) == {"save"}, "of another rank"
    times.saved()
    history.note_evaluation(1, 5)
    assert times.by_clock(history) == set()
    trained = 240.0
    assert times.by_clock(history) == {"end"}
