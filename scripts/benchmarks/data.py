"""Fashion-MNIST in torchvision's layout, cut to a size: expt and its peers read the same files."""

from __future__ import annotations

import gzip
import random
import struct
from pathlib import Path

TRAIN_IMAGES, TEST_IMAGES = 60_000, 10_000
_LAYOUTS = ("", "FashionMNIST/raw", "raw")


def prepare(
    source: Path, target: Path, *, train: int = TRAIN_IMAGES, test: int = TEST_IMAGES
) -> Path:
    """Write the first `train` and `test` images of `source` (flat or nested, plain or gzip) to
    `target`; return it.
    """
    folder = target / "FashionMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images, labels = (
            _read(source, f"{prefix}-images-idx3-ubyte"),
            _read(source, f"{prefix}-labels-idx1-ubyte"),
        )
        magic, size, height, width = struct.unpack(">4I", images[:16])
        kept = min(count, size)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", magic, kept, height, width) + images[16 : 16 + kept * height * width]
        )
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            labels[:4] + struct.pack(">I", kept) + labels[8 : 8 + kept]
        )
    return target


def made_up(target: Path, train: int, test: int) -> Path:
    """Write so many images of noise to `target` in the same layout; return it."""
    (folder := target / "raw").mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images, labels = random.Random(0).randbytes(count * 28 * 28), bytes(range(10)) * count
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 0x803, count, 28, 28) + images
        )
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 0x801, count) + labels[:count]
        )
    return target


def _read(source: Path, name: str) -> bytes:
    for layout in _LAYOUTS:
        plain = source / layout / name
        if plain.is_file():
            return plain.read_bytes()
        packed = plain.with_name(f"{name}.gz")
        if packed.is_file():
            return gzip.decompress(packed.read_bytes())
    raise FileNotFoundError(f"--data {source}: holds no {name}, plain or gzip")
