"""Tests of what the texts of errors are made of."""

from pathlib import Path

import pytest
import torch

from expt.errors import ConfigError, first_line, is_out_of_memory
from expt.runs.view import leaderboard, progress, summary
from tests.conftest import Typed
from tests.facade import Patch


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("\n  the header is cut off  \nat byte 7"), "the header is cut off"),
        (MemoryError(), "MemoryError"),  # what has no text is told of all the same
        (OSError(" \n"), "OSError"),
    ],
)
def test_an_errors_first_line_is_never_empty(error: Exception, told: str) -> None:
    assert first_line(error) == told


@pytest.mark.parametrize(
    "words",
    [
        "report trian",
        "evaluate trian",
        "predict trian x.csv",
        "weights=trian",
        "task=regression dataset=table dataset.targets=y dataset.path=trian",
    ],
)
def test_a_missing_path_is_answered_by_its_neighbour(
    words: str, tmp_path: Path, monkeypatch: Patch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train").mkdir()
    refused = typed(*words.split())
    assert refused.returncode == 2
    assert "trian: there is no such" in refused.stderr
    assert "Did you mean 'train'?" in refused.stderr


def test_of_many_problems_a_few_are_shown() -> None:
    error = ConfigError([f"mask {number}" for number in range(60)])
    assert (len(error.problems), len(str(error).splitlines())) == (60, 32)
    assert str(error).endswith("\n  mask 29\n  and 30 more")


LACKS_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    torch.OutOfMemoryError("Caught OutOfMemoryError in replica 0 on device 0."),
    RuntimeError("CUDA ran out of memory outside PyTorch's allocator. If this workload"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.28.9\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'"
    ),
    torch.distributed.DistBackendError("Last error:\nFailed to CUDA calloc async 4096 bytes"),
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("HIP error: out of memory"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate`"),
    RuntimeError("miopenStatusAllocFailed"),
)
OTHERS = (
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("NCCL error: no space left on device /dev/shm"),
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("CUDA out of memory, says a message of nobody's"),
    MemoryError(),
)


@pytest.mark.parametrize("error", LACKS_MEMORY + OTHERS, ids=lambda error: str(error)[-40:])
def test_memory_of_a_device_ran_out_whichever_library_says_so(error: Exception) -> None:
    assert is_out_of_memory(error) == (error in LACKS_MEMORY)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.2500"), (0.0, "0.0000"), (9.87e-4, "0.000987"), (-2.5e-5, "-2.5e-05")],
)
def test_a_small_number_keeps_its_digits(value: float, text: str) -> None:
    assert leaderboard.spread([value]) == summary._number(value) == text
    assert leaderboard.spread([value, value]) == f"{text} ± 0.0000 (2)"
    assert progress.in_words({"loss/train": value, "mae/val": value}) == [
        f"loss {text}",
        f"val {text}",
    ]
