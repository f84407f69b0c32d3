"""Soft GPUs: CUDA cards for tests, on a machine without a card. README.md says what they show."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent
RUNTIME, NVML, OPERATORS = "libcuda.so.1", "libnvidia-ml.so.1", "soft_gpu_operators.so"
"""The libraries; the first two have the names that programs look for."""
STAGED = "count memory context capability dead full fail_at poison late nvml ledger trace".split()
_DECORATIONS = """
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define CUDARTAPI
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
"""
_CUDA = re.compile(r"(__)?cuda[A-Z]|cu[A-Z](?!ile)|cublas|nccl[A-Z]")
_DOES_NOTHING = re.compile(
    r"cublas\w*(Create|Destroy|Set|Get)|__cuda|cudaThreadExchange|cudaStreamDestroy|cudaProfiler"
    r"|nccl(CommFinalize|CommDestroy|CommRegister|CommDeregister|RedOpDestroy)"
)
_ANSWERS_ZERO = re.compile(r"cudaStream(IsCapturing|GetCaptureInfo|GetPriority)|ncclCommGetAsync")
"""Symbols of CUDA, by their names; of the last the second argument says where the answer goes."""


class Unavailable(Exception):
    """The reason why soft GPUs can't be built on this machine."""


@functools.cache
def built() -> Path:
    """Return the folder of the libraries for the installed torch, which are built once for each.

    Raises Unavailable, or subprocess.CalledProcessError with what the compiler says.
    """
    missing = [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"soft GPUs need {', '.join(missing)}")
    torch, version = _torch()
    sources = sorted(
        path for path in SOURCES.iterdir() if path.suffix in (".c", ".h", ".cpp", ".py")
    )
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expt-soft-gpu"
    folder = cache / f"{version}-{content[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            print(f"soft GPUs: compiled once for torch {version}", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _build(Path(scratch, "built"), torch)
                Path(scratch, "built").rename(folder)
    return folder


def _torch() -> tuple[Path, str]:
    """Return the folder and the version of torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    folder = Path(str(spec.origin)).parent if spec else Path()
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("soft GPUs need the CUDA wheel of torch")
    found: dict[str, str] = {}
    exec((folder / "version.py").read_text(), found)
    return folder, found["__version__"]


def _build(out: Path, torch: Path) -> None:
    headers = next(torch.parent.glob("nvidia/*/include/cuda_runtime_api.h"), None)
    if headers is None:
        raise Unavailable("soft GPUs need the headers of CUDA's runtime, as torch's wheel brings")
    (out / "crt").mkdir(parents=True)  # for what CUDA's headers include and its wheel lacks
    (out / "crt" / "host_config.h").write_text("")
    (out / "crt" / "host_defines.h").write_text(_DECORATIONS)
    flags = ("-fPIC", "-shared", "-w", f"-I{out}", f"-I{SOURCES}", f"-I{headers.parent}")
    c = ("gcc", "-O2", *flags, "-Wl,-rpath,$ORIGIN", "-o")
    cpp = ("g++", "-O1", *flags, "-std=c++20", f"-I{torch}/include", f"-L{torch}/lib", "-o")
    _write_others(out / "others.c", torch)
    sources = (SOURCES / "runtime.c", SOURCES / "nccl.c", out / "others.c")
    _run(*c, out / RUNTIME, *sources, f"-Wl,-soname,{RUNTIME}", *"-ldl -lpthread -lrt".split())
    _run(*c, out / NVML, SOURCES / "nvml.c", f"-Wl,-soname,{NVML}")
    libraries = "-Wl,-z,defs -lc10 -lc10_cuda -ltorch_cpu".split()
    _run(*cpp, out / OPERATORS, SOURCES / "operators.cpp", out / RUNTIME, *libraries)


def _write_others(file: Path, torch: Path) -> None:
    """Write C with each symbol that torch needs of CUDA; a call that nothing else answers fails."""
    listed = _run("nm", "-D", "--undefined-only", *torch.glob("lib/*.so"))
    names = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " U " in line}
    lines = ["#include <stdio.h>"]
    for name in sorted(filter(_CUDA.match, names)):
        error = 3 if name.startswith("nccl") else 15 if name.startswith("cublas") else 801
        body = f'fputs("soft GPU: {name} is not there\\n", stderr); return {error};'
        if _DOES_NOTHING.match(name):
            body = "return 0;"
        elif _ANSWERS_ZERO.match(name):
            body = "return *where = 0;"
        lines.append(f"__attribute__((weak)) int {name}(void *first, int *where) {{ {body} }}")
    file.write_text("\n".join(lines) + "\n")


def _run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def preload() -> str:
    """Return the value of LD_PRELOAD with which a process has the cards that are staged."""
    return f"{built() / RUNTIME}:{built() / NVML}"


def is_preloaded(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment has soft GPUs."""
    return RUNTIME in environment.get("LD_PRELOAD", "")


def staged(**wishes: object) -> dict[str, str]:
    """Return the variables of a process with these cards: `staged(count=4, dead=(1, 3))`."""
    if unknown := {*wishes} - {*STAGED}:
        raise TypeError(f"soft GPUs have no {', '.join(unknown)}; there are {', '.join(STAGED)}")
    chosen = {"LD_PRELOAD": preload()}
    for name, wish in {"count": 4, **wishes}.items():
        text = ",".join(map(str, wish)) if isinstance(wish, tuple) else str(wish)
        chosen[f"SOFT_GPU_{name.upper()}"] = str(int(wish)) if isinstance(wish, bool) else text
    return chosen


def fail() -> None:
    """Let this process's next operator access memory illegally, as SOFT_GPU_FAIL_AT does."""
    ctypes.CDLL(None).soft_gpu_fail()


def count(name: str) -> int:
    """Return this process's operators, waits, launches, races, copies to_device or to_host."""
    counter = ctypes.CDLL(None).soft_gpu_count
    counter.restype = ctypes.c_long
    return int(counter(name.encode()))
