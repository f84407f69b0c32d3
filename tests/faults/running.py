"""A run under way, and what is left when it has ended: what the kernel says, not what expt says."""

import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.facade import Process, descendants, start

LONG = ("epochs=100000", "log_every=5", "hydra.run.dir=here")


def wait_until(
    condition: Callable[[], object], process: Process | None = None, timeout_s: float = 60
) -> None:
    """Poll until `condition` holds; fails after `timeout_s`, or once `process` has ended."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.01)


def training(
    tmp_path: Path, *arguments: str, begin: Callable[..., Process] = start
) -> tuple[Process, set[int]]:
    """A long run that has begun to train, and every process it consists of but the driver."""
    process = begin(*LONG, *arguments, cwd=tmp_path)
    metrics = tmp_path / "here" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, process)
    return process, descendants(process.pid)


def ranks(processes: Iterable[int]) -> dict[int, int]:
    """From rank to pid, by the file that each worker's stdout goes to."""
    found = {}
    for pid in processes:
        try:
            target = Path(os.readlink(f"/proc/{pid}/fd/1"))
        except (FileNotFoundError, PermissionError):
            continue
        if target.name == "stdout.log":
            found[int(target.parent.name)] = pid
    return found


def waits_for(pid: int, number: signal.Signals) -> bool:
    """Whether the process was sent the signal, and has not taken it yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
    return bool(pending >> (number - 1) & 1)


def working_in(folder: Path) -> set[int]:
    """The processes whose current folder is this one, or within it."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink().is_relative_to(folder):
                found.add(int(path.parent.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Addresses and ports that the processes listen on, from the kernel's own tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return [(address, port) for address, port, inode in _listeners() if inode in inodes]


def open_ports() -> set[int]:
    """The TCP ports on which anybody on this machine listens."""
    return {port for _, port, _ in _listeners()}


def _listeners() -> list[tuple[str, int, str]]:
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                packed = bytes.fromhex(address)
                words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]
                found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16), fields[9]))
    return found
