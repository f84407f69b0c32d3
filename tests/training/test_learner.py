"""How far a run has come, and how far it is to go."""

from __future__ import annotations

from expt.training.learner import Position


def test_epochs_of_four_steps_of_which_the_last_is_cut_short() -> None:
    position = Position(steps_per_epoch=4, total_steps=6)
    left, within = [], []
    for _ in range(2):
        position.begin_epoch()
        while position.steps_left_in_epoch:
            position.advance()
            left.append(position.steps_left_in_epoch)
            within.append(position.is_within_epoch)
    assert left == [3, 2, 1, 0, 1, 0]
    assert within == [True, True, True, False, True, True]
    assert position.is_run_done
    assert position.state_dict() == {"epoch": 2, "step": 6, "step_in_epoch": 2}


def test_a_longer_run_continues_within_the_epoch() -> None:
    position = Position(steps_per_epoch=4, total_steps=12)
    assert not position.is_within_epoch
    position.load_state_dict({"epoch": 2, "step": 6, "step_in_epoch": 2})
    assert (position.is_within_epoch, position.is_run_done, position.steps_left_in_epoch) == (
        True,
        False,
        2,
    )
    shorter = Position(steps_per_epoch=4, total_steps=5)
    shorter.load_state_dict(position.state_dict())
    assert (shorter.is_run_done, shorter.steps_left_in_epoch) == (True, 0)
