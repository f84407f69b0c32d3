"""Predictions in a file that appears when it is complete: .csv, .jsonl, .npz, a folder of masks."""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import itertools
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from expt import machine
from expt.errors import ConfigError, listed
from expt.features import Answers, Feature
from expt.late import Image, np
from expt.runs.paths import dumps, written
from expt.runs.view.text import in_csv

if TYPE_CHECKING:
    from expt.features.feature import Record

Write: TypeAlias = "Callable[[Answers, Feature], None]"
"""Takes answers as they come."""


@contextlib.contextmanager
def new_file(output: Path, *, force: bool, option: str = "--output") -> Iterator[IO[bytes]]:
    """Open a file that takes its name where the block ends well.

    Raise ConfigError for one that is there.
    """
    with in_words(output, option), written(output, may_exist=force, follow=True) as file:
        yield file


@contextlib.contextmanager
def in_words(output: Path, option: str = "--output") -> Iterator[None]:
    """Raise ConfigError where the output can't be written."""
    try:
        yield
    except FileExistsError:
        raise ConfigError(f"{option} {output}: is there by now; use --force") from None
    except OSError as error:
        raise ConfigError(f"{option} {output}: {error.strerror or error}") from error


@contextlib.contextmanager
def new_folder(folder: Path, *, may_exist: bool = False) -> Iterator[Path]:
    """Yield a folder that takes a name if the block ends well, and is removed if not.

    A link stays one. Where the folder `may_exist`, files are moved into it one by one. Raise
    ConfigError where it can't be made, or holds something and may not exist.
    """
    goal = folder.resolve()
    with in_words(folder):
        beside = Path(tempfile.mkdtemp(prefix=f".{goal.name}.", suffix=".tmp", dir=goal.parent))
        beside.chmod(0o777 & ~machine.umask())
    try:
        yield beside
        with in_words(folder):
            if not may_exist:
                beside.rename(goal)
                return
            places = {x: goal / x.relative_to(beside) for x in beside.rglob("*") if x.is_file()}
            if taken := next(filter(Path.is_dir, places.values()), None):
                raise ConfigError(f"{taken}: is a folder; remove it, or name another --output")
            for file, place in places.items():
                place.parent.mkdir(parents=True, exist_ok=True)
                file.replace(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def to_file(output: Path, *, force: bool) -> Iterator[Write]:
    """Yield a function that writes to a new file of one of FILES."""
    with new_file(output, force=force) as file, FILES[output.suffix.lower()](file) as write:
        yield write


@contextlib.contextmanager
def to_csv(file: IO[bytes]) -> Iterator[Write]:
    """Yield a function that writes a line for each sample under one of names.

    No cell is a formula to a spreadsheet.
    """
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    writer, keys = csv.writer(text, lineterminator="\n"), list[str]()

    def write(answers: Answers, form: Feature) -> None:
        rows = [csv_cells(form, record) for record in form.answers(answers)]
        names = dict.fromkeys(key for cells in rows for key in cells)
        if not keys:
            keys.extend(names)
            writer.writerow(map(in_csv, keys))
        if new := listed(names.keys() - {*keys}):
            raise ConfigError(f"{new}: the first samples have no such value; use a .jsonl")
        writer.writerows([in_csv(cells.get(key)) for key in keys] for cells in rows)

    try:
        yield write
    finally:
        text.detach()  # the file stays open


@contextlib.contextmanager
def _to_jsonl(file: IO[bytes]) -> Iterator[Write]:
    def write(answers: Answers, form: Feature) -> None:
        for record in form.answers(answers):
            text = dumps(record, ensure_ascii=False)
            file.write(text.encode("utf-8", "surrogateescape") + b"\n")

    yield write


@contextlib.contextmanager
def _to_npz(file: IO[bytes]) -> Iterator[Write]:
    """Yield a function that collects arrays by name, an entry for each sample."""
    parts, names = collections.defaultdict[str, list[Any]](list), dict[str, Any]()

    def write(answers: Answers, form: Feature) -> None:
        names.update({name: np.array(each) for name, each in answers.beside.items()})
        for name in answers.about[0]:
            parts[name].append(np.array([about[name] for about in answers.about]))
        for name, array in answers.arrays.items():
            if array.dtype.kind == "O":
                raise ConfigError(f"{name}: differs in shape from sample to sample; use a .jsonl")
            parts[name].append(array)

    yield write
    whole = {name: np.concatenate(several) for name, several in parts.items()}
    if few := [name for name in whole if len(whole[name]) < max(map(len, whole.values()))]:
        raise ConfigError(f"{listed(few)}: some samples have no such value; use a .jsonl")
    with zipfile.ZipFile(file, "w") as archive:  # savez has keywords that may be a column's name
        for name, array in (whole | names).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


FILES = {".csv": to_csv, ".jsonl": _to_jsonl, ".npz": _to_npz}


def to_terminal(print_line: Callable[[str], None]) -> Write:
    """Return a function that prints a line for each sample, with its likeliest classes."""

    def write(answers: Answers, form: Feature) -> None:
        for about, record in zip(answers.about, form.answers(answers), strict=True):
            place = (str(v) if name == "path" else f"{name} {v}" for name, v in about.items())
            predicted = {key: value for key, value in record.items() if key not in about}
            print_line(f"{' '.join(place)}  {form.line(predicted)}")

    return write


def csv_cells(form: Feature, answer: Record) -> dict[str, Any]:
    """Return a number or a text for each cell of an answer: a list as JSON, nan as an empty one."""
    cells = form.cells(answer)
    for key, value in cells.items():
        if isinstance(value, list):
            cells[key] = dumps(value)
        elif isinstance(value, float) and math.isnan(value):
            cells[key] = ""
    return cells


@contextlib.contextmanager
def to_masks(folder: Path, paths: Sequence[str], root: str, *, force: bool) -> Iterator[Write]:
    """Yield a function that writes a PNG of class numbers for each picture, of its size.

    It is named as the picture is below `root`. Raise ConfigError where names clash.
    """
    _refuse_clashes(folder, paths, root)
    with in_words(folder), new_folder(folder, may_exist=force) as beside:

        def write(answers: Answers, form: Feature) -> None:
            about, masks = answers.about, answers.arrays["masks"]
            sizes = answers.sizes or itertools.repeat(None)
            for one, mask, size in zip(about, masks, sizes, strict=False):
                path = beside / _mask_name(one, root)
                path.parent.mkdir(parents=True, exist_ok=True)
                _picture(mask, size).save(path, format="PNG")

        yield write


def _refuse_clashes(folder: Path, paths: Sequence[str], root: str) -> None:
    """Raise ConfigError where two pictures would have one mask, or a mask its picture's place."""
    names, pictures = dict[Path, str](), {*map(os.path.realpath, paths)}
    for path in paths:
        mask = _mask_name({"path": path}, root)
        if names.setdefault(mask, path) != path:
            raise ConfigError(f"{names[mask]} and {path} would have one mask {mask}")
        if os.path.realpath(folder / mask) in pictures:
            where = "its place, or that of another picture"
            raise ConfigError(f"--output {folder}: the mask of {path} would take {where}")


def _mask_name(about: Mapping[str, Any], root: str) -> Path:
    if "index" in about:
        stem = f"{Path(about['path']).stem}_" if "path" in about else ""
        return Path(f"{stem}{about['index']:06d}.png")
    return Path(os.path.relpath(os.path.abspath(about["path"]), root)).with_suffix(".png")


def _picture(mask: np.ndarray, size: tuple[int, int] | None) -> Any:
    picture: Any = Image.fromarray(mask)
    if size is not None and picture.size != size[::-1]:
        picture = picture.resize(size[::-1], Image.Resampling.NEAREST)
    if picture.mode == "L":
        picture.putpalette(list(_palette()))  # the numbers stay
    return picture


def _palette() -> Iterator[int]:
    """Yield Pascal VOC's colours: neighbours differ, and 0 is black."""
    for number in range(256):
        for shift in range(3):
            bits = ((number >> (3 * bit + shift)) & 1 for bit in range(8))
            yield sum(bit << (7 - place) for place, bit in enumerate(bits))
