"""Runs of one worker in the test's own process, or of several in forked ranks."""

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from expt.config.schema import RunConfig
from expt.dashboards import events
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.worker import build, comparison
from expt.worker.run import Run
from tests import on_cards
from tests.conftest import Configured
from tests.facade import Patch, RunFolder, request_of, same, usual
from tests.ranks import together, worker_of
from tests.worker.sharded import Configs, Observer

ALONE = worker_of(device=on_cards.device_of(0), gpus=(0,) if on_cards.ON else ())


class Trained(RunFolder):
    """The run, and its folder."""

    def __init__(self, run: Run, status: str) -> None:
        super().__init__(run.paths.folder)
        self.run, self.status = run, status


TrainAlone = Callable[..., Trained]


@pytest.fixture
def train_alone(tmp_path: Path, configured: Configured, monkeypatch: Patch) -> Iterator[TrainAlone]:
    """`train_alone("epochs=2", name="a")` trains in tmp_path/a; `before` may change the run."""

    def train(
        *overrides: str,
        name: str = "run",
        source: Path | None = None,
        observe: Any = build.build_dashboard,
        before: Callable[[Run], None] = lambda run: None,
    ) -> Trained:
        paths = RunPaths(tmp_path / name)
        paths.folder.mkdir(exist_ok=True)
        config = configured(*usual(overrides))
        run = Run(request_of(config, paths.folder, typed_at=time.monotonic()), ALONE)
        before(run)
        try:
            return Trained(run, run.train(source, observe))
        except BaseException:
            if hasattr(run, "record"):
                run.record.end("interrupted", {})  # closes its files, as the worker's end would
            raise

    # a running TensorBoard alone needs it
    monkeypatch.setattr(events, "_let_the_second_pass", lambda folder: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train
    torch.set_num_threads(threads)


def stop_at(step: int) -> Callable[[Run], None]:
    """A `before` of train_alone that asks the run to stop after this step."""

    def ask(run: Run) -> None:
        run.agreement._asked_to_stop = lambda: run.position.step == step

    return ask


def stopped_and_resumed(train_alone: TrainAlone, *words: str, step: int) -> Trained:
    """Train until `step`, and then to the end from the checkpoint that this has left."""
    stopped = train_alone(*words, name="stopped", before=stop_at(step))
    assert (stopped.status, stopped.result["resumable"]) == ("interrupted", True)
    return train_alone(*words, name="stopped", source=stopped.run.paths.last)


def assert_same(one: RunFolder, other: RunFolder) -> None:
    """To the bit: what was measured, weights, statistics and each worker's random numbers."""
    assert one.points == other.points
    states = [run.state() for run in (one, other)]
    for key in states[0].keys() & {"model", "ema", "optimizer", "workers"}:
        assert same(*(state[key] for state in states)), key
    assert len(states[0]["epoch_s"]) == len(states[1]["epoch_s"])


TrainTogether = Callable[..., RunFolder]


@pytest.fixture
def train_together(tmp_path: Path, configured: Configured) -> TrainTogether:
    """As train_alone, on `size` workers."""

    def train(size: int, *words: str, name: str) -> RunFolder:
        config, folder = dataclasses.replace(configured(*words), world_size=size), tmp_path / name
        folder.mkdir()

        def each(worker: Worker) -> str:
            run = Run(request_of(config, folder), worker)
            return run.train(None, lambda *_: Observer())

        if size == 1 and not on_cards.ON:
            assert each(ALONE) == "completed"
            return RunFolder(folder)
        assert together(tmp_path, size, each) == ["completed"] * size
        return RunFolder(folder)

    return train


@pytest.fixture
def configs(configured: Configured, tmp_path: Path, monkeypatch: Patch) -> Configs:
    """`configs("fsdp", 2, "model=mlp")`: in a folder with a text."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"):
        importlib.import_module(name)  # once, and not in each rank
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)

    def configure(strategy: str, size: int, *words: str) -> RunConfig:
        if strategy == "ddp":
            words = tuple(
                word for word in words if not word.startswith(("sharding.", "checkpoint.sharded"))
            )
        given = configured("world_size=4", "threads=1", f"strategy={strategy}", *words)
        return dataclasses.replace(given, world_size=size)

    return configure


@pytest.fixture
def not_compared(monkeypatch: Patch) -> None:
    """What comes before the first epoch takes as long as three, and has its own tests."""
    monkeypatch.setattr(comparison, "compare", lambda *_: None)
