"""What makes torch's import sooner, each in a Python of its own: a library is loaded once in a process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expt.launch import torch_import

PROGRAM = """
import sys, threading
from pathlib import Path
from expt.launch import torch_import
maps = lambda: Path("/proc/self/maps").read_text()
assert "libtorch_cpu" not in maps()
with torch_import.libraries_loaded():
    torch_import.import_meanwhile()
    assert "torch" not in sys.modules and "numpy" not in sys.modules
print("libtorch_cpu" in maps(), threading.active_count())
with torch_import.without_cuda():
    print([name for name in torch_import.FOR_CUDA if name in sys.modules])
print([name for name in torch_import.FOR_CUDA if name in sys.modules])
import pydantic_core
assert pydantic_core._pydantic_core.__version__ == pydantic_core.__version__
"""


@pytest.mark.parametrize("bound", [False, True])
def test_its_libraries_are_loaded_by_a_thread_that_is_gone(bound: bool) -> None:
    """Not where the thread that loads them is bound to a core. A machine with CUDA's driver keeps its packages."""
    environment = {key: value for key, value in os.environ.items() if key not in torch_import.BINDING_THREADS}
    environment |= {"OMP_PROC_BIND": "true"} if bound else {}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=Path.cwd(), capture_output=True, text=True, check=True
    )
    loaded, without, after = ended.stdout.splitlines()
    assert loaded == f"{not bound} 1"
    assert without == ("[]" if _has_driver() else str(list(torch_import.FOR_CUDA)))
    assert after == "[]"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_libraries_that_are_elsewhere_are_torchs_to_find(tmp_path: Path) -> None:
    torch_import._load(str(tmp_path))
