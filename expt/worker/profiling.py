"""A trace of a few steps by torch.profiler: a file for Perfetto or chrome://tracing, and a table of
operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WARMUP_STEPS, TRACED_STEPS = 5, 5
OPERATORS = 10


class StepProfiler:
    """Traces TRACED_STEPS steps after WARMUP_STEPS; call `step` after every optimiser step."""

    def __init__(self, trace: Path, table: Path, device: torch.device) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._trace, self._table = trace, table
        self._device = device.type
        self._profiler: Any = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARMUP_STEPS, active=TRACED_STEPS, repeat=1),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def step(self) -> None:
        """Say that an optimiser step is done."""
        self._profiler.step()

    def close(self) -> None:
        """Write what was traced, if the run was too short to come to its end before."""
        self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        profiler.export_chrome_trace(str(self._trace))
        self._table.write_text(table_of(profiler.key_averages(), self._device), encoding="utf-8")


def table_of(averages: Any, device: str) -> str:
    """The most expensive operators, a line each: time, share, calls, name; of a GPU its kernels."""
    by = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    operators = [event for event in averages if _is_counted(event, device)]
    events = sorted(operators, key=lambda event: -getattr(event, by))
    total_us = sum(getattr(event, by) for event in events) or 1.0
    lines = [f"{'ms/step':>9} {'share':>6} {'calls/step':>10}  operator"]
    for event in events[:OPERATORS]:
        used_us = getattr(event, by)
        calls = event.count / TRACED_STEPS
        lines.append(
            f"{used_us / 1e3 / TRACED_STEPS:9.3f} {used_us / total_us:6.1%} {calls:10.1f} "
            f" {event.key.splitlines()[0]}"
        )
    return "\n".join(lines) + "\n"


def _is_counted(event: Any, device: str) -> bool:
    """Not the step as a whole; of a GPU neither what started kernels nor what is named around them."""
    if event.key.startswith("ProfilerStep"):
        return False
    if device == "cpu":
        return True
    return event.device_type != torch.autograd.DeviceType.CPU and not getattr(
        event, "is_user_annotation", False
    )
