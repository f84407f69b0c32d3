"""A run with a sharded model pauses, gets another end, is forked; and comes to a plain loop's
weights.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.runs import checkpoint, continuing
from expt.runs.attempt import Attempt
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.training.collectives import Worker
from expt.worker import random_state
from expt.worker.build import build_data, build_learner
from tests.conftest import RunFolder, as_typed
from tests.integration.test_resume import _same
from tests.requests import continued, resumed
from tests.worker.conftest import ALONE
from tests.worker.sharded import Configs, apart, losses, together, trained

SHORT = (
    *as_typed("dataset.train_limit=136 drop_last=false log_every=1 batch_size=64"),
    *as_typed("optimizer=adamw"),
)
"""Three steps in an epoch."""
DRAWING = (
    "model.dropout=0.3",
    "ema=0.9",
    "mixup=0.2",
    "early_stop={metric: loss/val, patience: 9}",
)


def begun(config: RunConfig, folder: Path, *, may_have_run: bool = False) -> Path | None:
    """Make the folder of a run, as its driver does; returns the checkpoint that it goes on from."""
    request = RunRequest(
        config=config,
        content=continuing.as_forked(config, Content()),
        paths=RunPaths(folder),
        about={"name": folder.name, "overrides": {}, "arguments": []},
        may_have_run=may_have_run,
    )
    return Attempt(request=request, started_at=time.monotonic()).begin()


def assert_same_end(one: Path, other: Path) -> None:
    states = [checkpoint.load(RunPaths(folder).last) for folder in (one, other)]
    for key in ("model", "ema", "optimizer", "workers"):
        assert _same(*(state[key] for state in states)), (one, key)
    assert len(states[0]["epoch_s"]) == len(states[1]["epoch_s"])
    assert RunFolder(one).points == RunFolder(other).points


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["true", pytest.param("false", marks=pytest.mark.slow)], ids=["parts", "one file"]
)
def test_what_has_paused_or_gets_another_end_comes_to_the_same_bits(
    kind: str, configs: Configs, tmp_path: Path
) -> None:
    words = (*SHORT, *DRAWING, f"checkpoint.sharded={kind}")
    whole, within = (
        configs("fsdp", 2, *words, "epochs=3"),
        configs("fsdp", 2, *words, "max_steps=4"),
    )

    def begin(worker: Worker) -> list[str]:
        return [
            trained(tmp_path / "whole", whole, worker),
            trained(tmp_path / "pruned", whole, worker, until_epoch=1),
            trained(tmp_path / "longer", within, worker),
        ]

    assert together(tmp_path, 2, begin) == [["completed", "pruned", "completed"]] * 2
    sources: dict[str, Path] = {}
    for name in ("pruned", "longer"):
        paths = RunPaths(tmp_path / name)
        parted = bool(paths.parts)
        source = continued(whole, paths)
        assert source == (paths.last if name == "pruned" else paths.within_epoch)
        assert parted == (kind == "true")
        sources[name] = source

    def go_on(worker: Worker) -> list[str]:
        return [trained(tmp_path / name, whole, worker, source) for name, source in sources.items()]

    assert together(tmp_path, 2, go_on) == [["completed"] * 2] * 2
    for name in sources:
        assert_same_end(tmp_path / name, tmp_path / "whole")


FORKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # what the other run had, and what the fork has besides
    "parameters in other groups, and a first average": (
        ("optimizer=adamw",), ("optimizer=adamw", "optimizer.decay_biases_and_norms=false",
            "ema=0.9")),
    "from Muon, and without the average": (("optimizer=muon", "ema=0.9"), ("optimizer=adamw",
        "ema=null")),
    "plain descent, within an epoch": (("optimizer=sgd", "ema=0.9"), ("optimizer=sgd",
        "optimizer.lr=0.02", "ema=0.9")),
}  # fmt: skip


RARE = [*FORKS][1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*FORKS][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in RARE]
)
def test_a_fork_is_that_of_ddp_and_with_nothing_changed_the_run_itself(
    name: str, configs: Configs, tmp_path: Path
) -> None:
    words = (
        *SHORT[:-1],
        "model.hidden=[16,16]",
        "epochs=3",
        "checkpoint.keep=9",
        "checkpoint.every_steps=2",
    )
    before, now = FORKS[name]
    strategy = "ddp" if "optimizer=muon" in before else "fsdp"
    parent = configs(strategy, 2, *words, *before, "checkpoint.sharded=true")
    begun(parent, tmp_path / "parent")
    together(tmp_path, 2, lambda worker: trained(tmp_path / "parent", parent, worker))

    def fork(strategy: str, name: str, *more: str) -> tuple[str, RunConfig, Path | None]:
        step = 4 if "optimizer=sgd" in before else 3
        config = configs(
            strategy, 2, *words, *more, "checkpoint.sharded=true", f"fork=parent@{step}"
        )
        return name, config, begun(config, tmp_path / name)

    forks = [fork(strategy, "same", *before), fork("ddp", "ddp", *now), fork("fsdp", "fsdp", *now)]
    together(
        tmp_path,
        2,
        lambda worker: [trained(tmp_path / name, each, worker, at) for name, each, at in forks],
    )
    assert losses(tmp_path / "same") == losses(tmp_path / "parent")
    assert apart(tmp_path / "fsdp", tmp_path / "ddp") < 1e-5
    left = {path.name for path in RunPaths(tmp_path / "fsdp").checkpoints.iterdir()}
    assert not [file for file in left if file.startswith((".", "fork"))], left


@pytest.mark.slow
def test_plain_descent_goes_on_by_kernels_that_its_parameters_have(
    configs: Configs, tmp_path: Path
) -> None:
    words = (*SHORT[:-1], "optimizer=sgd", "model.hidden=[8]")
    source: Path | None = None
    for name, strategy, *more in (
        ("1", "ddp", "epochs=1"),
        ("2", "fsdp", "epochs=2"),
        ("3", "ddp", "epochs=3"),
        ("fork", "fsdp", "epochs=3", "fork=1@last"),
    ):
        config, folder = configs(strategy, 2, *words, *more), tmp_path / name
        forked = begun(config, folder)
        if source is not None and not forked:
            source = resumed(source, folder)
        begin = forked or source
        together(tmp_path, 2, lambda worker, c=config, f=folder, b=begin: trained(f, c, worker, b))  # type: ignore[misc]
        source = RunPaths(folder).last
        (group,) = checkpoint.load(source)["optimizer"]["param_groups"]
        assert bool(group["fused"]) == (strategy == "ddp"), name
        assert bool(group["foreach"]) == (strategy == "fsdp"), name
    assert apart(tmp_path / "fork", tmp_path / "3") < 1e-5


BIAS, MEAN = "6.bias", "7.running_mean"
"""Of the convnet's last convolution; and of the batch norm behind it, which takes a constant away
again.
"""
RATE, STEPS = 0.001, 6


def plain_loop(config: RunConfig) -> tuple[dict[str, Tensor], float]:
    """The weights that textbook torch comes to from the same first ones, and the largest gradient
    of that bias.
    """
    random_state.seed(config.seed)
    data = build_data(config, ALONE)
    module = build_learner(config, data, ALONE).module.train()
    kind = torch.optim.Adam if config.optimizer.name == "adam" else torch.optim.SGD
    optimizer = kind(module.parameters(), lr=RATE)
    largest = 0.0
    for epoch in range(1, config.epochs + 1):
        for batch in data.train.epoch(epoch):
            optimizer.zero_grad()
            functional.cross_entropy(module(batch.inputs), batch.targets).backward()
            gradient = module.get_parameter(BIAS).grad
            assert gradient is not None
            largest = max(largest, gradient.abs().max().item())
            optimizer.step()
    return {name: values.detach() for name, values in module.state_dict().items()}, largest


@pytest.mark.slow
def test_a_plain_loop_has_the_same_weights_but_for_a_bias_without_a_gradient(
    configs: Configs, tmp_path: Path
) -> None:
    words = (
        *as_typed("model=convnet model.dropout=0 batch_norm=sync dataset.train_limit=192"),
        *as_typed("batch_size=64"),
    )
    kinds = {"adam": ("optimizer=adam",), "sgd": ("optimizer=sgd", "optimizer.momentum=0")}
    runs = {
        (optimizer, strategy): configs(
            strategy, 2, *words, *more, f"optimizer.lr={RATE}", "epochs=2", "log_every=1"
        )
        for optimizer, more in kinds.items()
        for strategy in ("ddp", "fsdp")
    }
    together(
        tmp_path,
        2,
        lambda worker: [trained(tmp_path / "-".join(at), one, worker) for at, one in runs.items()],
    )
    for optimizer, more in kinds.items():
        expected, largest = plain_loop(
            configs("ddp", 1, *words, *more, f"optimizer.lr={RATE}", "epochs=2")
        )
        assert largest < 1e-6, "rounding alone"
        for strategy in ("ddp", "fsdp"):
            found: dict[str, Any] = checkpoint.load(
                RunPaths(tmp_path / f"{optimizer}-{strategy}").last
            )["model"]
            off = {
                name: (values - expected[name]).abs().max().item() for name, values in found.items()
            }
            moved = max(off.pop(BIAS), off.pop(MEAN))
            assert max(off.values()) < 1e-5, (optimizer, strategy, off)
            # Adam divides a gradient by its own size, so that rounding errors become steps of the
            # learning rate's.
            assert moved < (STEPS * RATE if optimizer == "adam" else 1e-6), (optimizer, strategy)
