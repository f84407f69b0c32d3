"""What makes torch's import sooner, each in a Python of its own: a library is loaded once in a
process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Not where the thread that loads them is bound to a core.

    A machine with CUDA's driver keeps its packages.
    """
    environment = {
        key: value for key, value in os.environ.items() if key not in torch_import.BINDING_THREADS
    }
    environment |= {"OMP_PROC_BIND": "true"} if bound else {}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
        check=True,
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


def made() -> tuple[type[Any], type[Any]]:
    """A class that is frozen, with a place in memory for each field, and one below it."""

    @dataclass(frozen=True, slots=True)
    class Size:
        height: int
        inner: Any = None

    @dataclass(frozen=True)
    class Image(Size):
        name: str = "x"

    return Size, Image


def told(kinds: tuple[type[Any], type[Any]]) -> list[Any]:
    """All that the methods of dataclasses do."""
    size, image = kinds
    small, large = size(1, [size(2)]), image(3)
    loop = size(4, inner := list[Any]())
    inner.append(loop)
    errors = list[str]()
    for change in (
        lambda: setattr(small, "height", 5),
        lambda: delattr(large, "name"),
        lambda: hash(small),
    ):
        with pytest.raises(
            (AttributeError, TypeError)
        ) as error:  # a FrozenInstanceError is the first of them
            change()
        errors.append(f"{type(error.value).__name__}: {error.value}")
    equal = [
        small == size(1, [size(2)]),
        large == image(3),
        large == size(3),
        small != large,
        small == 1,
    ]
    hashed = {size(1): "first", image(3): "second"}
    names = [vars(kind)[name].__qualname__ for kind in kinds for name in torch_import.COMPILED_LATE]
    return [
        repr(small),
        repr(large),
        repr(loop),
        errors,
        equal,
        hashed[size(1)],
        hashed[image(3)],
        names,
    ]


@pytest.mark.skipif(
    not hasattr(dataclasses, "_create_fn"), reason="this Python compiles them otherwise"
)
def test_a_dataclass_is_the_same_whenever_it_is_compiled() -> None:
    with torch_import.dataclasses_compiled_late():
        late = made()
    at_once = made()
    here = [
        vars(late[1])[name].__code__.co_filename == torch_import.__file__
        for name in ("__eq__", "__setattr__")
    ]
    assert here == [True, True]
    assert told(late) == told(at_once) == told(late)
    for name in (
        "__eq__",
        "__hash__",
        "__delattr__",
    ):  # nothing is between a call and the method any more
        assert vars(late[1])[name].__code__ == vars(at_once[1])[name].__code__


def test_a_python_that_compiles_them_otherwise_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(dataclasses, "_create_fn", raising=False)
    before = {**vars(dataclasses)}
    with torch_import.dataclasses_compiled_late():
        assert vars(dataclasses) == before


def test_where_an_operator_is_defined_is_noted_as_ever_without_its_source() -> None:
    here = sys._getframe()
    before = inspect.getframeinfo(here)
    with torch_import.without_source():
        cheap = inspect.getframeinfo(here)
    assert (cheap.filename, cheap.function, cheap.code_context) == (
        before.filename,
        before.function,
        None,
    )
    assert before.code_context
    assert inspect.getframeinfo(here).code_context, "as before"
