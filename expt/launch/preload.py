"""Imports and objects that the forkserver makes, so that no worker has to.

For every run torch's libraries are loaded by a thread, while Python imports modules that need none
of them: 0.3 s. No other library can be loaded meanwhile, nor used for the first time: those of
Python and pydantic's are before.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterable
from typing import Any

from pydantic_core import SchemaValidator

_LIBRARIES_OF_PYTHON = (
    *("_asyncio", "_blake2", "_bz2", "_contextvars", "_csv", "_datetime", "_decimal", "_hashlib"),
    *("_heapq", "_json", "_lzma", "_multiprocessing", "_opcode", "_pickle", "_posixshmem"),
    *("_queue", "_ssl", "_statistics", "_typing", "_uuid", "_zoneinfo", "binascii", "cmath"),
    *("grp", "mmap", "resource", "unicodedata", "zlib"),
)
_MEANWHILE = (
    *("expt.runs.attempt", "asyncio", "concurrent.futures.process", "torchgen.model", "tqdm"),
    *("unittest.mock", "urllib.request"),
)
"""Modules for a worker or torch that need no torch themselves."""
_BINDING_THREADS = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
"""Variables by which a library binds the thread that loads it to a core."""


def _load_libraries() -> None:
    """Load torch's libraries as torch does, but without holding Python's lock."""
    if (torch := importlib.util.find_spec("torch")) and torch.origin:
        folder, dlopen = os.path.dirname(torch.origin), ctypes.CDLL(None).dlopen
        dlopen(os.fsencode(f"{folder}/lib/libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
        dlopen(os.fsencode(f"{folder}/lib/libtorch.so"), os.RTLD_NOW)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # torch and Python do without it, or say so
            importlib.import_module(name)


def for_all() -> None:
    """Load the modules of every run, torch's libraries meanwhile."""
    _import(_LIBRARIES_OF_PYTHON)
    SchemaValidator({"type": "int"}).validate_python(1)
    thread = threading.Thread(target=_load_libraries)
    if not _BINDING_THREADS & os.environ.keys():
        thread.start()
    _import(_MEANWHILE)
    if thread.ident is not None:
        thread.join()
    importlib.import_module("expt.worker.main")
    # torch looks for gloo among all installed packages, once in a process
    importlib.import_module("torch.distributed.distributed_c10d").BackendConfig("gloo")


def for_sweep() -> None:
    """Load more modules that many runs need: else each worker would, in 40 ms."""
    import encodings.ascii
    import encodings.latin_1  # noqa: F401

    import numpy.random  # noqa: F401
    import PIL.ImageDraw  # noqa: F401
    import tensorboard.plugins.hparams.metadata  # noqa: F401
    import torch.utils.serialization
    import torch.utils.tensorboard  # noqa: F401
    from PIL import Image

    import expt.data.images
    import expt.data.table_source  # noqa: F401
    from expt.config import length
    from expt.runs import provenance, result

    provenance.imported_versions()
    Image.preinit()  # the formats that pictures are written in
    "é".encode("latin-1").decode("cp437")  # PIL's font is
    result.as_written()
    length.defaults()  # which runs too short for some settings ask for


def for_sharding() -> None:
    """Load the modules of sharded models: else each worker would, in 2 seconds of a core."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    # imports torch._dynamo, by which fully_shard keeps its hooks from being compiled
    torch.compiler.reset()


def for_transformers() -> None:
    """Load the modules of every model of transformers: else each worker would, in 5 seconds."""
    transformers: Any = importlib.import_module("transformers")
    _ = transformers.AutoModelForCausalLM, transformers.PreTrainedModel  # imported as they are used
