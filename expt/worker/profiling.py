"""A trace of a few steps by torch.profiler: a file for Perfetto or chrome://tracing, and a table of operators."""

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

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._trace, self._table = trace, table
        self._by = f"self_{device.type}_time_total"
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
        self._table.write_text(_table_of(profiler.key_averages(), self._by), encoding="utf-8")


def _table_of(averages: Any, by: str) -> str:
    """The most expensive operators, a line each: time, share, calls, name."""
    operators = [event for event in averages if not event.key.startswith("ProfilerStep")]  # the step as a whole
    events = sorted(operators, key=lambda event: -getattr(event, by))
    total_us = sum(getattr(event, by) for event in events) or 1.0
    lines = [f"{'ms/step':>9} {'share':>6} {'calls/step':>10}  operator"]
    for event in events[:OPERATORS]:
        used_us = getattr(event, by)
        calls = event.count / TRACED_STEPS
        lines.append(
            f"{used_us / 1e3 / TRACED_STEPS:9.3f} {used_us / total_us:6.1%} {calls:10.1f}  {event.key.splitlines()[0]}"
        )
    return "\n".join(lines) + "\n"
