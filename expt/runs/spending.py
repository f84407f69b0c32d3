"""What a run costs: seconds of its devices, and the energy of its GPUs where NVML measures it.

Free of torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from expt import machine
from expt.runs.result import Record


class Total(NamedTuple):
    """What several runs have cost together."""

    device_s: float
    runs: int
    """Those that have cost anything."""
    energy_j: float
    measured: int
    """Of how many of them the energy is known."""


def at_start(devices: Sequence[str], earlier: Record) -> Record:
    """For the record of an attempt that begins: what attempts before it have cost, and what the
    meters show.
    """
    begun: Record = {"device_s_before": device_s(earlier)} if earlier else {}
    if (shown := machine.energy_j(devices)) is not None:
        begun["energy_j_before"] = earlier.get("energy_j", 0.0) - shown
    return begun


def until_now(record: Record, ended_at: float | None = None) -> Record:
    """What a run has cost, at the end of an attempt; of its energy only this machine knows, if it
    was here.

    `ended_at` [by time.time] is given where the attempt had ended before.
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
    """GPUs, or on a CPU the cores that the workers are given."""
    if record.get("devices"):
        return len(record["devices"])
    threads: int = (record.get("config") or {}).get("threads", 1)
    return record.get("world_size", 1) * threads


def device_s(record: Record) -> float:
    """Seconds for which the run has kept devices busy, times their number; of one that was killed
    what it trained.
    """
    if "device_s" in record:
        return record["device_s"]
    trained = num_devices(record) * (sum(record.get("epoch_s") or ()) + record.get("eval_s", 0.0))
    return record.get("device_s_before", 0.0) + trained


def totals(records: Iterable[Record]) -> dict[str, Total]:
    """What the runs on GPUs have cost, and those on a CPU's cores; a kind of device that none has
    used is left out.
    """
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        if device_s(record) > 0:
            by_kind.setdefault("GPU" if record.get("devices") else "core", []).append(record)
    return {kind: _total(found) for kind, found in sorted(by_kind.items())}


def _total(records: Sequence[Record]) -> Total:
    energies = [record["energy_j"] for record in records if "energy_j" in record]
    return Total(sum(map(device_s, records)), len(records), sum(energies), len(energies))
