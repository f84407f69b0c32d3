"""How long runs take together, by the lengths that a preflight has found."""

from __future__ import annotations

import pytest

from expt.launch.job import Options
from expt.launch.preflight import Tried, together_s
from expt.machine import Machine
from tests.conftest import Configured

TWO_CORES = Machine(cpus=2)


def test_runs_of_one_core_share_a_machine_and_larger_ones_have_it_alone(configured: Configured) -> None:
    small, large = configured("world_size=1", "threads=1"), configured("world_size=2", "threads=1")
    assert together_s([(small, 3.0), (small, 5.0)], TWO_CORES, Options()) == 5.0
    assert together_s([(small, 3.0), (small, 5.0), (large, 10.0)], TWO_CORES, Options()) == 15.0
    assert together_s([(small, 3.0), (small, 5.0)], TWO_CORES, Options(max_concurrent=1)) == 8.0
    assert together_s([], TWO_CORES, Options()) == 0.0


def test_a_run_of_another_length_takes_as_much_longer(configured: Configured) -> None:
    metrics = {"start_s": 1.0, "first_step_s": 0.5, "step_s": 0.1, "eval_s": 2.0}
    tried = Tried(None, {"metrics": metrics, "steps_per_epoch": 10})
    assert tried.seconds(configured("epochs=1")) == pytest.approx(1 + 0.5 + 9 * 0.1 + 2)
    assert tried.seconds(configured("epochs=3")) == pytest.approx(1 + 0.5 + 29 * 0.1 + 6)
    assert tried.seconds(configured("epochs=3", "max_steps=12")) == pytest.approx(1 + 0.5 + 11 * 0.1 + 4)
