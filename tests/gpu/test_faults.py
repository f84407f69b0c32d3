"""What goes wrong on a GPU, and who is told to have done it: `pytest -m gpu`.

It has passed on soft GPUs; no card has run it yet."""

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
@pytest.mark.parametrize(
    ("kind", "text", "within_s"),
    [("raise", "a fault on purpose", 40), ("oom", "on purpose", 40), ("hang", "in strike", 60)],
)
def test_the_rank_at_fault_is_named_at_once(
    kind: str, text: str, within_s: float, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Long before NCCL's own end, after timeout_s=600; a start of two workers is included."""
    more = ("timeout_s=10",) if kind == "hang" else ()
    error, seconds = failed(tmp_path, f"1:5:{kind}", *more, *words)
    assert error.startswith("rank 1 of 2")
    assert text in error
    assert seconds < within_s


def test_each_gpu_has_a_uuid() -> None:
    uuids = [gpu_uuid(name) for name in visible_gpus()]
    assert len(set(uuids)) == len(uuids) == torch.cuda.device_count()
    assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in uuids)
    found = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert uuids[0] == found or uuids[0].startswith("MIG-")
