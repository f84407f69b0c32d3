"""The hardware that this process may use, and settings of the process itself.

Free of torch, and initialises no CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from expt import gpus

_umasks: list[int] = []
_umask_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware that `gpus=` and `world_size=` are checked against."""

    gpus: tuple[str, ...] = ()
    """The names of visible GPUs for CUDA_VISIBLE_DEVICES; `gpus=[1]` is the second of them."""
    hidden: str = ""
    """The variable that hides GPUs of this machine, and how many it shows."""
    misnamed: bool = False
    """True if an entry is no name of a further GPU, and no deliberate `-1`."""
    cpus: int = 1
    cpu_fp16: bool = False
    """True if the CPU computes in float16 (AVX-512 FP16 or AMX-FP16)."""
    simulated: bool = False
    own_cpus: bool = False
    """True if Slurm has given this worker cores of its own, which others don't share."""
    own_gpus: bool = False
    """True if Slurm has given this worker GPUs of its own, which others don't see."""
    workers: int | None = None
    """How many torchrun or Slurm has started; None where expt starts them."""
    local_workers: int | None = None
    """Those of them on this machine."""


def detect() -> Machine:
    """Return this machine, within CPU affinity and CUDA_VISIBLE_DEVICES."""
    simulated = os.environ.get(gpus.SIMULATED_GPUS)
    shown = gpus.Visible(tuple(map(str, range(int(simulated))))) if simulated else gpus.visible()
    is_task, workers, local_workers = False, None, None
    if is_external_worker():
        is_task = "SLURM_PROCID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
        workers = int(os.environ["WORLD_SIZE"])
        local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
    return Machine(
        **shown._asdict(),
        cpus=usable_cpus(),
        simulated=bool(simulated),
        own_cpus=is_task
        and len(os.sched_getaffinity(0)) < int(os.environ.get("SLURM_CPUS_ON_NODE", "0")),
        # Fewer than tasks are not those of the node, however Slurm was asked to bind them.
        own_gpus=is_task and 0 < len(shown.gpus) < (local_workers or 0),
        workers=workers,
        local_workers=local_workers,
        cpu_fp16=bool({"avx512_fp16", "amx_fp16"} & {*_cpu_flags()}),
    )


def is_external_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or a scheduler has started this process as a worker."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def command_alone(environment: Mapping[str, str]) -> str:
    """Return the command that takes this process for no worker of a larger job."""
    counts = ("SLURM_STEP_NUM_TASKS", "SUBMITIT_LOCAL_NTASKS")
    names = ["RANK", *(name for name in counts if name in environment)]
    return f"env {' '.join(f'-u {name}' for name in names)} python -m expt ..."


def usable_cpus() -> int:
    """Return the cores that this process may run on, by affinity and by cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def available_memory() -> int:
    """Return the bytes that this process may still take.

    Within the machine, its cgroup and its own limits (`ulimit -d`, `-v`).
    """
    available = int(facts("/proc/meminfo").get("MemAvailable", "0").split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
        group = Path("/sys/fs/cgroup")
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        available = min(available, int((group / "memory.max").read_text()) - int(used["anon"]))
    status = facts("/proc/self/status")
    for limit, field in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and field in status:
            available = min(available, most - int(status[field].split()[0]) * 1024)
    return max(0, available)


def slow_in_bfloat16() -> bool:
    """Return whether this CPU lacks arithmetic in bfloat16, which is then slower than float32."""
    flags = _cpu_flags()
    return bool(flags) and not any("bf16" in flag for flag in flags)


def _cpu_flags() -> list[str]:
    cpu = facts("/proc/cpuinfo")
    return (cpu.get("flags") or cpu.get("Features") or "").split()  # of x86, of ARM


def facts(path: str) -> dict[str, str]:
    """Return the `key: value` lines of a file of /proc, up to an empty one; none without it."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8")
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def for_child() -> dict[str, str]:
    """Return the environment of a new Python that imports from where this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def umask() -> int:
    """Return the permissions that this process takes from new files."""
    return int(facts("/proc/self/status")["Umask"], 8)


@contextlib.contextmanager
def not_world_writable() -> Iterator[None]:
    """Let only owner and group write to files that are created while entered, whatever the umask.

    That is the process's: of several threads the first sets it and the last one sets it back.
    """
    with _umask_lock:
        _umasks.append(os.umask(umask() | stat.S_IWOTH))
    try:
        yield
    finally:
        with _umask_lock:
            if len(_umasks) == 1:
                os.umask(_umasks[0])
            _umasks.pop()


@contextlib.contextmanager
def impatient(seconds: float = 10.0) -> Iterator[None]:
    """Give up on a server that does not answer: libraries would wait for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Collect garbage every 100,000 new objects, not 700, while entered.

    It takes a quarter off the time of a command on 10,000 runs, for 5 MiB of memory.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(100_000, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
