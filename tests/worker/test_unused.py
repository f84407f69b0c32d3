"""Sharded models of which a worker uses other parameters than the next, and own buffers that
training reads."""

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.runs import checkpoint
from expt.runs.paths import RunPaths
from expt.training import sharding
from expt.training.collectives import Worker
from tests.facade import Patch, as_typed
from tests.worker.odd_models import Apart, Centred, Mixture
from tests.worker.sharded import Configs, apart, together, trained

pytestmark = pytest.mark.usefixtures("not_compared")

FIND = "ddp.find_unused_parameters=true"
SHORT = as_typed(
    "epochs=1 max_steps=6 log_every=1 dataset.train_limit=128 optimizer=adamw optimizer.lr=0.02"
)


def of(model: type[nn.Module]) -> tuple[str, ...]:
    return ("~model", f"+model._target_={model.__module__}.{model.__name__}")


def by_both(root: Path, configs: Configs, size: int, *words: str) -> tuple[Path, Path]:
    """The folders of a run by ddp and of one by fsdp."""
    wanted = {
        root / "ddp": configs("ddp", size, *words),
        root / "fsdp": configs("fsdp", size, *(word for word in words if word != FIND)),
    }
    ends = [["completed"] * 2] * size
    assert (
        together(root, size, lambda rank: [trained(*one, rank) for one in wanted.items()]) == ends
    )
    return root / "ddp", root / "fsdp"


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = checkpoint.load(RunPaths(folder).last)["model"]
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_unused_experts_as_ddp(size: int, parts: int, configs: Configs, tmp_path: Path) -> None:
    """Each worker has a sample or two of a part, hardly ever all experts; what nobody has used does
    not decay."""
    words = (
        *of(Mixture),
        *SHORT,
        f"batch_size={4 * parts}",
        f"gradient_accumulation={parts}",
        "optimizer.weight_decay=0.5",
    )
    plain, found = by_both(tmp_path, configs, size, *words, FIND)
    assert apart(plain, found) < 1e-5
    begun, there = weights(plain), weights(found)
    assert all(torch.allclose(begun[name], there[name], atol=1e-5) for name in begun)


def refused(folder: Path, config: RunConfig, worker: Worker) -> str:
    os.environ["RANK"] = str(worker.rank)
    try:
        return trained(folder, config, worker)
    except (ConfigError, RuntimeError) as error:
        return str(error)


def test_workers_that_call_other_layers_are_refused(configs: Configs, tmp_path: Path) -> None:
    """All are of one size: each worker would compute with a mixture of two."""
    words = *of(Apart), *SHORT, "batch_size=16", "sharding.wrap=[blocks.0,blocks.1]"
    each = functools.partial(refused, tmp_path / "run", configs("fsdp", 2, *words))
    assert all("sharding.wrap" in text for text in together(tmp_path, 2, each))


@pytest.mark.cpu("NCCL waits for a worker that has ended")
def test_old_torch_without_zeros(configs: Configs, tmp_path: Path, monkeypatch: Patch) -> None:
    """Not where all have used all, or nobody: that it can do."""

    class Older(sharding.Unused):
        def drop(self) -> None:
            self._gives_zeros = False
            self._used = {
                name for name in self._parameters if "last" in name or int(os.environ["RANK"])
            }
            super().drop()

    monkeypatch.setattr(sharding, "Unused", Older)
    config = configs("fsdp", 2, *of(Centred), *SHORT, "batch_size=16")
    told, _ = together(tmp_path, 2, functools.partial(refused, tmp_path / "run", config))
    assert told.startswith("the parameter body.weight was used by some workers only in a step")
