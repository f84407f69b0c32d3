"""torch's import, sooner: what need not wait for it, what has no use without a driver of CUDA, what nobody reads."""

from __future__ import annotations

import contextlib
import contextvars  # noqa: F401
import ctypes
import datetime  # noqa: F401
import decimal  # noqa: F401
import functools
import hashlib  # noqa: F401
import heapq  # noqa: F401
import importlib.metadata
import importlib.util
import inspect
import json  # noqa: F401
import os
import sys
import threading
import uuid  # noqa: F401
import zoneinfo  # noqa: F401
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pydantic_core

OF_PYTHON = ("_asyncio", "_multiprocessing", "_posixshmem", "_queue", "_ssl", "_statistics", "cmath", "grp", "mmap")
for _name in (*OF_PYTHON, "resource", "unicodedata"):
    with contextlib.suppress(ImportError):  # a Python that was built without it
        importlib.import_module(_name)
# These modules and those above have libraries of their own: no thread can load one, nor use pydantic's for the first
# time, while another thread loads torch's.
pydantic_core.SchemaValidator(pydantic_core.core_schema.int_schema()).validate_python(1)

RTLD_NOW = 2  # dlopen(3)
LIBRARIES = {"libtorch_global_deps.so": RTLD_NOW | ctypes.RTLD_GLOBAL, "libtorch.so": RTLD_NOW}  # as torch loads them
BINDING_THREADS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which a library binds the thread that loads it to a core."""
FOR_CUDA = ("cuda.bindings", "pynvml")
MEANWHILE = (
    *("expt.config.schema", "expt.data.files", "expt.runs.request"),
    *("unittest.mock", "urllib.request", "torchgen.model", "tqdm", "tarfile", "concurrent.futures.process", "dill"),
)
"""What has no library of its own, and is imported by a worker or by torch: 0.3 s."""


@contextlib.contextmanager
def libraries_loaded() -> Iterator[None]:
    """A thread loads torch's libraries meanwhile: 0.4 s, in which Python has nothing to do but import `MEANWHILE`.

    Where they are elsewhere, or cannot be loaded so, torch's own import does it.
    """
    found = importlib.util.find_spec("torch")
    if sys.platform != "linux" or not found or not found.origin or any(map(os.environ.get, BINDING_THREADS)):
        yield
        return
    thread = threading.Thread(target=_load, args=(Path(found.origin).parent / "lib",))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # called so it waits without Python's lock; ctypes.CDLL(path) holds it
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, mode in LIBRARIES.items():
        if not dlopen(os.fsencode(folder / name), mode):
            return


def import_meanwhile() -> None:
    """Import what torch's libraries are not needed for. What is not installed, torch does without as well."""
    for name in MEANWHILE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@contextlib.contextmanager
def without_source() -> Iterator[None]:
    """Let torch's import note where each of its operators is defined without reading the lines around it: 0.06 s."""
    real = inspect.getframeinfo
    inspect.getframeinfo = functools.partial(real, context=0)
    try:
        yield
    finally:
        inspect.getframeinfo = real


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let torch's import find no packages for CUDA's driver where there is none: 0.06 s. They can be imported later."""
    try:
        ctypes.CDLL("libcuda.so.1")
        names: tuple[str, ...] = ()
    except OSError:
        names = tuple(name for name in FOR_CUDA if name not in sys.modules)
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(names))  # None: an ImportError
    try:
        yield
    finally:
        for name in names:
            modules.pop(name, None)
