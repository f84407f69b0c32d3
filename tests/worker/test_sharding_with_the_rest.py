"""A run with a sharded model pauses, gets another end, and is forked."""

from pathlib import Path

import pytest

from expt.config.schema import RunConfig
from expt.runs.paths import RunPaths
from expt.training.collectives import Worker
from tests.facade import RunFolder, as_typed, begun, continued
from tests.worker.conftest import assert_same
from tests.worker.sharded import Configs, apart, losses, together, trained

SHORT = (
    *as_typed("dataset.train_limit=136 drop_last=false log_every=1 batch_size=64"),
    *as_typed("optimizer=adamw"),
)
"""Three steps in an epoch."""
DRAWING = (
    *as_typed("model.dropout=0.3 ema=0.9 mixup=0.2"),
    "early_stop={metric: loss/val, patience: 9}",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["true", "false"], ids=["parts", "one file"])
def test_pruned_or_longer_sharded_run_is_exact(kind: str, configs: Configs, tmp_path: Path) -> None:
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
        assert source == (paths.last if name == "pruned" else paths.before_end)
        assert parted == (kind == "true")
        sources[name] = source

    def go_on(worker: Worker) -> list[str]:
        return [trained(tmp_path / name, whole, worker, source) for name, source in sources.items()]

    assert together(tmp_path, 2, go_on) == [["completed"] * 2] * 2
    for name in sources:
        assert_same(*(RunFolder(tmp_path / each) for each in (name, "whole")))


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


@pytest.mark.slow
@pytest.mark.parametrize("name", FORKS)
def test_sharded_fork_equals_ddp_and_parent(name: str, configs: Configs, tmp_path: Path) -> None:
    words = (
        *SHORT[:-1],
        *as_typed("model.hidden=[16,16] epochs=3 checkpoint.keep=9 checkpoint.every_steps=2"),
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
