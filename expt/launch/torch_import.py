"""torch's import, sooner: what need not wait for it, and what no machine without a driver of CUDA
has a use for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

RTLD_NOW = 2  # dlopen(3)
LIBRARIES = {
    "libtorch_global_deps.so": RTLD_NOW | ctypes.RTLD_GLOBAL,
    "libtorch.so": RTLD_NOW,
}  # as torch loads them
BINDING_THREADS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which a library binds the thread that loads it to a core."""
FOR_CUDA = ("cuda.bindings", "pynvml")
MEANWHILE = (
    *(
        "expt.config.schema",
        "expt.data.fingerprint",
        "expt.runs.request",
        "concurrent.futures.process",
    ),
    *("torchgen.model", "urllib.request", "tqdm", "tarfile", "dill"),
)
"""What a worker needs, or torch, that is Python alone but for libraries of `OF_PYTHON`, and
pydantic's: 0.3 s.
"""
OF_PYTHON = (
    *(
        "_blake2",
        "_bz2",
        "_contextvars",
        "_csv",
        "_datetime",
        "_decimal",
        "_hashlib",
        "_heapq",
        "_json",
        "_lzma",
    ),
    *(
        "_multiprocessing",
        "_opcode",
        "_posixshmem",
        "_queue",
        "_ssl",
        "_statistics",
        "_typing",
        "_uuid",
        "_zoneinfo",
    ),
    *("binascii", "cmath", "grp", "mmap", "resource", "unicodedata"),
)
PYDANTIC = "pydantic_core._pydantic_core"
COMPILED_LATE = ("__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__")


@contextlib.contextmanager
def libraries_loaded() -> Iterator[None]:
    """A thread loads torch's libraries meanwhile: 0.4 s, in which Python has nothing to do but
    import `MEANWHILE`.

    Where they are elsewhere, or cannot be loaded so, torch's own import does it.
    """
    found = importlib.util.find_spec("torch")
    if (
        sys.platform != "linux"
        or not found
        or not found.origin
        or any(map(os.environ.get, BINDING_THREADS))
    ):
        yield
        return
    _load_others()
    thread = threading.Thread(
        target=_load, args=(os.path.join(os.path.dirname(found.origin), "lib"),)
    )
    thread.start()
    try:
        yield
    finally:
        thread.join()
        package, _, name = PYDANTIC.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], name, sys.modules[PYDANTIC])  # as an import of it does


def _load_others() -> None:
    """No thread can load a library, nor use pydantic's for the first time, while another thread
    loads torch's.
    """
    for name in OF_PYTHON:
        with contextlib.suppress(
            ImportError
        ):  # a Python that was built without it, or has another name for it
            importlib.import_module(name)
    package = importlib.util.find_spec(PYDANTIC.rpartition(".")[0])
    folders = package.submodule_search_locations if package else None
    spec = importlib.machinery.PathFinder.find_spec(PYDANTIC, folders)
    if spec and spec.loader and PYDANTIC not in sys.modules:
        sys.modules[PYDANTIC] = module = importlib.util.module_from_spec(
            spec
        )  # without the package: that is Python
        spec.loader.exec_module(module)
        module.SchemaValidator({"type": "int"}).validate_python(1)


def _load(folder: str) -> None:
    dlopen = ctypes.CDLL(
        None
    ).dlopen  # called so it waits without Python's lock; ctypes.CDLL(path) holds it
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, mode in LIBRARIES.items():
        if not dlopen(os.fsencode(os.path.join(folder, name)), mode):
            return


def tell_loaded() -> None:
    """Let the driver know, which may be waiting for it."""
    from expt.launch.forkserver import LOADING  # late: meanwhile its own imports were made

    if descriptor := os.environ.pop(LOADING, ""):
        os.close(int(descriptor))


def import_meanwhile() -> None:
    """Import what torch's libraries are not needed for.

    What is not installed, torch does without as well.
    """
    for name in MEANWHILE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let torch's import find no packages for CUDA's driver where there is none: 0.06 s.

    They can be imported later.
    """
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


@contextlib.contextmanager
def without_source() -> Iterator[None]:
    """Let torch's import note where its operators are defined without reading the lines around it:
    0.05 s.
    """
    real = inspect.getframeinfo
    inspect.getframeinfo = functools.partial(real, context=0)
    try:
        yield
    finally:
        inspect.getframeinfo = real


@contextlib.contextmanager
def dataclasses_compiled_late() -> Iterator[None]:
    """Let the methods of dataclasses that are made meanwhile be compiled when they are first
    called: 0.1 s.

    Torch and expt have 400 of them, and few of these methods are ever called. Python 3.13 compiles
    them otherwise."""
    create = getattr(dataclasses, "_create_fn", None)
    if create is None:
        yield
        return

    def create_late(name: str, *arguments: Any, **options: Any) -> Any:
        compiled = functools.cache(functools.partial(create, name, *arguments, **options))
        return _late(name, compiled) if name in COMPILED_LATE else compiled()

    dataclasses._create_fn = create_late  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dataclasses._create_fn = create  # type: ignore[attr-defined]


def _late(name: str, compiled: Callable[[], Any]) -> Any:
    """What takes the place of a method until it is called."""

    def late(self: Any, *arguments: Any) -> Any:
        method = compiled()
        method.__qualname__ = late.__qualname__
        for kind in type(self).__mro__:
            if vars(kind).get(name) is late:
                setattr(kind, name, method)
        return method(self, *arguments)

    late.__name__ = name
    return late
