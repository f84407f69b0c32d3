"""The GPUs that this process sees, by NVML or by torch in a process of its own.

Free of torch, and initialises no CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from expt.errors import warn

SIMULATED_GPUS = "EXPT_SIMULATED_GPUS"
"""Environment variable: pretend to have N GPUs, and compute on the CPU. For tests of scheduling."""
MPS_DAEMON, MPS_FOLDER = "nvidia-cuda-mps-control", "/tmp/nvidia-mps"
_DRIVERS: dict[str, Callable[[], object]] = {  # of torch's kinds; OSError where it is missing
    "cuda": lambda: ctypes.CDLL("libcuda.so.1"),
    "hip": lambda: os.stat("/dev/kfd"),
}
_ASK_TORCH = """
from torch.cuda import device_count, get_device_properties
for gpu in map(get_device_properties, range(device_count())):
    print(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}", gpu.name)
"""


class Visible(NamedTuple):
    """The GPUs that CUDA, or AMD's HIP, shows; the fields are those of Machine."""

    gpus: tuple[str, ...]
    hidden: str = ""
    misnamed: bool = False


def visible() -> Visible:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows, read as torch reads it.

    Where an entry repeats, torch would show no GPU at all.
    """
    variable = "CUDA_VISIBLE_DEVICES"
    if "HIP_VISIBLE_DEVICES" in os.environ and _torch_is_for() == "hip":
        variable = "HIP_VISIBLE_DEVICES"
    entries, uuids = os.environ.get(variable), [uuid for uuid, _ in _gpus()]
    if entries is None or not uuids:
        return Visible(tuple(map(str, range(len(uuids)))))
    gpus, misnamed, odd = _read_entries(entries, uuids)
    if len(gpus) >= len(uuids):
        return Visible(gpus)
    hidden = f"{variable}={entries} shows {len(gpus)} of this machine's {len(uuids)} GPUs"
    if misnamed:
        hidden += f" (the list ends at {misnamed})"
    elif odd:
        hidden += f" ({odd})"
    return Visible(gpus, hidden, bool(misnamed or odd))


def _read_entries(entries: str, uuids: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the names of GPUs, an entry that ends the list early, and one that is odd, in words.

    CUDA ignores all that follows such an end. Empty where there is none.
    """
    # Without NVML no UUID is known. CUDA shows slices (MIG) that NVML does not count.
    unknown = ("MIG-",) if any(uuid.startswith("GPU-") for uuid in uuids) else ("MIG-", "GPU-")
    names, odd = dict[str, str](), ""  # by UUID
    kinds = set[str]()  # of names: numbers, GPU, MIG
    for entry in map(str.strip, entries.rstrip().removesuffix(",").split(",")):
        number = re.match(r"[+-]?[0-9]+", entry)  # of `1gpu` too, as strtoul reads it
        name = str(int(number[0])) if number else entry
        uuid = _uuid(name, uuids)
        kinds.add(re.sub(r"-.*|[0-9]+", "", name))
        if uuid in names or len(kinds) > 1 or not (uuid in uuids or name.startswith(unknown)):
            is_meant = not entries.strip() or name.startswith("-")
            return (*names.values(),), "" if is_meant else entry or "an empty entry", odd
        if number and number[0] != entry:
            odd = f"{entry} is read as {name}"
        names[uuid] = name
    return (*names.values(),), "", odd


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


def setting(gpus: Sequence[int]) -> str:
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


def gpu_names() -> list[str]:
    """Return the product name of each GPU that is installed."""
    return [name for _, name in _gpus()]


def energy_j(gpus: Sequence[str]) -> float | None:
    """Return the joules that these GPUs have used since the driver was loaded.

    None where NVML has no such meter.
    """
    if not gpus or is_simulated():
        return None
    import pynvml

    with contextlib.suppress(pynvml.NVMLError, ValueError), _nvml():
        handles = [
            (
                pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(gpu))
                if gpu.startswith("GPU-")
                else pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
            )
            for gpu in gpus
        ]
        millijoules = map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)
        return sum(map(float, millijoules)) / 1000
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
