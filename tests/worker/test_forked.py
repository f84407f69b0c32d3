"""What a fork leaves of the checkpoint that it began from."""

from __future__ import annotations

from pathlib import Path

import torch

from expt.runs import checkpoint_file
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.worker import first_weights


def test_the_parts_of_the_other_run_go_with_its_checkpoint(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir()
    for file, folder in ((paths.forked, "step-19.parts"), (paths.last, "step-38.parts")):
        (paths.checkpoints / folder).mkdir()
        torch.save({checkpoint_file.PARTS: {"folder": folder}}, file)
    one = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
    first_weights.release_fork(paths, one)
    assert {path.name for path in paths.checkpoints.iterdir()} == {"last.pt", "step-38.parts"}
