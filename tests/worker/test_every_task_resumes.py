"""A run of any task that broke off resumes exactly, and evaluates to its own numbers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.config.identity import shown
from expt.config.schema import RunConfig
from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.runs.result import read_result, update_result
from expt.worker import fault
from expt.worker.run import Run
from tests.conftest import Configured
from tests.every_task import CASES, config_of
from tests.facade import RunFolder, request_of
from tests.worker.conftest import ALONE
from tests.worker.sharded import Observer
from tests.worker.test_evaluation import metrics

SAVED, KILLED_IN, LOGGED = 2, 9, 4
"""The step is within the second epoch of five, and what is saved before it between log points."""


def begun(folder: Path, config: RunConfig) -> Run:
    folder.mkdir(exist_ok=True)
    return Run(request_of(config, folder), ALONE)


def break_off(folder: Path, config: RunConfig) -> None:
    """Train until an exception in the middle of a step, which leaves what was saved before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fault.VARIABLE, f"0:{KILLED_IN}:raise")
        run = begun(folder, config)
    with pytest.raises(Exception, match="a fault on purpose"):
        run.train(None, lambda *_: Observer())
    run.checkpoints.wait()
    run.record.end("interrupted", {})  # closes its files, as the worker's end would


def values(folder: Path) -> dict[tuple[str, int], float]:
    """Of each point: what was done again has been told twice."""
    points = map(json.loads, RunFolder(folder).points)
    return {(point["tag"], point["step"]): point["value"] for point in points}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::UserWarning:torchmetrics"
)  # of three samples, not of each class
@pytest.mark.parametrize("name", CASES)
def test_broken_off_runs_resume_exactly(name: str, configured: Configured, tmp_path: Path) -> None:
    config = config_of(name, configured)
    often: dict[str, Any] = {"epochs": 2, "log_every": LOGGED, "gradient_accumulation": 3}
    saves = dataclasses.replace(config.checkpoint, every_steps=SAVED)
    config = dataclasses.replace(config, drop_last=False, checkpoint=saves, **often)
    folders = whole, again = tmp_path / "whole", tmp_path / "broken off"
    whole.mkdir()
    update_result(RunPaths(whole), status="running", config=shown(config), identity="x")
    begun(whole, config).train(None, lambda *_: Observer())
    break_off(again, config)
    assert checkpoint.load(RunPaths(again).last)["position"]["step"] == 8
    begun(again, config).train(RunPaths(again).last, lambda *_: Observer())
    states = [checkpoint.load(RunPaths(folder).last) for folder in folders]
    for key, weights in states[0]["model"].items():
        assert torch.equal(weights, states[1]["model"][key]), key
    assert states[0]["workers"][0]["sums"] == states[1]["workers"][0]["sums"]
    assert values(whole) == pytest.approx(values(again), abs=0, nan_ok=True)
    recorded = read_result(RunPaths(whole))["metrics"]
    for split, which in (("val", "last"), ("test", "best")):
        ours = {tag: value for tag, value in recorded.items() if tag.endswith(f"/{split}")}
        expected = {tag: value for tag, value in ours.items() if tag[:4] != "best"}
        measured = metrics(whole, f"split={split}", f"which={which}")
        assert measured == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
