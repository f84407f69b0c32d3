"""A run of any task that broke off goes on to the same bits."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.config.schema import RunConfig
from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.worker import fault
from expt.worker.run import Run
from tests import ranks
from tests.conftest import Configured, RunFolder
from tests.every_task import CASES, config_of
from tests.worker.sharded import Observer

HALVES = [[*CASES][:3], [*CASES][3:]]
SAVED, KILLED_IN, LOGGED = 2, 9, 4
"""The step is within the second epoch of five. What was begun to be saved before it, after step 8,
may not have been
written; that of step 6 has, between two log points."""


def trained(folder: Path, config: RunConfig, worker: Worker, source: Path | None = None) -> str:
    folder.mkdir(exist_ok=True)
    run = Run(config, RunPaths(folder), worker, typed_at=0.0, beat=lambda: None)
    return run.train(source, lambda *_: Observer())


def broken_off(folder: Path, config: RunConfig, worker: Worker) -> None:
    """Train until an exception in the middle of a step, which leaves what was saved before."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fault.VARIABLE, f"{worker.rank}:{KILLED_IN}:raise")
        run = Run(config, RunPaths(folder), worker, typed_at=0.0, beat=lambda: None)
    with pytest.raises(Exception, match="a fault on purpose"):
        run.train(None, lambda *_: Observer())
    run.checkpoints.wait()


def values(folder: Path) -> dict[tuple[str, int], float]:
    """Of each point: what was done again has been told twice."""
    points = map(json.loads, RunFolder(folder).points)
    return {(point["tag"], point["step"]): point["value"] for point in points}


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torchmetrics"
)  # of three samples, not of each class
@pytest.mark.parametrize("names", HALVES, ids=", ".join)
def test_runs_that_broke_off_go_on_to_the_same_bits(
    names: list[str], configured: Configured, tmp_path: Path
) -> None:
    importlib.import_module("torchmetrics")  # once, and not in each rank
    configs, size = {}, 2
    for name in names:
        config = config_of(name, configured)
        saves = dataclasses.replace(config.checkpoint, every_steps=SAVED)
        often: dict[str, Any] = {
            "epochs": 2,
            "log_every": LOGGED,
            "world_size": size,
            "gradient_accumulation": 3,
        }
        configs[name] = dataclasses.replace(config, drop_last=False, checkpoint=saves, **often)

    def each(worker: Worker) -> list[int]:
        steps = []
        for name, config in configs.items():
            trained(tmp_path / f"{name}, whole", config, worker)
            folder = tmp_path / f"{name}, broken off"
            broken_off(folder, config, worker)
            if worker.rank == 0:
                steps.append(checkpoint.load(RunPaths(folder).last)["position"]["step"])
            trained(folder, config, worker, RunPaths(folder).last)
        return steps

    assert ranks.together(tmp_path, size, each)[0] == [8] * len(configs)
    for name in configs:
        folders = [tmp_path / f"{name}, {how}" for how in ("whole", "broken off")]
        states = [checkpoint.load(RunPaths(folder).last) for folder in folders]
        for key, weights in states[0]["model"].items():
            assert torch.equal(weights, states[1]["model"][key]), (name, key)
        sums = [[worker["sums"] for worker in state["workers"]] for state in states]
        assert sums[0] == sums[1], name
        assert values(folders[0]) == pytest.approx(values(folders[1]), abs=0, nan_ok=True), name
