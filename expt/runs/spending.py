"""The cost of a run: seconds of its devices, and the energy of its GPUs by NVML. No torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from expt import machine
from expt.runs.result import Record


class Total(NamedTuple):
    """The cost of several runs together."""

    device_s: float
    runs: int
    """The number of those that have cost anything."""
    energy_j: float
    measured: int
    """The number of those whose energy is known."""


def at_start(devices: Sequence[str], earlier: Record) -> Record:
    """Return the cost of earlier attempts, for the record of one that begins, and the meters."""
    begun: Record = {"device_s_before": device_s(earlier)} if earlier else {}
    if (shown := machine.energy_j(devices)) is not None:
        begun["energy_j_before"] = earlier.get("energy_j", 0.0) - shown
    return begun


def until_now(record: Record, ended_at: float | None = None) -> Record:
    """Return the cost of a run at the end of an attempt, `ended_at` [by time.time] or now.

    Its energy is known only on the machine where it ran.
    """
    if "started" not in record:
        return {}
    lasted_s = max(0.0, (time.time() if ended_at is None else ended_at) - record["started"])
    spent: Record = {
        "device_s": record.get("device_s_before", 0.0) + num_devices(record) * lasted_s
    }
    here = record.get("node") == socket.gethostname()
    shown = (
        machine.energy_j(record.get("devices") or ())
        if here and "energy_j_before" in record
        else None
    )
    if shown is not None:
        spent["energy_j"] = record["energy_j_before"] + shown
    return spent


def num_devices(record: Record) -> int:
    """Return the number of GPUs, or of the cores that workers on a CPU are given."""
    if record.get("devices"):
        return len(record["devices"])
    threads: int = (record.get("config") or {}).get("threads", 1)
    return record.get("world_size", 1) * threads


def device_s(record: Record) -> float:
    """Return the seconds that devices were busy; of a run that was killed those of training."""
    if "device_s" in record:
        return record["device_s"]
    trained = num_devices(record) * (sum(record.get("epoch_s") or ()) + record.get("eval_s", 0.0))
    return record.get("device_s_before", 0.0) + trained


def totals(records: Iterable[Record]) -> dict[str, Total]:
    """Return the cost of runs by the kind of their devices, GPU or core."""
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        if device_s(record) > 0:
            by_kind.setdefault("GPU" if record.get("devices") else "core", []).append(record)
    return {kind: _total(found) for kind, found in sorted(by_kind.items())}


def _total(records: Sequence[Record]) -> Total:
    energies = [record["energy_j"] for record in records if "energy_j" in record]
    return Total(sum(map(device_s, records)), len(records), sum(energies), len(energies))
