"""Readers of IDX files and of CIFAR's pickled batches. Nothing that a file holds is executed."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expt.data.cache import Arrays
from expt.errors import DataError

_FIX = "delete it and download it again"


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Return the uint8 array of an IDX file with `dims` dimensions, plain (mapped) or gzip.

    Format: http://yann.lecun.com/exdb/mnist. Raise DataError for another, or a wrong number of
    bytes.
    """
    start, data = 4 + 4 * dims, _bytes_of(path)
    header = data[:start].tobytes()
    if len(header) < start or header[:4] != bytes((0, 0, 8, dims)):
        raise DataError(
            f"{path} is not an IDX file of bytes with {dims} dimensions: it starts with"
            f" {header[:4].hex(' ')}, expected 00 00 08 {dims:02x}; {_FIX}"
        )
    shape = struct.unpack(f">{dims}I", header[4:])
    expected = start + math.prod(shape)
    if 0 in shape or len(data) != expected:
        raise DataError(
            f"{path} holds {len(data)} bytes, and its shape {shape} makes {expected}; {_FIX}"
        )
    return data[start:].reshape(shape)


def _bytes_of(path: Path) -> np.ndarray:
    """Return the content of a file, decompressed, else mapped copy-on-write."""
    if path.suffix != ".gz":
        return np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
    try:
        with gzip.open(path) as stream:
            return np.frombuffer(stream.read(), np.uint8)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); {_FIX}") from error


def read_cifar(paths: Sequence[Path], label_key: str) -> Arrays:
    """Return the samples of some batches. Raise DataError for a malformed one."""
    images, labels = zip(*(_read_batch(path, label_key) for path in paths), strict=True)
    return Arrays(np.concatenate(images), np.concatenate(labels))


def _read_batch(path: Path, label_key: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = _ArrayUnpickler(io.BytesIO(_bytes_of(path).data), encoding="latin1").load()
        labels = np.asarray(content[label_key], dtype=np.int64)
        images, size = content["data"], len(labels)
        if (images.dtype, images.shape) != (np.uint8, (size, 3 * 32 * 32)) or size == 0:
            raise ValueError(
                f"expected images as uint8 ({size}, 3072), found {images.dtype} {images.shape}"
            )
    except Exception as error:  # a malformed pickle raises nearly anything
        raise DataError(
            f"{path} is not a CIFAR batch ({type(error).__name__}: {error}); {_FIX}"
        ) from error
    return images.reshape(-1, 3, 32, 32), labels


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes for Python 2
}


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler of arrays, numbers, text, containers; nothing else is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
