"""Runs of a single worker in the test's own process: they take a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.worker import build
from expt.worker.run import Run
from tests.conftest import Configured, RunFolder

ALONE = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))


class Trained(RunFolder):
    """The run, and its folder."""

    def __init__(self, run: Run, status: str) -> None:
        super().__init__(run.paths.folder)
        self.run, self.status = run, status


TrainAlone = Callable[..., Trained]


@pytest.fixture
def train_alone(tmp_path: Path, configured: Configured) -> Iterator[TrainAlone]:
    """`train_alone("epochs=2", name="a", source=None)` trains in tmp_path/a; `before` may change the run it gets."""

    def train(
        *overrides: str,
        name: str = "run",
        source: Path | None = None,
        observe: Any = build.build_observer,
        before: Callable[[Run], None] = lambda run: None,
    ) -> Trained:
        paths = RunPaths(tmp_path / name)
        paths.folder.mkdir(exist_ok=True)
        run = Run(configured(*overrides), paths, ALONE, typed_at=time.monotonic(), beat=lambda: None)
        before(run)
        return Trained(run, run.train(source, observe))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train
    torch.set_num_threads(threads)
