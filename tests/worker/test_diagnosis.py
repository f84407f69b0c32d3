"""What is told of an error is of use."""

import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from expt.data.loading import Batch
from expt.errors import ConfigError, OutOfMemory, RunFailed
from expt.training.collectives import Worker
from expt.worker.diagnosis import in_words, lost_peers, where_stuck
from tests.conftest import Configured
from tests.facade import Patch

UNEQUAL = "unequal shares of 2 workers"


@pytest.mark.parametrize(
    ("batch_size", "world_size", "parts"), [(66, 2, 1), (100, 1, 1), (54, 1, 3)]
)
def test_what_is_to_be_tried_where_memory_is_short_is_accepted(
    batch_size: int, world_size: int, parts: int, configured: Configured
) -> None:
    now = [f"batch_size={batch_size}", f"world_size={world_size}", f"gradient_accumulation={parts}"]
    told = str(in_words(torch.OutOfMemoryError("no memory"), configured(*now)))
    suggested = re.findall(r"(?:try|or) (\w+=\d+)", told)
    assert len(suggested) == 2
    for word in suggested:
        config = configured(*now, word)
        at_a_time = config.batch_size / config.world_size / config.micro_batches
        assert at_a_time <= batch_size / world_size / parts / 2


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for"), "CUDA error: out of"),
        (dist.DistBackendError("NCCL error in: a.cpp\nCuda failure 2 'out of memory'"), "Cuda"),
    ],
)
def test_library_memory_errors(error: Exception, first: str, configured: Configured) -> None:
    told = in_words(error, configured())
    assert isinstance(told, OutOfMemory)
    assert str(told).startswith(first)


@pytest.mark.parametrize("free", [0, 11])
def test_memory_held_by_others(free: int, configured: Configured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 2**30, 16 * 2**30))
    told = str(in_words(torch.OutOfMemoryError("no memory"), configured()))
    assert ("other processes hold 12.0 of 16.0 GiB" in told) == (free == 0)
    assert ("batch_size=32" in told) == (free > 0)


def test_single_sample_batch_norm_fix(configured: Configured) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))
    told = in_words(raised.value, configured("batch_size=2"))
    assert isinstance(told, ConfigError)
    assert re.match(r"batch_size=2: .*more than 1 value.*drop_last=true", str(told))


def test_what_averaging_of_gradients_does_not_take_names_a_fix(configured: Configured) -> None:
    with pytest.raises(AttributeError) as raised:
        nn.DataParallel(nn.Linear(1, 1)).encode(1)  # type: ignore[operator]
    told = in_words(raised.value, configured())
    assert isinstance(told, ConfigError)
    assert re.match(r"model\..*world_size=1", str(told))


@pytest.mark.parametrize(
    "file", ["/usr/lib/python3/multiprocessing/synchronize.py", "/home/me/net.py"]
)
def test_missing_locks_of_loaders_are_explained(file: str, configured: Configured) -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        exec(compile("raise OSError(28, 'No space left on device')", file, "exec"))
    told = in_words(raised.value, configured())
    if file.startswith("/home"):
        assert told is raised.value
    else:
        assert isinstance(told, RunFailed)
        assert str(told).startswith("/dev/shm: No space left on device; mount it, make it larger")


def nccl(text: str) -> dist.DistBackendError:
    return dist.DistBackendError(
        f"NCCL error in: ../ProcessGroupNCCL.cpp:3690, unhandled system error\n{text}"
    )


def test_what_nccl_finds_no_room_for_is_named(configured: Configured) -> None:
    line = (
        "Error: failed to create shared memory file /dev/shm/nccl-a1, error No space left on device"
        " (28)"
    )
    told = str(in_words(nccl(f"Last error:\n{line}"), configured()))
    assert told.startswith(f"/dev/shm: {line}; mount it, make it larger")


@pytest.mark.parametrize(
    "text",
    [
        "NCCL communicator was aborted on rank 1.",
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process"
            " exiting prematurely."
        ),
    ],
)
def test_a_lost_peer_in_the_words_of_nccl(text: str) -> None:
    worker = Worker(
        rank=1, world_size=2, local_rank=1, local_world_size=2, device=torch.device("cpu")
    )
    assert "rank 1 of 2 on " in str(lost_peers(nccl(text), worker))
    assert lost_peers(nccl("invalid usage"), worker) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no notes")
def test_what_was_given_stands_beside_torchs_own_words(configured: Configured) -> None:
    def step(batch: Batch) -> None:
        nn.Linear(7, 2)(batch.inputs["row"])

    batch = Batch({"row": torch.zeros(4, 5)}, torch.zeros(4, dtype=torch.int64), 4)
    with pytest.raises(RuntimeError) as caught:
        step(batch)
    told = in_words(caught.value, configured("model=convnet"))
    assert told is caught.value
    (note,) = vars(told)["__notes__"]
    for part in ("of model=convnet", "inputs['row'] float32 [4, 5]", "targets int64 [4]"):
        assert part in note


@pytest.mark.parametrize(("samples", "of_all"), [(4, 8), (4, 7)])
def test_unequal_shares_are_named_where_a_worker_fails_or_waits(
    samples: int, of_all: int, configured: Configured
) -> None:
    batch, config = Batch(torch.zeros(samples, 2), None, of_all), configured("world_size=2")
    assert (UNEQUAL in where_stuck(config)) == (of_all == 7)
    with pytest.raises(RuntimeError) as raised:
        batch.inputs.view(3)
    noted = in_words(raised.value, config)
    assert (UNEQUAL in "".join(noted.__notes__)) == (of_all == 7)
