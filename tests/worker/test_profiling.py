"""The table of operators, of events made by hand: those of a GPU need none."""

from __future__ import annotations

from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from expt.worker.steps import table_of


def event(
    key: str, kind: DeviceType, *, cpu_us: int = 0, device_us: int = 0, annotation: bool = False
) -> Any:
    found: Any = FunctionEventAvg()
    found.key, found.device_type, found.is_user_annotation, found.count = key, kind, annotation, 5
    found.self_cpu_time_total, found.self_device_time_total = cpu_us, device_us
    return found


EVENTS = [
    event("ProfilerStep*", DeviceType.CPU, cpu_us=9000),
    event("ProfilerStep*", DeviceType.CUDA, device_us=9000, annotation=True),
    event(
        "aten::mm", DeviceType.CPU, cpu_us=3000, device_us=4000
    ),  # its kernels have events of their own
    event("gemm_kernel", DeviceType.CUDA, device_us=4000),
    event("relu_kernel", DeviceType.CUDA, device_us=1000),
    event("Optimizer.step#SGD.step", DeviceType.CUDA, device_us=5000, annotation=True),
    event("aten::relu", DeviceType.CPU, cpu_us=1000, device_us=1000),
]


@pytest.mark.parametrize(
    ("device", "rows"),
    [
        (
            "cuda",
            [["0.800", "80.0%", "1.0", "gemm_kernel"], ["0.200", "20.0%", "1.0", "relu_kernel"]],
        ),
        ("cpu", [["0.600", "75.0%", "1.0", "aten::mm"], ["0.200", "25.0%", "1.0", "aten::relu"]]),
    ],
)
def test_each_microsecond_is_counted_once(device: str, rows: list[list[str]]) -> None:
    found = [line.split() for line in table_of(EVENTS, device).splitlines()[1:]]
    assert [row for row in found if float(row[0])] == rows
