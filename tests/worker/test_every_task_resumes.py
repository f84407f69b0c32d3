"""A run of any task that was killed goes on to the same bits."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.config.schema import RunConfig
from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.training.observer import Observer
from expt.worker import fault
from expt.worker.run import Run
from tests import ranks
from tests.conftest import Configured, RunFolder
from tests.every_task import CASES, config_of

WORKERS, KILLED_IN = 2, 8
"""The step is within the second epoch, and between two log points."""


def trained(folder: Path, config: RunConfig, worker: Worker, source: Path | None = None) -> str:
    folder.mkdir(exist_ok=True)
    run = Run(config, RunPaths(folder), worker, typed_at=0.0, beat=lambda: None)
    return run.train(source, lambda *_: Observer())


def killed(folder: Path, config: RunConfig, worker: Worker) -> None:
    patch = pytest.MonkeyPatch()  # of this process alone, which is to die
    patch.setenv(fault.VARIABLE, f"{worker.rank}:{KILLED_IN}:kill")
    trained(folder, config, worker)


def values(folder: Path) -> dict[tuple[str, int], float]:
    """Of each point: what was done again has been told twice."""
    points = map(json.loads, RunFolder(folder).points)
    return {(point["tag"], point["step"]): point["value"] for point in points}


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")  # of three samples, not of each class
def test_killed_runs_go_on_to_the_same_bits(configured: Configured, tmp_path: Path) -> None:
    often: dict[str, Any] = {"epochs": 2, "log_every": 3, "world_size": WORKERS, "gradient_accumulation": 3}
    configs = {}
    for name in CASES:
        config = dataclasses.replace(config_of(name, configured), drop_last=False, **often)
        saves = dataclasses.replace(config.checkpoint, every_steps=KILLED_IN - 1)
        configs[name] = dataclasses.replace(config, checkpoint=saves)

    def whole(worker: Worker) -> list[str]:
        return [trained(tmp_path / f"{name}, whole", config, worker) for name, config in configs.items()]

    def resumed(worker: Worker) -> list[str]:
        ended = []
        for name, config in configs.items():
            folder = tmp_path / f"{name}, killed"
            ended.append(trained(folder, config, worker, RunPaths(folder).last))
        return ended

    for name, config in configs.items():
        (store := tmp_path / f"store of {name}").mkdir()
        ends = ranks.ends_of(store, WORKERS, functools.partial(killed, tmp_path / f"{name}, killed", config))
        assert ends[0] == -signal.SIGKILL
    for each in (whole, resumed):
        (store := tmp_path / each.__name__).mkdir()
        assert ranks.together(store, WORKERS, each) == [["completed"] * len(CASES)] * WORKERS
    for name in CASES:
        folders = [tmp_path / f"{name}, {how}" for how in ("whole", "killed")]
        states = [checkpoint.load(RunPaths(folder).last) for folder in folders]
        for key, weights in states[0]["model"].items():
            assert torch.equal(weights, states[1]["model"][key]), (name, key)
        sums = [[worker["sums"] for worker in state["workers"]] for state in states]
        assert sums[0] == sums[1], name
        assert values(folders[0]) == pytest.approx(values(folders[1]), abs=0, nan_ok=True), name
