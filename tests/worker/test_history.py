"""What a run remembers: which value is the best, and how long it took over all attempts."""

from __future__ import annotations

import math

import pytest

from expt.config.kinds import Better
from expt.worker.record import History, is_better


@pytest.mark.parametrize(
    ("value", "than", "better", "expected"),
    [
        (0.5, None, "min", True),
        (0.5, 0.6, "min", True),
        (0.6, 0.5, "min", False),
        (0.5, 0.5, "min", False),
        (0.6, 0.5, "max", True),
        (0.5, 0.6, "max", False),
        (0.5, 0.5, "max", False),
        (math.nan, None, "max", False),
        (math.nan, 0.5, "min", False),
        (-math.inf, 0.5, "min", False),
        (math.inf, 0.5, "max", False),
    ],
)
def test_lower_or_higher_is_better_and_what_is_not_finite_never(
    value: float, than: float | None, better: Better, expected: bool
) -> None:
    assert is_better(value, than, better) is expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_objective_that_no_epoch_can_be_best_by_is_told_once(value: float) -> None:
    history = History("acc/val", "max")
    assert history.why_no_best(1) is None, "nothing was evaluated"
    history.last["acc/val"] = value
    assert (history.why_no_best(1) or "").startswith(
        f"objective acc/val is {value:g} after epoch 1: no epoch"
    )
    assert history.why_no_best(2) is None
    later = History("acc/val", "max")
    later.last["acc/val"] = 0.5
    later.note_evaluation(1, 10)
    later.last["acc/val"] = value
    assert later.why_no_best(2) is None, "epoch 1 is the best"


def test_the_time_of_an_epoch_counts_both_attempts() -> None:
    now = 100.0
    first = History("loss/val", "min", clock=lambda: now)
    first.begin_epoch()
    now = 103.0
    assert first.end_epoch() == 3.0
    first.begin_epoch()
    now = 105.0
    first.last, first.eval_s = {"loss/val": 1.0}, 0.5
    state = first.state_dict()
    assert state["elapsed_s"] == 2.0
    second = History("loss/val", "min", clock=lambda: now)
    second.load_state_dict(state)
    now = 1000.0
    second.begin_epoch()
    now = 1004.0
    assert second.end_epoch() == 6.0
    assert (second.epoch_s, second.eval_s, second.last) == ([3.0, 6.0], 0.5, {"loss/val": 1.0})
    second.begin_epoch()
    now = 1005.0
    assert second.end_epoch() == 1.0, "the epoch after counts from zero"
    assert second.state_dict()["elapsed_s"] == 0.0
    assert first.epoch_s == [3.0], "the second has a list of its own"


def test_a_best_whose_weights_are_gone_is_no_best() -> None:
    before, history = History("loss/val", "min"), History("loss/val", "min")
    before.last = {"loss/val": 0.5}
    assert before.note_evaluation(1, 10)
    history.load_state_dict(before.state_dict(), has_best=False)
    history.last = {"loss/val": 0.9}
    assert history.note_evaluation(2, 20)
    assert history.reached["objective"]["value"] == 0.9
