"""Runs of sharded models in forked ranks, and their losses side by side."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from expt.config.schema import RunConfig, TensorBoard
from expt.dashboards.tensorboard import Dashboard
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.strategy import Strategy
from expt.worker.run import Run
from tests.facade import RunFolder, request_of

Configs = Callable[..., RunConfig]


class Observer(Dashboard):
    """Looks on, and draws nothing."""

    def __init__(self) -> None:
        strategy = Strategy(nn.Identity())
        learner: Any = SimpleNamespace(strategy=strategy, compiled=False)
        settings = TensorBoard(images=False, norms=False, histograms=False, health=False)
        super().__init__(None, learner, Position(1, 1), None, settings=settings)


def trained(
    folder: Path,
    config: RunConfig,
    worker: Worker,
    source: Path | None = None,
    until_epoch: int | None = None,
) -> str:
    """Carry a run out as one worker, with TensorBoard if it has histograms."""
    folder.mkdir(exist_ok=True)
    paths = RunPaths(folder)
    if worker.rank == 0 and not paths.result.exists():
        paths.result.write_text('{"status": "running"}')
    run = Run(request_of(config, folder, until_epoch=until_epoch), worker)
    return (
        run.train(source)
        if config.tensorboard.histograms
        else run.train(source, lambda *_: Observer())
    )


def losses(folder: Path) -> dict[tuple[str, int], float]:
    """All that a run has measured of its loss, by tag and step."""
    return {at: value for at, value in RunFolder(folder).values.items() if "loss" in at[0]}


def apart(one: Path, other: Path) -> float:
    """The largest difference of two runs' losses."""
    found, expected = losses(one), losses(other)
    assert found.keys() == expected.keys()
    return max(abs(value - expected[key]) for key, value in found.items())
