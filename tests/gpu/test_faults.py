"""What goes wrong on a GPU, and who is told to have done it: `pytest -m gpu`.

Never run yet: written without a card."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import expt
from expt.errors import ExptError
from expt.machine import gpu_uuid, visible_gpus
from expt.worker import fault

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# NCCL takes a GPU for each worker; gloo has two on one.
BACKENDS = [
    pytest.param(("gpus=1", "backend=gloo", "world_size=2"), id="gloo"),
    pytest.param(
        ("gpus=2",),
        id="nccl",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    ),
]


def failed(tmp_path: Path, what: str, *words: str) -> tuple[str, float]:
    """What a person would see of a run with that fault, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(ExptError) as raised:
        expt.run(
            *words,
            f"+hydra.job.env_set.{fault.VARIABLE}='{what}'",
            f"hydra.run.dir='{tmp_path / 'here'}'",
        )
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("words", BACKENDS)
@pytest.mark.parametrize(("kind", "text"), [("raise", "a fault on purpose"), ("oom", "on purpose")])
def test_a_failing_ranks_own_error_is_told_at_once(
    kind: str, text: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    error, seconds = failed(tmp_path, f"1:5:{kind}", *words)
    assert error.startswith("rank 1 of 2")
    assert text in error
    assert (
        seconds < 40
    )  # the start of two workers included; NCCL's own end would wait for timeout_s=600


@pytest.mark.parametrize("words", BACKENDS)
def test_a_hang_is_blamed_on_the_rank_that_hangs(words: tuple[str, ...], tmp_path: Path) -> None:
    error, seconds = failed(tmp_path, "1:5:hang", "timeout_s=10", *words)
    assert error.startswith("rank 1 of 2")
    assert "_hang" in error
    assert seconds < 60


def test_each_gpu_has_a_uuid() -> None:
    uuids = [gpu_uuid(name) for name in visible_gpus()]
    assert len(set(uuids)) == len(uuids) == torch.cuda.device_count()
    assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in uuids)
    found = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert uuids[0] == found or uuids[0].startswith("MIG-")
