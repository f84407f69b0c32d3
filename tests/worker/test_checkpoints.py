"""What is saved is what there was when it was asked for, though a thread writes it later."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.worker.checkpoints import Checkpoints
from tests.worker.sharded import Configs, together


@pytest.mark.parametrize("sharded", ["true", "false"], ids=["parts", "one file"])
def test_what_a_run_remembers_may_change_while_it_is_written(
    sharded: str, configs: Configs, tmp_path: Path
) -> None:
    config, paths = configs("fsdp", 2, f"checkpoint.sharded={sharded}"), RunPaths(tmp_path / "run")

    def save(worker: Worker) -> None:
        epoch_s, averages = [1.0], {"loss": torch.zeros(1 << 20)}
        checkpoints = Checkpoints(config, paths, cast(Learner, SimpleNamespace(shards=2)), worker)
        state: dict[str, Any] = {"position": {"step": 1}, "weights": torch.ones(1 << 22)}
        checkpoints.save(state, lambda: {"epoch_s": epoch_s, "callbacks": averages})
        epoch_s.append(2.0)
        averages["loss"] += 1
        checkpoints.wait()

    together(tmp_path, 2, save)
    saved = checkpoint.load(paths.last)
    assert saved["epoch_s"] == [1.0]
    assert not saved["callbacks"]["loss"].any()
