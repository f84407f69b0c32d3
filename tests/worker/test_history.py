"""What a run remembers: the best value, how long it took over all attempts, and what is due."""

from __future__ import annotations

import math

from expt.worker.record import History
from expt.worker.steps import Times
from tests.conftest import Configured
from tests.facade import as_typed


def test_what_was_finite_once_has_a_best() -> None:
    history = History("acc/val", "max")
    assert history.why_no_best(1) is None, "nothing was evaluated"
    for epoch, (value, is_best) in enumerate(((math.inf, False), (0.5, True), (math.inf, False))):
        history.last["acc/val"] = value
        assert history.note_evaluation(epoch, 10 * epoch) == is_best
    assert history.why_no_best(2) is None, "epoch 1 is the best"
    never = History("acc/val", "max")
    never.last["acc/val"] = math.inf
    assert "acc/val is inf after epoch 1: no epoch" in (never.why_no_best(1) or "")
    assert never.why_no_best(2) is None, "it is told once"


def test_a_best_whose_weights_are_gone_is_no_best() -> None:
    before, history = History("loss/val", "min"), History("loss/val", "min")
    before.last = {"loss/val": 0.5}
    assert before.note_evaluation(1, 10)
    history.load_state_dict(before.state_dict(), has_best=False)
    history.last = {"loss/val": 0.9}
    assert history.note_evaluation(2, 20)
    assert history.reached["objective"]["value"] == 0.9


def test_by_the_clocks_since_the_last(configured: Configured) -> None:
    now = trained = 0.0
    history = History("loss/val", "min", clock=lambda: trained)
    words = as_typed(
        "checkpoint.every_minutes=2 eval_every_minutes=3 max_minutes=4 checkpoint.every_epochs=null"
    )
    times = Times(configured(*words), clock=lambda: now)
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
