"""A run in this process, as `debug=true` has it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command.preflight import Tried, _total, together_s
from expt.errors import ConfigError, DataError, Diverged, RunFailed
from expt.launch.pool import PoolOptions
from expt.machine import Machine
from expt.runs import continuing
from expt.runs.failure import LOG, RAISED
from expt.runs.may_continue import Source
from expt.runs.named_checkpoint import Checkpoint
from expt.runs.result import create_result, update_result
from expt.runs.view.summary import how_to_continue
from tests.conftest import Configured
from tests.facade import Patch, request

OWN = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes - 1))
"""


@pytest.mark.parametrize("mine", [None, "logs/mine.txt"])
def test_refused_run_leaves_no_trace(mine: str | None, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("+model._target_=wide_net.Net", "~model.hidden", "~model.dropout")
    (tmp_path / "wide_net.py").write_text(OWN)
    folder = tmp_path / "run"
    folder.mkdir()
    if mine:
        (folder / mine).parent.mkdir(exist_ok=True)
        (folder / mine).touch()
    with pytest.raises(ConfigError):
        expt.run(*words, "world_size=1", f"hydra.run.dir={folder}")
    assert (folder / mine).exists() if mine else not folder.exists()


def test_failed_run_says_how_to_continue(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = request(tmp_path / "run", epochs=10)
    create_result(asked.paths, steps_per_epoch=20)
    update_result(asked.paths, status="failed", error="sample 3: no")
    for error in (RunFailed("rank 0 of 2 was killed by SIGKILL"), ConfigError("sample 3: no")):
        way = how_to_continue(asked, error)
        assert way.endswith("python -m expt hydra.run.dir=run resume=auto")
    files = request(tmp_path / "run", epochs=10, content={"data": "of files"})
    assert how_to_continue(files, DataError("sample 3: no")).endswith("weights=run@last")
    own = request(tmp_path / "run", epochs=10, content={"code": "of a class"})
    for error in (DataError("sample 3: no"), RunFailed(f"rank 0{RAISED}ValueError: no\n\n{LOG}a")):
        assert "resume=run " in how_to_continue(own, error), "an edited one, too"
    for error in (ConfigError("another refusal"), Diverged("sample 3: no")):
        assert how_to_continue(asked, error) == ""


TWO_CORES = Machine(cpus=2)
METRICS = {"start_s": 1.0, "first_step_s": 0.5, "step_s": 0.1, "eval_s": 2.0}


def test_small_runs_share_a_machine_large_ones_wait(configured: Configured) -> None:
    small, large = configured("world_size=1", "threads=1"), configured("world_size=2", "threads=1")
    assert together_s([(small, 3.0), (small, 5.0)], TWO_CORES, PoolOptions()) == 5.0
    assert together_s([(small, 3.0), (small, 5.0), (large, 10.0)], TWO_CORES, PoolOptions()) == 15.0
    assert together_s([(small, 3.0), (small, 5.0)], TWO_CORES, PoolOptions(max_concurrent=1)) == 8.0
    assert together_s([], TWO_CORES, PoolOptions()) == 0.0


def test_estimated_time_counts_steps_left(tmp_path: Path, monkeypatch: Patch) -> None:
    tried = Tried(None, {"metrics": METRICS, "steps_per_epoch": 10})

    def seconds(**config: Any) -> float:
        return tried.seconds(request(tmp_path, **config))

    assert seconds(epochs=1) == pytest.approx(1 + 0.5 + 9 * 0.1 + 2)
    assert seconds(epochs=3) == pytest.approx(1 + 0.5 + 29 * 0.1 + 6)
    assert seconds(epochs=3, max_steps=12) == pytest.approx(1 + 0.5 + 11 * 0.1 + 4)
    source = Source("resume", Checkpoint(tmp_path, {"position": {"step": 20}}))
    monkeypatch.setattr(continuing, "find", lambda *_, **__: source)
    assert seconds(epochs=3) == pytest.approx(1 + 0.5 + 9 * 0.1 + 2)
    monkeypatch.setattr(continuing, "find", lambda *_, **__: source._replace(rule="fork"))
    assert seconds(epochs=3) == pytest.approx(1 + 0.5 + 9 * 0.1 + 2), "it has the steps before"


def test_a_limit_of_minutes_leaves_the_evaluations_until_then(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    measured = {"start_s": 2.0, "first_step_s": 6.0, "step_s": 6.0, "eval_s": 5.0}
    tried = Tried(None, {"metrics": measured, "steps_per_epoch": 10})
    long = request(tmp_path, epochs=1000, max_minutes=10)
    assert tried.seconds(long) == pytest.approx(2 + 600 + 10 * 5)
    state = {"position": {"step": 90}, "epoch_s": [60.0] * 8, "elapsed_s": 60.0}
    source = Source("resume", Checkpoint(tmp_path, state))
    monkeypatch.setattr(continuing, "find", lambda *_, **__: source)
    assert tried.seconds(long) == pytest.approx(2 + 60 + 5), "the limit is over all resumes"


def test_a_total_names_the_devices_of_all_runs(configured: Configured) -> None:
    lengths = [(configured("world_size=1", "threads=1"), 3.0)]
    machine = Machine(cpus=2, gpus=("0",))
    assert " on 2 cores: until " in _total(lengths, machine, PoolOptions(), None)
    lengths += [(dataclasses.replace(lengths[0][0], gpus=1), 3.0)]
    assert " on 2 cores and 1 GPU: until " in _total(lengths, machine, PoolOptions(), None)
