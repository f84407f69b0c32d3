"""Arrays and tensors as samples, in a program or in files of numpy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.data.table_files import reading
from expt.errors import ConfigError
from expt.late import np, torch

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("x", "images", "inputs")
"""The names of the array that is taken from an .npz with several."""


def are_arrays(given: Any) -> bool:
    """Return whether samples are numbers already: a tensor, an array, or several."""
    if isinstance(given, list | tuple):
        return any(map(are_arrays, given))
    return isinstance(given, torch.Tensor) or (
        isinstance(given, np.ndarray) and given.dtype.kind != "O"
    )


def as_tensor(given: Any) -> Tensor:
    """Return a tensor, or that of an array. Raise ConfigError for another value."""
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given if given.flags.writeable else given.copy())
    raise ConfigError(f"a {type(given).__name__}: give a tensor or an array")


def samples_of(path: str) -> np.ndarray:
    """Return the array of a file. Raise ConfigError for one that has no samples of numbers."""
    array = array_of(path)
    if array.ndim < 2 or not len(array) or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{path}: is {list(array.shape)} of {array.dtype}; give samples of numbers"
        )
    return array


def array_of(path: str) -> np.ndarray:
    """Return the array of a .npy, mapped into memory, or that of an .npz that has one of NAMES."""
    with reading(Path(path)):
        if path.lower().endswith(".npy"):
            array: np.ndarray = np.lib.format.open_memmap(path, mode="r")
            return array
        with open(path, "rb") as content, np.lib.npyio.NpzFile(content) as file:
            names = [name for name in file.files if name in NAMES or len(file.files) == 1]
            if not names:
                has = ", ".join(file.files) or "none"
                raise ConfigError(f"{path}: holds the arrays {has}; call one {' or '.join(NAMES)}")
            return np.asarray(file[names[0]])
