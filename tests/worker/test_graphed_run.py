"""Runs whose steps are replayed by a stand-in for CUDA graphs: every number is that of a run with
eager steps.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.data.tree import leaves
from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.training.graphed_step import GraphedStep
from expt.training.observer import Observer
from expt.worker.run import Run
from tests import ranks
from tests.conftest import Configured
from tests.graphs import Refusing, StandIn, graphed
from tests.worker.conftest import TrainAlone, Trained
from tests.worker.test_run import values

SMALL = (
    "dataset.train_limit=240",
    "dataset.val_fraction=0.1",
    "batch_size=32",
    "drop_last=false",
    "log_every=3",
)
"""Seven batches, and one of 16."""
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "SGD, cosine": (
        13,
        ("model=mlp", "model.dropout=0.2", "scheduler=cosine", "gradient_clip=1.0"),
    ),
    "AdamW in groups": (
        13,
        (
            "model=convnet",
            "optimizer=adamw",
            "optimizer.layer_decay=0.5",
            "ema=0.9",
            "gradient_accumulation=2",
        ),
    ),
    "what changes momentum": (1, ("model=mlp", "scheduler=one_cycle", "label_smoothing=0.1")),
    "an update that may be left out": (0, ("model=mlp", "on_nan=skip", "amp=bf16", "mixup=0.2")),
    "an update of many kernels": (0, ("model=mlp", "optimizer=muon", "optimizer.lr=0.01")),
}
"""And of how many steps of two epochs both parts are replayed: not the first, nor those of another
size.
"""


def by(make: Any) -> Any:
    def change(run: Run) -> None:
        run.learner = graphed(run.learner, make)

    return change


def saved(folder: Path) -> list[torch.Tensor]:
    """Weights, averages, optimiser states, sums and random numbers."""
    state = checkpoint.load(RunPaths(folder).last)
    found = {key: state[key] for key in ("model", "optimizer", "workers")}
    return [*leaves(found), *leaves(state.get("ema")), torch.tensor(state["workers"][0]["sums"])]


def are_equal(one: Trained, other: Trained) -> bool:
    assert values(one) == values(other)
    ours, theirs = saved(one.folder), saved(other.folder)
    states = [
        checkpoint.load(RunPaths(each.folder).last)["workers"][0]["rng"] for each in (one, other)
    ]
    return (
        len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)) and states[0] == states[1]
    )


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_eager_steps(
    case: str, train_alone: TrainAlone, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed, words = CASES[case]
    eager = train_alone(*SMALL, "epochs=2", *words, name="eager", before=by(Refusing))
    assert "every step is eager: RuntimeError: no card\n" in capsys.readouterr().err
    found = train_alone(*SMALL, "epochs=2", *words, name="graphed", before=by(StandIn))
    assert "cuda_graph" not in capsys.readouterr().err
    assert are_equal(found, eager)
    steps = found.run.learner.graphed
    assert isinstance(steps, GraphedStep)
    assert steps.replayed == replayed


def test_rates_that_need_no_rounding_give_the_numbers_of_a_run_without(
    train_alone: TrainAlone,
) -> None:
    words = (
        *SMALL,
        "epochs=2",
        "optimizer.lr=0.125",
        "scheduler=step",
        "scheduler.gamma=0.5",
        "scheduler.every_epochs=1",
    )
    assert are_equal(
        train_alone(*words, name="graphed", before=by(StandIn)), train_alone(*words, name="plain")
    )


class Killed(Observer):
    """Ends the process in a step's middle, when its gradients are there."""

    def __init__(self, step: int) -> None:
        self.steps_left = step

    def before_update(self) -> None:
        self.steps_left -= 1
        if not self.steps_left:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_goes_on_to_the_same_bits(
    train_alone: TrainAlone, configured: Configured, tmp_path: Path
) -> None:
    words = (
        *SMALL,
        "epochs=2",
        "model=convnet",
        "optimizer=adamw",
        "checkpoint.every_steps=4",
        "threads=1",
    )

    def killed(worker: Worker) -> None:
        (tmp_path / "killed").mkdir()
        run = Run(
            configured(*words),
            RunPaths(tmp_path / "killed"),
            worker,
            typed_at=0.0,
            beat=lambda: None,
        )
        by(StandIn)(run)
        run.train(None, lambda *_: Killed(11))

    (store := tmp_path / "store").mkdir()
    assert ranks.ends_of(store, 1, killed) == [-signal.SIGKILL]
    last = RunPaths(tmp_path / "killed").last
    assert checkpoint.load(last)["position"]["step"] in (4, 7, 8)
    whole = train_alone(*words, name="whole", before=by(StandIn))
    resumed = train_alone(*words, name="killed", source=last, before=by(StandIn))
    assert all(map(torch.equal, saved(whole.folder), saved(resumed.folder)))
    known = {(point["tag"], point["step"]): point["value"] for point in values(resumed)}
    assert known == {(point["tag"], point["step"]): point["value"] for point in values(whole)}
