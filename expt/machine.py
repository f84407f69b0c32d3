"""Detect the GPUs, CPU cores and half precision of this machine.

Free of torch, and initialises no CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expt.errors import warn

_umasks: list[int] = []
_umask_lock = threading.Lock()
SIMULATED_GPUS = "EXPT_SIMULATED_GPUS"
"""Environment variable: pretend to have N GPUs, and compute on the CPU. For tests of scheduling."""
MPS_DAEMON, MPS_FOLDER = "nvidia-cuda-mps-control", "/tmp/nvidia-mps"


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
    simulated = os.environ.get(SIMULATED_GPUS)
    shown = {"gpus": tuple(map(str, range(int(simulated))))} if simulated else _shown()
    is_task = (
        is_external_worker()
        and "SLURM_PROCID" in os.environ
        and "TORCHELASTIC_RUN_ID" not in os.environ
    )
    workers, local_workers = None, None
    if is_external_worker():
        workers = int(os.environ["WORLD_SIZE"])
        local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
    return Machine(
        **shown,
        cpus=usable_cpus(),
        simulated=bool(simulated),
        own_cpus=is_task and _bound_cpus() < int(os.environ.get("SLURM_CPUS_ON_NODE", "0")),
        # Fewer than tasks are not those of the node, however Slurm was asked to bind them.
        own_gpus=is_task and 0 < len(shown["gpus"]) < (local_workers or 0),
        workers=workers,
        local_workers=local_workers,
        cpu_fp16=bool({"avx512_fp16", "amx_fp16"} & {*_cpu_flags()}),
    )


def visible_gpus() -> tuple[str, ...]:
    """Return the identifiers of the GPUs that CUDA, or AMD's HIP, would show."""
    gpus: tuple[str, ...] = _shown()["gpus"]
    return gpus


def _shown() -> dict[str, Any]:
    """Return the fields of Machine that depend on CUDA_VISIBLE_DEVICES.

    Its entries are read as torch reads them. Where one repeats, torch would show no GPU at all.
    """
    variable = "CUDA_VISIBLE_DEVICES"
    if "HIP_VISIBLE_DEVICES" in os.environ and _torch_is_for() == "hip":
        variable = "HIP_VISIBLE_DEVICES"
    visible, uuids = os.environ.get(variable), [uuid for uuid, _ in _gpus()]
    if visible is None or not uuids:
        return {"gpus": tuple(map(str, range(len(uuids))))}
    # Without NVML no UUID is known. CUDA shows slices (MIG) that NVML does not count.
    unknown = ("MIG-",) if any(uuid.startswith("GPU-") for uuid in uuids) else ("MIG-", "GPU-")
    found, kinds, misnamed = dict[str, str](), set[str](), ""  # names by UUID; numbers, GPU-, MIG-
    odd = ""
    for entry in map(str.strip, visible.rstrip().removesuffix(",").split(",")):
        number = re.match(r"[+-]?[0-9]+", entry)  # of `1gpu` too, as strtoul reads it
        name = str(int(number[0])) if number else entry
        uuid = _uuid(name, uuids)
        kinds.add(re.sub(r"-.*|[0-9]+", "", name))
        if uuid in found or len(kinds) > 1 or not (uuid in uuids or name.startswith(unknown)):
            if visible.strip() and not name.startswith("-"):
                misnamed = entry or "an empty entry"
            break  # CUDA ignores all that follows
        if number and number[0] != entry:
            odd = f" ({entry} is read as {name})"
        found[uuid] = name
    hidden = f"{variable}={visible} shows {len(found)} of this machine's {len(uuids)} GPUs"
    hidden += f" (the list ends at {misnamed})" if misnamed else odd
    few = len(found) < len(uuids)
    return {
        "gpus": (*found.values(),),
        "hidden": hidden if few else "",
        "misnamed": few and bool(misnamed or odd),
    }


def is_external_worker() -> bool:
    """Return whether torchrun or a scheduler has started this process as a worker."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def alone(environment: Mapping[str, str]) -> str:
    """Return the command that takes this process for no worker of a larger job."""
    counts = ("SLURM_STEP_NUM_TASKS", "SUBMITIT_LOCAL_NTASKS")
    names = ["RANK", *(name for name in counts if name in environment)]
    return f"env {' '.join(f'-u {name}' for name in names)} python -m expt ..."


def usable_cpus() -> int:
    """Cores that this process may run on, by affinity and by cgroup quota."""
    cores = _bound_cpus()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _bound_cpus() -> int:
    return len(os.sched_getaffinity(0))


def is_simulated() -> bool:
    """Return whether the GPUs of this process are simulated, see SIMULATED_GPUS."""
    return bool(os.environ.get(SIMULATED_GPUS))


def is_slice(gpu: str) -> bool:
    """Return whether it is a slice of a GPU (MIG); CUDA shows a process only the first."""
    return gpu.startswith("MIG-")


def gpu_uuid(gpu: str) -> str:
    """Return the full UUID of a GPU of CUDA_VISIBLE_DEVICES; `gpu` itself where none is known.

    A number is of those that this process may use: in a job of Slurm's each GPU may be number 0.
    """
    return _uuid(gpu, [uuid for uuid, _ in _gpus()])


def _uuid(gpu: str, uuids: Sequence[str]) -> str:
    if gpu.isascii() and gpu.isdecimal():
        return dict(enumerate(uuids)).get(int(gpu), gpu)
    found = [uuid for uuid in uuids if gpu.startswith("GPU-") and uuid.startswith(gpu)]
    return found[0] if len(found) == 1 else gpu


def instead(gpus: Sequence[int]) -> str:
    """Return the setting that takes the GPUs of these numbers; for none the CPU's."""
    return f"gpus=[{','.join(map(str, gpus))}]" if gpus else "gpus=0"


def mps_runs() -> bool:
    """Return whether a daemon of NVIDIA's Multi-Process Service runs for this environment.

    Its socket stays when it ends, the file with its number goes. A daemon of another container
    can't be seen.
    """
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_FOLDER)
    try:
        number = int((folder / f"{MPS_DAEMON}.pid").read_text())
        program = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")[0]
    except (OSError, ValueError):
        return False
    return os.path.basename(program) == MPS_DAEMON.encode()


def available_memory() -> int:
    """Return the bytes that this process may still take.

    Within the machine, its cgroup and its own limits (`ulimit -d`, `-v`).
    """
    available = 0
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
        group = Path("/sys/fs/cgroup")
        anonymous = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())[
            "anon"
        ]
        available = min(available, int((group / "memory.max").read_text()) - int(anonymous))
    status = _status()
    for limit, field in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and field in status:
            available = min(available, most - int(status[field].split()[0]) * 1024)
    return max(0, available)


def gpu_names() -> list[str]:
    """Return the product name of each GPU that is installed."""
    return [name for _, name in _gpus()]


def energy_j(gpus: Sequence[str]) -> float | None:
    """Return the joules that these GPUs have used since the driver was loaded.

    None where NVML has no such meter.
    """
    if not gpus:
        return None
    import pynvml

    with contextlib.suppress(pynvml.NVMLError, ValueError), _nvml():
        handles = [
            (
                pynvml.nvmlDeviceGetHandleByUUID(gpu)
                if gpu.startswith("GPU-")
                else pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
            )
            for gpu in gpus
        ]
        return (
            sum(float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in handles)
            / 1000
        )
    return None


def _gpus() -> Sequence[tuple[str, str]]:
    """Return the UUID and the product name of each GPU that is installed."""
    import pynvml

    found = list[tuple[str, str]]()
    try:
        with _nvml():
            for index in range(pynvml.nvmlDeviceGetCount()):
                found.append((str(index), "unknown"))
                with contextlib.suppress(pynvml.NVMLError):  # it has dropped out
                    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
                    found[-1] = pynvml.nvmlDeviceGetUUID(gpu), pynvml.nvmlDeviceGetName(gpu)
    except pynvml.NVMLError:
        return _gpus_of_torch()
    return found


_DRIVERS: dict[str, Callable[[], object]] = {  # of torch's kinds; OSError where it is missing
    "cuda": lambda: ctypes.CDLL("libcuda.so.1"),
    "hip": lambda: os.stat("/dev/kfd"),
}
_ASK_TORCH = """
from torch.cuda import device_count, get_device_properties
for gpu in map(get_device_properties, range(device_count())):
    print(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}", gpu.name)
"""


@functools.cache
def _gpus_of_torch() -> Sequence[tuple[str, str]]:
    """Return the PCI address and the name of each GPU that torch sees, where there is no NVML.

    In a process of its own, since this one must not initialise CUDA, and only where torch is built
    for GPUs and their driver is there.
    """
    try:
        _DRIVERS[_torch_is_for()]()
    except (KeyError, OSError):
        return ()
    shown = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in shown}
    command = [sys.executable, "-c", _ASK_TORCH]
    lines = subprocess.run(command, env=env, capture_output=True, text=True).stdout.splitlines()
    return [(address, name) for address, _, name in (line.partition(" ") for line in lines)]


@functools.cache
def _torch_is_for() -> str:
    """Return the kind of GPUs that torch is built for (cuda, hip, xpu), without importing it."""
    spec, found = importlib.util.find_spec("torch"), None
    with contextlib.suppress(OSError):
        text = Path((spec and spec.origin) or "").with_name("version.py").read_text()
        found = re.search(r"^(cuda|hip|xpu)\b.*= '", text, re.MULTILINE)
    return found[1] if found else ""


@functools.cache
def note_unused(why: str = "") -> None:
    """Warn once why GPUs are left out, by default if they are Intel's."""
    if not why and _torch_is_for() == "xpu":
        why = "is the CPU, since expt does not train on Intel's GPUs (torch.xpu)"
    if why:
        warn(f"gpus=auto: {why}")


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def slow_in_bfloat16() -> bool:
    """Return whether this CPU lacks arithmetic in bfloat16, which is then slower than float32."""
    flags = _cpu_flags()
    return bool(flags) and not any("bf16" in flag for flag in flags)


def _cpu_flags() -> list[str]:
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return []
    lines = (line.partition(":") for line in first.splitlines())
    facts = {key.strip(): value.split() for key, _, value in lines}
    return facts.get("flags") or facts.get("Features") or []  # of x86, of ARM


def umask() -> int:
    """Return the permissions that this process takes from new files."""
    return int(_status()["Umask"], 8)


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


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
