"""Predictions in a file, which is there when they all are: .csv, .jsonl, .npz, or a folder of
masks.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from expt.errors import ConfigError
from expt.runs import files
from expt.runs.files import written
from expt.runs.view.text import in_csv

if TYPE_CHECKING:
    import numpy as np

    from expt.inference.answers import Answers, Form, Record

_SHOWN = 3
SUFFIXES = (".csv", ".jsonl", ".npz")


class Writer(ABC):
    """Takes answers as they come."""

    @abstractmethod
    def write(self, answers: Answers, form: Form) -> None:
        """Add them."""

    def finish(self) -> None:  # noqa: B027
        """There are no more."""

    def close(self) -> None:  # noqa: B027
        """Let go of what is open, whether it was finished or not."""


def check(output: Path, *, masks: bool, force: bool) -> None:
    """Raise ConfigError where the output can't be written: before anything is computed."""
    suffix = output.suffix.lower()
    if masks:
        if suffix not in ("", ".npz") or (suffix == "" and output.is_file()):
            raise ConfigError(
                f"--output {output}: masks are written as PNGs into a folder, or into one .npz"
            )
    elif suffix not in SUFFIXES:
        raise ConfigError(
            f"--output {output}: name a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}; - is the"
            " terminal"
        )
    elif output.is_dir():
        raise ConfigError(f"--output {output}: is a folder; name a file in it")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it")
    if not os.access(output if output.is_dir() else output.absolute().parent, os.W_OK):
        raise ConfigError(
            f"--output {output}: {output.parent} cannot be written to; choose another folder"
        )
    if not force and (any(output.iterdir()) if output.is_dir() else output.exists()):
        raise ConfigError(
            f"--output {output}: is there already; use --force to write over it, or another name"
        )


@contextlib.contextmanager
def writer(output: Path, *, force: bool) -> Iterator[Writer]:
    """What writes a file that takes its name where the block ends well.

    Raises ConfigError for one that is there.
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
        raise ConfigError(
            f"--output {output}: is there since this command was begun; use --force, or another"
            " name"
        ) from None
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror or error}") from error


class CSV(Writer):
    """A line for each sample, and one of names above; cells that a spreadsheet would compute are
    quoted.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        self._writer = csv.writer(self._text, lineterminator="\n")
        self._keys: list[str] | None = None

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        for record in form.records(answers):
            cells = flat(record)
            if self._keys is None:
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
            self._file.write(
                files.dumps(record, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
            )


class NPZ(Writer):
    """Arrays by name, one entry for each sample; what they hold waits on the disk until their
    length is known.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._length = file, 0
        self._spooled: dict[str, tuple[IO[bytes], Any]] = {}
        self._texts: dict[str, int] = {}
        """Of each array of texts the length of the longest."""
        self._beside: Mapping[str, np.ndarray] = {}

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        import numpy as np

        self._beside, self._length = form.beside, self._length + len(answers.about)
        columns = {name: [about[name] for about in answers.about] for name in answers.about[0]}
        for name, values in columns.items():
            if isinstance(values[0], str):
                texts = [
                    str(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                    for value in values
                ]
                self._texts[name] = max(self._texts.get(name, 1), *map(len, texts))
                self._spool(name, None).writelines(
                    json.dumps(text).encode() + b"\n" for text in texts
                )
            else:
                self._spool(name, np.empty(0, np.int64)).write(np.array(values, np.int64).tobytes())
        for name, array in answers.arrays.items():
            self._spool(name, array[:0]).write(np.ascontiguousarray(array).tobytes())

    def _spool(self, name: str, like: Any) -> IO[bytes]:
        if name not in self._spooled:
            beside = tempfile.TemporaryFile(dir=Path(self._file.name).parent)  # noqa: SIM115
            self._spooled[name] = beside, like
        return self._spooled[name][0]

    def finish(self) -> None:
        """Put them together."""
        import numpy as np

        with zipfile.ZipFile(self._file, "w", allowZip64=True) as archive:
            for name, array in self._beside.items():
                with archive.open(f"{name}.npy", "w") as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
            for name, (spooled, like) in self._spooled.items():
                spooled.seek(0)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    self._copy(name, spooled, like, entry)

    def close(self) -> None:
        """See Writer."""
        for spooled, _ in self._spooled.values():
            spooled.close()

    def _copy(self, name: str, spooled: IO[bytes], like: Any, entry: Any) -> None:
        import numpy as np

        dtype = np.dtype(f"<U{self._texts[name]}") if like is None else like.dtype
        shape = (self._length, *(() if like is None else like.shape[1:]))
        head = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_2_0(entry, head)
        if like is not None:
            while block := spooled.read(1 << 20):
                entry.write(block)
            return
        for line in spooled:
            entry.write(np.array(json.loads(line), dtype).tobytes())


class Lines(Writer):
    """For a person: a line for each sample, with its likeliest classes."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print = print_line

    def write(self, answers: Answers, form: Form) -> None:
        """See Writer."""
        for about, record in zip(answers.about, form.records(answers), strict=True):
            where = " ".join(
                str(each) if name == "path" else f"{name} {each}" for name, each in about.items()
            )
            self._print(
                f"{where} "
                f" {_in_words({key: each for key, each in record.items() if key not in about})}"
            )


def _in_words(told: Record) -> str:
    if "top" in told:
        chances = {each["class"]: each["probability"] for each in told["top"]}
    elif "labels" in told:
        chances = {name: told["probabilities"][name] for name in told["labels"]}
    else:
        chances = dict(
            sorted(told.get("probabilities", {}).items(), key=lambda each: -each[1])[:_SHOWN]
        )
    if chances or "labels" in told:
        words = ", ".join(f"{name} {chance:.4f}" for name, chance in chances.items()) or "none"
        target = told.get("target", "")
        truth = ", ".join(target) if isinstance(target, list) else target
        return f"{words}  target {truth or 'none'}" if "target" in told else words
    return "  ".join(f"{name} {each:.6g}" if isinstance(each, float) else f"{name} {each}"
                     for name, each in flat(told).items())  # fmt: skip


def flat(record: Record) -> dict[str, Any]:
    """One cell for each number: `p_NAME` are probabilities, `class_2` and on the next likeliest,
    `target` the truth.
    """
    cells: dict[str, Any] = {}
    for key, value in record.items():
        if key == "top":
            for place, each in enumerate(value[1:], 2):
                cells |= {
                    f"class_{place}": each["class"],
                    f"probability_{place}": each["probability"],
                }
        elif isinstance(value, Mapping):
            prefix = {"probabilities": "p_", "target": "target_"}.get(key, f"{key}_")
            cells |= {f"{prefix}{name}": each for name, each in value.items()}
        elif isinstance(value, list) and key in ("labels", "target"):
            cells[key] = ";".join(value)
        else:
            cells[key] = files.dumps(value) if isinstance(value, list) else value
    return {
        key: "" if isinstance(value, float) and math.isnan(value) else value
        for key, value in cells.items()
    }
