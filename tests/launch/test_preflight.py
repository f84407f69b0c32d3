"""How long runs take together, by the lengths that a preflight has found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from expt.launch.job import Options
from expt.launch.preflight import Tried, together_s
from expt.machine import Machine
from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from tests.conftest import Configured
from tests.requests import request

TWO_CORES = Machine(cpus=2)
METRICS = {"start_s": 1.0, "first_step_s": 0.5, "step_s": 0.1, "eval_s": 2.0}


def test_runs_of_one_core_share_a_machine_and_larger_ones_have_it_alone(
    configured: Configured,
) -> None:
    small, large = configured("world_size=1", "threads=1"), configured("world_size=2", "threads=1")
    assert together_s([(small, 3.0), (small, 5.0)], TWO_CORES, Options()) == 5.0
    assert together_s([(small, 3.0), (small, 5.0), (large, 10.0)], TWO_CORES, Options()) == 15.0
    assert together_s([(small, 3.0), (small, 5.0)], TWO_CORES, Options(max_concurrent=1)) == 8.0
    assert together_s([], TWO_CORES, Options()) == 0.0


def test_a_run_of_another_length_takes_as_much_longer(tmp_path: Path) -> None:
    tried = Tried(None, {"metrics": METRICS, "steps_per_epoch": 10})

    def seconds(**config: Any) -> float:
        return tried.seconds(request(tmp_path, **config))

    assert seconds(epochs=1) == pytest.approx(1 + 0.5 + 9 * 0.1 + 2)
    assert seconds(epochs=3) == pytest.approx(1 + 0.5 + 29 * 0.1 + 6)
    assert seconds(epochs=3, max_steps=12) == pytest.approx(1 + 0.5 + 11 * 0.1 + 4)


def test_what_is_done_of_a_run_takes_no_time_any_more(tmp_path: Path) -> None:
    tried = Tried(None, {"metrics": METRICS, "steps_per_epoch": 10})
    asked = request(tmp_path / "own", epochs=4)
    whole, left = (1 + 0.5 + 39 * 0.1 + 8), pytest.approx(1 + 0.5 + 14 * 0.1 + 4)
    position = {"step": 25, "epoch": 3, "step_in_epoch": 5}
    state = {"model": {}, "position": position, "config": {}, "workers": [], "steps_per_epoch": 10}
    assert tried.seconds(asked) == pytest.approx(whole)
    for folder in (asked.paths, RunPaths(tmp_path / "other")):
        folder.checkpoints.mkdir(parents=True)
        checkpoint.save(folder.last, state)
    assert tried.seconds(asked) == pytest.approx(whole), "it does not go on from there"
    assert tried.seconds(dataclasses.replace(asked, may_have_run=True)) == left
    new = request(tmp_path / "new", epochs=4)
    assert tried.seconds(dataclasses.replace(new, goes_on_from=tmp_path / "other")) == left
    for resume in (folder.folder, folder.last):
        assert tried.seconds(request(tmp_path / "new", epochs=4, resume=str(resume))) == left
    content: Any = {"data": None, "code": None}
    create_result(
        folder, identity="a", seedless_identity="b", config={}, content=content, arguments=[]
    )
    fork = request(tmp_path / "new", epochs=4, fork=str(folder.folder))
    assert tried.seconds(fork) == pytest.approx(1 + 0.5 + 19 * 0.1 + 4), (
        "the whole epochs of its parent"
    )
    assert tried.seconds(
        request(tmp_path / "new", epochs=4, fork=f"{folder.folder}@7")
    ) == pytest.approx(whole)
    done = request(asked.paths.folder, epochs=2, may_have_run=True)
    assert tried.seconds(done) == 3, "it ends with its test"
