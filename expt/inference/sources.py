"""What a person has that a run's model may be asked about: files of the kind that it was trained
on. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from expt.data.image_files import EXTENSIONS, files_below
from expt.data.kind import DatasetConfig
from expt.errors import ConfigError

ARRAYS = (".npy", ".npz")
TABLES = (".csv", ".parquet", *ARRAYS)


class Kind(NamedTuple):
    """What the files hold."""

    name: Literal["pictures", "rows", "texts", "samples"]
    noun: str
    """a sample of it"""
    files: str
    """in words"""
    suffixes: tuple[str, ...]
    """of a file that is named; empty where any will do"""
    below: tuple[str, ...]
    """of those that are looked for in a folder"""


PICTURES = Kind("pictures", "image", f"pictures ({', '.join(EXTENSIONS)}), or arrays (.npy, .npz)",
                (*EXTENSIONS, *ARRAYS), EXTENSIONS)  # fmt: skip
ROWS = Kind("rows", "row", f"tables ({', '.join(TABLES)})", TABLES, TABLES)
TEXTS = Kind("texts", "line", "plain texts", (), (".txt",))
SAMPLES = Kind("samples", "sample", "arrays of its samples (.npy, .npz)", ARRAYS, ARRAYS)


def kind_of(dataset: DatasetConfig, data: Mapping[str, Any]) -> Kind:
    """What a model takes, by its dataset and by the shapes in its record."""
    if dataset.has_tokens:
        return TEXTS
    if dataset.has_rows:
        return ROWS
    own = dataset.custom_class and (dataset.passes_as_is or "channels" not in data)
    return SAMPLES if own or "vocab_size" in data else PICTURES


def listed(kind: Kind, given: Sequence[Path], *, trained_on: str) -> list[str]:
    """The files that are named, and in place of a folder those below it, sorted by folder.

    Raises ConfigError for a path where nothing lies, a folder without such files, and a file of
    another kind."""
    found: list[str] = []
    for path in given:
        if path.is_dir():
            below = _below(path, kind)
            if not below:
                raise ConfigError(
                    f"{path}: no {_short(kind)} lie in it or below it; expected {_or(kind.below)}"
                )
            found += below
        elif not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        elif kind.suffixes and path.suffix.lower() not in kind.suffixes:
            what = f"is a {path.suffix} file" if path.suffix else "has no suffix"
            raise ConfigError(
                f"{path}: {what}, and the run was trained on {trained_on}; give {kind.files}"
            )
        else:
            found.append(str(path))
    kinds = {Path(file).suffix.lower() in ARRAYS for file in found}
    if kind is PICTURES and len(kinds) > 1:
        raise ConfigError(
            "pictures and arrays: their rows are told apart by other columns; give one kind at a"
            " time"
        )
    return found


def _below(folder: Path, kind: Kind) -> list[str]:
    if kind is PICTURES and (folder / "images").is_dir() and (folder / "masks").is_dir():
        folder = folder / "images"  # a part of a segmentation_folder: its masks are pictures too
    return files_below(folder, kind.below)


def _short(kind: Kind) -> str:
    return {"rows": "tables", "samples": "arrays"}.get(kind.name, kind.name)


def _or(suffixes: Sequence[str]) -> str:
    return f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if len(suffixes) > 1 else suffixes[0]
