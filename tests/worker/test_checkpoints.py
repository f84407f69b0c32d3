"""What is saved is what there was when it was asked for, though a thread writes it later."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expt.errors import ConfigError
from expt.runs import checkpoint, checkpoint_file
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.worker.checkpoints import Checkpoints
from expt.worker.run import Run
from tests.facade import as_typed
from tests.worker.conftest import TrainAlone
from tests.worker.sharded import Configs, together


@pytest.mark.parametrize("sharded", ["true", "false"], ids=["parts", "one file"])
def test_state_may_change_during_a_save(sharded: str, configs: Configs, tmp_path: Path) -> None:
    config, paths = configs("fsdp", 2, f"checkpoint.sharded={sharded}"), RunPaths(tmp_path / "run")

    def save(worker: Worker) -> None:
        epoch_s, averages = [1.0], {"loss": torch.zeros(1 << 20)}
        learner: Any = SimpleNamespace(strategy=SimpleNamespace(shards=2))
        checkpoints = Checkpoints(config, paths, learner, worker)
        state: dict[str, Any] = {"position": {"step": 1}, "weights": torch.ones(1 << 22)}
        checkpoints.save(state, lambda: {"epoch_s": epoch_s, "callbacks": averages})
        epoch_s.append(2.0)
        averages["loss"] += 1
        checkpoints.wait()

    together(tmp_path, 2, save)
    saved = checkpoint.load(paths.last)
    assert saved["epoch_s"] == [1.0]
    assert not saved["callbacks"]["loss"].any()


SHORT, ODD = "dataset.train_limit=512", "tests.worker.odd_optimizers"


@pytest.mark.parametrize(
    "schedule",
    [
        f"_target_: {ODD}.Ramp",  # numbers of NumPy
        f"_target_: {ODD}.Warmed",
        "_target_: torch.optim.lr_scheduler.MultiStepLR, milestones: [2, 14, 14]",
    ],
)
def test_a_schedule_is_resumed_to_the_same_bits(train_alone: TrainAlone, schedule: str) -> None:
    words = (*as_typed("epochs=2 checkpoint.every_steps=12 checkpoint.keep=9"), SHORT)
    ramp = f"scheduler={{{schedule}, interval: step}}"
    whole = train_alone(*words, ramp, name="whole")
    source = next(
        file
        for file in checkpoint_file.candidates(whole.paths.last)
        if checkpoint_file.read(file)["position"]["step"] == 12
    )
    again = train_alone(*words, ramp, name="again", source=source)
    for tag in ("loss/val", "loss/test", "lr"):
        assert again.curve(tag)[-1] == whole.curve(tag)[-1]


@pytest.mark.parametrize(
    ("word", "place"),
    [
        (f"scheduler={{_target_: {ODD}.Ramp, interval: step, holds: deque}}", "scheduler.held: "),
        (f"optimizer={{_target_: {ODD}.Counts, lr: 0.1}}", "optimizer.state.steps: "),
    ],
    ids=["schedule", "optimizer"],
)
def test_unsavable_state_is_refused_early(train_alone: TrainAlone, word: str, place: str) -> None:
    runs = list[Run]()
    with pytest.raises(ConfigError, match=f"^{place}"):
        train_alone(word, SHORT, before=runs.append)
    assert all(run.position.step <= 1 for run in runs)  # none: the optimizer is compared before
