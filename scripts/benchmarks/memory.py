"""Peak memory of a tree of processes, from /proc; pages that several of them share are counted
once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.2
_MIB = 1024  # of the kB that /proc speaks
_NO_WORKER = b"resource_tracker"


@dataclass
class Peak:
    """The largest values seen, each at a moment of its own [MiB]."""

    total_mib: float = 0.0
    """every process of the tree, shared pages once"""
    private_mib: float = 0.0
    """every process of the tree, without pages of files"""
    workers_mib: float = 0.0
    """the workers' part of that: a page shared by n processes counts 1/n for each"""
    workers_resident_mib: float = 0.0
    """the workers' resident sets, a shared page counted for each"""


class Sampler:
    """Looks at the tree below a process, in a thread, until it is left."""

    def __init__(self, root: int, *, root_trains: bool) -> None:
        self.peak = Peak()
        self._root, self._root_trains = root, root_trains
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        parents = children()
        tree = tree_below(self._root, parents)
        sizes = {pid: size for pid in tree if (size := _sizes(pid))}
        leaves = {
            pid
            for pid in sizes
            if not parents.get(pid) and not _is_tracker(pid) and pid != self._root
        }
        if self._root_trains and self._root in sizes:
            leaves.add(self._root)
        peak = self.peak
        peak.total_mib = max(peak.total_mib, sum(size["Pss"] for size in sizes.values()) / _MIB)
        private = sum(size.get("Pss_Anon", 0) for size in sizes.values()) / _MIB
        peak.private_mib = max(peak.private_mib, private)
        peak.workers_mib = max(peak.workers_mib, sum(sizes[pid]["Pss"] for pid in leaves) / _MIB)
        peak.workers_resident_mib = max(
            peak.workers_resident_mib, sum(sizes[pid]["Rss"] for pid in leaves) / _MIB
        )


def children() -> dict[int, list[int]]:
    """Return the children of each process that has any."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        found.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    return found


def tree_below(root: int, parents: Mapping[int, list[int]]) -> list[int]:
    """Return a process and all that it has started, directly or not."""
    tree = [root]
    for pid in tree:
        tree += parents.get(pid, [])
    return tree


def _sizes(pid: int) -> dict[str, int] | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    found = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return found if "Pss" in found else None


def _is_tracker(pid: int) -> bool:
    try:
        return _NO_WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
