"""Predictions in a file that appears when it is complete: .csv, .jsonl, .npz, a folder of masks."""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from expt.errors import ConfigError
from expt.runs.paths import dumps, written
from expt.runs.view.text import in_csv

if TYPE_CHECKING:
    import numpy as np

    from expt.inference.answers import Answers, Form, Record

_SHOWN = 3
SUFFIXES = (".csv", ".jsonl", ".npz")


class Writer:
    """Takes answers as they come."""

    def write(self, answers: Answers, form: Form) -> None:
        """Add them."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write what waits for the end."""

    def close(self) -> None:
        """Let go of what is open, whether it was finished or not."""


def check(output: Path, *, masks: bool, force: bool) -> None:
    """Raise ConfigError where the output can't be written, before anything is computed."""
    allowed = ("", ".npz") if masks else SUFFIXES
    if output.suffix.lower() not in allowed or (masks and not output.suffix and output.is_file()):
        wanted = "a folder (of PNGs) or an .npz" if masks else f"a file: {', '.join(SUFFIXES)}"
        raise ConfigError(f"--output {output}: name {wanted}")
    parent = output.absolute().parent
    if not parent.is_dir() or not os.access(output if output.is_dir() else parent, os.W_OK):
        raise ConfigError(f"--output {output}: {parent} is no folder that can be written to")
    if not force and (any(output.iterdir()) if output.is_dir() else output.exists()):
        raise ConfigError(f"--output {output}: is there already; use --force, or another name")


@contextlib.contextmanager
def writer(output: Path, *, force: bool) -> Iterator[Writer]:
    """Yield what writes a file that takes its name where the block ends well.

    Raise ConfigError for one that is there.
    """
    kinds: dict[str, Callable[[IO[bytes]], Writer]] = {".csv": CSV, ".jsonl": JSONL, ".npz": NPZ}
    try:
        with (
            written(output, may_exist=force) as file,
            contextlib.closing(kinds[output.suffix.lower()](file)) as made,
        ):
            yield made
            made.finish()
    except FileExistsError:
        raise ConfigError(f"--output {output}: is there by now; use --force") from None
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror or error}") from error


class CSV(Writer):
    """A line for each sample under one of names; no cell is a formula to a spreadsheet."""

    def __init__(self, file: IO[bytes]) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        self._writer = csv.writer(self._text, lineterminator="\n")
        self._keys: list[str] = []

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        for record in form.records(answers):
            cells = flat(record)
            if not self._keys:
                self._keys = list(cells)
                self._writer.writerow(map(in_csv, self._keys))
            self._writer.writerow([in_csv(cells.get(key)) for key in self._keys])

    def close(self) -> None:
        """Leave the file to who opened it."""
        self._text.detach()


class JSONL(Writer):
    """A JSON object on each line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        for record in form.records(answers):
            text = dumps(record, ensure_ascii=False)
            self._file.write(text.encode("utf-8", "surrogateescape") + b"\n")


class NPZ(Writer):
    """Arrays by name, one entry for each sample, and the names of what they have by number."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._arrays = file, dict[str, Any]()
        self._parts = collections.defaultdict[str, list[Any]](list)

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        import numpy as np

        self._arrays = dict(form.beside)
        for name in answers.about[0]:
            column = [_as_utf8(about[name]) for about in answers.about]
            self._parts[name].append(np.array(column))
        for name, array in answers.arrays.items():
            self._parts[name].append(array)

    def finish(self) -> None:
        """See Writer."""
        import numpy as np

        for name, parts in self._parts.items():
            self._arrays[name] = np.concatenate(parts)
        np.savez(self._file, **self._arrays)


def _as_utf8(value: str | int) -> str | int:
    """Return what np.array may hold of a file's name, whatever its bytes."""
    return os.fsencode(value).decode("utf-8", "replace") if isinstance(value, str) else value


class Lines(Writer):
    """For a person: a line for each sample, with its likeliest classes."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print = print_line

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        for about, record in zip(answers.about, form.records(answers), strict=True):
            place = (str(v) if name == "path" else f"{name} {v}" for name, v in about.items())
            predicted = {key: value for key, value in record.items() if key not in about}
            self._print(f"{' '.join(place)}  {_in_words(predicted)}")


def _in_words(told: Record) -> str:
    chances = told.get("probabilities", {})
    if "top" in told:
        chances = {each["class"]: each["probability"] for each in told["top"]}
    elif "labels" in told:
        chances = {name: chances[name] for name in told["labels"]}
    else:
        chances = dict(sorted(chances.items(), key=lambda each: -each[1])[:_SHOWN])
    if chances or "labels" in told:
        words = ", ".join(f"{name} {chance:.4f}" for name, chance in chances.items()) or "none"
        target = told.get("target", "")
        truth = ", ".join(target) if isinstance(target, list) else target
        return f"{words}  target {truth or 'none'}" if "target" in told else words
    return "  ".join(f"{name} {each:.6g}" if isinstance(each, float) else f"{name} {each}"
                     for name, each in flat(told).items())  # fmt: skip


def flat(record: Record) -> dict[str, Any]:
    """Return one cell for each number.

    `p_NAME` are probabilities, `class_2` and on the next likeliest, `target` the truth.
    """
    cells: dict[str, Any] = {}
    for key, value in record.items():
        if key == "top":
            for place, each in enumerate(value[1:], 2):
                cells |= {f"{name}_{place}": each[name] for name in ("class", "probability")}
        elif isinstance(value, Mapping):
            prefix = {"probabilities": "p_", "target": "target_"}.get(key, f"{key}_")
            cells |= {f"{prefix}{name}": each for name, each in value.items()}
        elif isinstance(value, list) and key in ("labels", "target"):
            cells[key] = ";".join(value)
        elif isinstance(value, list):
            cells[key] = dumps(value)
        else:
            cells[key] = "" if isinstance(value, float) and math.isnan(value) else value
    return cells


class MaskPictures(Writer):
    """A PNG of class numbers for each picture, of its size, named as it is below their folder."""

    def __init__(self, folder: Path, paths: Sequence[str], root: str, *, force: bool) -> None:
        """Name the masks of `paths`, which lie below `root`.

        Raise ConfigError where two pictures would have one mask, or a mask its picture's place.
        """
        self._folder, self._root, self._force = folder, root, force
        self._beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        names: dict[Path, str] = {}
        for path in paths:
            mask = self._named(path)
            if names.setdefault(mask, path) != path:
                raise ConfigError(f"{names[mask]} and {path} would have one mask {mask}")
            if os.path.abspath(folder / mask) == os.path.abspath(path):
                raise ConfigError(f"--output {folder}: the mask of {path} would take its place")

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        for place, about in enumerate(answers.about):
            path = self._beside / self._name(about)
            path.parent.mkdir(parents=True, exist_ok=True)
            size = answers.sizes[place] if answers.sizes else None
            _picture(answers.arrays["masks"][place], size).save(path, format="PNG")

    def finish(self) -> None:
        """Give all their names at once; in a folder that holds others, one by one."""
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()
        if not self._folder.exists():
            self._beside.rename(self._folder)
            return
        for path in sorted(self._beside.rglob("*.png")):
            place = self._folder / path.relative_to(self._beside)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists() and not self._force:
                raise ConfigError(f"{place}: is there by now; use --force, or another folder")
            path.replace(place)

    def close(self) -> None:
        """See Writer."""
        shutil.rmtree(self._beside, ignore_errors=True)

    def _name(self, about: Mapping[str, Any]) -> Path:
        if "index" not in about:
            return self._named(about["path"])
        stem = f"{Path(about['path']).stem}_" if "path" in about else ""
        return Path(f"{stem}{about['index']:06d}.png")

    def _named(self, path: str) -> Path:
        return Path(os.path.relpath(os.path.abspath(path), self._root)).with_suffix(".png")


def _picture(mask: np.ndarray, size: tuple[int, int] | None) -> Any:
    from PIL import Image

    picture: Any = Image.fromarray(mask)
    if size is not None and picture.size != size[::-1]:
        picture = picture.resize(size[::-1], Image.Resampling.NEAREST)
    if picture.mode == "L":
        picture.putpalette(list(_palette()))  # the numbers stay what they are
    return picture


def _palette() -> Iterator[int]:
    """Yield Pascal VOC's colours: neighbours differ, and 0 is black."""
    for number in range(256):
        for shift in range(3):
            yield sum((number >> 3 * bit + shift & 1) << 7 - bit for bit in range(8))
