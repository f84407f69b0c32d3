"""Soft GPUs: CUDA cards for tests, on a machine without a card. README.md says what they show."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent
RUNTIME, NVML, OPERATORS = "libcuda.so.1", "libnvidia-ml.so.1", "operators.so"
"""The libraries; the first two stand under the names that programs look for."""
_TOOLS = ("gcc", "g++", "nm")
_OF_CUDA = re.compile(r"(__)?cuda[A-Z]|cu[A-Z](?!ile)|cublas|nccl[A-Z]")
_DO_NOTHING = re.compile(
    r".*Destroy|.*Create(_v2)?$|cublas.*[SG]et|cudaFuncSet|cudaProfiler|cudaKernelSetAttribute"
)
"""Symbols of CUDA that torch needs, and those of them that succeed without doing anything."""


class Unavailable(Exception):
    """The reason why this machine can't build soft GPUs."""


class CannotBuild(Exception):
    """What the compiler said where it should have built them."""


@functools.cache
def built() -> Path:
    """Return the folder with the libraries for the installed torch, built once for each version.

    Raises Unavailable or CannotBuild.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"soft GPUs need {' and '.join(missing)}")
    torch, version = _torch()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expt-soft-gpu"
    sources = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".c", ".h", ".cpp"))
    texts = [version, *(path.read_text() for path in (*sources, Path(__file__)))]
    folder = cache / f"{version}-{hashlib.sha256(''.join(texts).encode()).hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{folder.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _build(Path(scratch), torch)
                os.rename(scratch, folder)
                Path(scratch).mkdir()  # for its removal
    return folder


def _torch() -> tuple[Path, str]:
    """Return the folder and the version of the installed torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    folder = Path(str(spec.origin)).parent if spec else Path()
    found: dict[str, str | None] = {}
    if spec:
        exec((folder / "version.py").read_text(), found)
    if not found.get("cuda") or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("soft GPUs need the CUDA wheel of torch")
    return folder, str(found["__version__"])


def _build(out: Path, torch: Path) -> None:
    headers = next(
        (path.parent for path in torch.parent.glob("nvidia/*/include/cuda_runtime_api.h")), None
    )
    if headers is None:
        raise Unavailable("soft GPUs need the headers of the CUDA runtime, beside torch's wheel")
    flags = ("-fPIC", "-w", f"-I{SOURCES}", f"-I{headers}")
    library = ("-shared", f"-L{torch}/lib")

    def compiled(name: str) -> Path:
        _run("gcc", "-O2", *flags, "-c", SOURCES / f"{name}.c", "-o", out / f"{name}.o")
        return out / f"{name}.o"

    with ThreadPoolExecutor() as pool:
        operators = pool.submit(
            _run, "g++", "-std=c++20", "-O1", *flags, *library, f"-I{torch}/include",
            SOURCES / "operators.cpp", "-o", out / OPERATORS, "-lc10", "-ltorch_cpu", "-lc10_cuda",
        )  # fmt: skip
        objects = [compiled("runtime"), compiled("nccl")]
        (out / "others.c").write_text(_others(torch, objects))
        objects.append(out / "others.c")
        _run(
            "gcc", "-O2", *flags, *library, *objects, f"-Wl,-soname,{RUNTIME}",
            "-o", out / RUNTIME, "-ldl", "-lpthread", "-lrt",
        )  # fmt: skip
        _run(
            "gcc", "-O2", *flags, *library, SOURCES / "nvml.c", f"-Wl,-soname,{NVML}",
            "-o", out / NVML,
        )  # fmt: skip
        operators.result()


def _others(torch: Path, objects: Iterable[Path]) -> str:
    """Return C for each other symbol that torch needs of CUDA: a call says its name and fails."""
    needed = _symbols(*torch.glob("lib/lib*torch*.so"), *torch.glob("lib/lib*c*.so"), dynamic=True)
    absent = sorted(needed - _symbols(*objects, dynamic=False))
    lines = ["#include <stdio.h>"]
    for name in absent:
        error = 3 if name.startswith("nccl") else 15 if name.startswith("cublas") else 801
        fails = f'fputs("soft GPU: {name} is not there\\n", stderr); return {error};'
        lines.append(f"int {name}(void) {{ {'return 0;' if _DO_NOTHING.match(name) else fails} }}")
    return "\n".join(lines) + "\n"


def _symbols(*files: Path, dynamic: bool) -> set[str]:
    """Return what these files need of CUDA (`dynamic`), or define."""
    options = ("-D", "--undefined-only") if dynamic else ("--defined-only",)
    lines = _run("nm", *options, *sorted({*files})).splitlines()
    names = {line.split()[-1].partition("@")[0] for line in lines if line[-1:].isalnum()}
    return {name for name in names if _OF_CUDA.match(name)}


def _run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"soft GPUs can't be built: {' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def preload() -> str:
    """Return the value of LD_PRELOAD with which a process has what is staged for it."""
    return f"{built() / RUNTIME}:{built() / NVML}"


def is_preloaded(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment has soft GPUs."""
    return RUNTIME in environment.get("LD_PRELOAD", "")


def staged(
    count: int = 4,
    *,
    memory: float | None = None,
    context: float | None = None,
    capability: str | None = None,
    dead: Iterable[int] = (),
    full: Iterable[int] = (),
    fail_at: int | None = None,
    poison: bool = False,
    late: bool = False,
    nvml: bool = True,
    ledger: Path | None = None,
    trace: Path | None = None,
) -> dict[str, str]:
    """Return the variables of a command that has these cards; README.md says what they mean."""
    wishes = {
        "COUNT": count,
        "MEMORY": memory,
        "CONTEXT": context,
        "CAPABILITY": capability,
        "DEAD": ",".join(map(str, dead)) or None,
        "FULL": ",".join(map(str, full)) or None,
        "FAIL_AT": fail_at,
        "POISON": int(poison) or None,
        "LATE": int(late) or None,
        "NVML": None if nvml else 0,
        "LEDGER": ledger,
        "TRACE": trace,
    }
    chosen = {f"SOFT_GPU_{name}": str(wish) for name, wish in wishes.items() if wish is not None}
    return {"LD_PRELOAD": preload(), **chosen}


def count(name: str) -> int:
    """Return how many "operators", "waits", copies "to_device", "to_host" or "within", "launches"
    or "races" this process has had.
    """
    counter = ctypes.CDLL(None).soft_gpu_count
    counter.restype = ctypes.c_long
    return int(counter(name.encode()))


def load() -> None:
    """Replace torch's operators now, where the first use of a card would; CUDA stays unused."""
    ctypes.CDLL(None).soft_gpu_load()
