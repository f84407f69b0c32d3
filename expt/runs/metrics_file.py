"""metrics.jsonl: a line per value, as it comes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from expt.errors import RunFailed, warn
from expt.runs.paths import RunPaths, dumps

NEWLINE = b"\n"
_REMEMBERED = 256  # bytes: some three lines
_reported = set[tuple[Path, int | None]]()
"""Files whose damage was reported, and the first damaged line; None: the end."""


class Point(NamedTuple):
    """One value of one tag; `step` counts optimiser steps done, `epoch` those begun, from 1."""

    step: int
    epoch: int
    tag: str
    value: float


class MetricsWriter:
    """A writer of metrics.jsonl that flushes at every log point."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._path = paths, paths.metrics
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write a line for each of `values`, tag to value.

        Raises RunFailed where the run's folder was renamed or removed.
        """
        if not self._path.exists():  # else checkpoints would go into a second folder
            raise RunFailed(self._paths.moved() or f"{self._path} was removed meanwhile")
        lines = [
            dumps(Point(step, epoch, tag, value)._asdict()) + "\n" for tag, value in values.items()
        ]
        self._file.write("".join(lines))
        self._file.flush()

    @property
    def num_bytes(self) -> int:
        """Size of the file so far."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def at_best(paths: RunPaths, tag: str, best: Mapping[str, Any]) -> float | None:
    """Return the last value of a tag until the best evaluation; None where it has none yet."""
    step, epoch = best.get("step", math.inf), best["epoch"]
    values = [
        point.value for point in _of_tag(paths, tag) if point.step <= step and point.epoch <= epoch
    ]
    return values[-1] if values else None


def of_epochs(paths: RunPaths, tag: str, *, since_step: int = 0) -> dict[int, float]:
    """Return the last value of a tag in each epoch that has one, after `since_step`."""
    points = _of_tag(paths, tag)
    return {point.epoch: point.value for point in points if point.step > since_step}


def _of_tag(paths: RunPaths, tag: str) -> Iterator[Point]:
    word = json.dumps(tag).encode()
    try:
        text = paths.metrics.read_bytes()
    except FileNotFoundError:
        return
    _report_damage(paths.metrics, text)
    for line in text.splitlines():
        if word in line and (point := _point(line)) and point.tag == tag:
            yield point


def until(source: RunPaths, num_bytes: int, step: int, *, tests_later: bool = True) -> bytes:
    """Return the lines, `num_bytes`, that were there when the checkpoint of `step` was written.

    They are chosen by their steps if the file is another by now, as after a resume from an older
    checkpoint. With `tests_later` the test comes after the run's last checkpoint.
    """
    text = source.metrics.read_bytes() if source.metrics.exists() else b""
    kept, rest = text[:num_bytes], text[num_bytes:]
    _report_damage(source.metrics, kept)
    if len(kept) < num_bytes and (source.metrics, None) not in _reported:
        _reported.add((source.metrics, None))
        warn(
            f"{source.metrics}: has lost its end: {num_bytes - len(kept)} of the {num_bytes} bytes"
            f" that it had at step {step} ({1 - len(kept) / num_bytes:.1%}), after line"
            f" {kept.count(NEWLINE)}; the points in them are not in the curves"
        )
    last = kept[kept.rfind(b"\n", 0, -1) + 1 :]
    if kept[-1:] in (b"", b"\n") and next(_steps(last), 0) <= step <= next(_steps(rest), step):
        return kept
    found = list[bytes]()
    for line in text.splitlines(keepends=True):
        point = _point(line)
        is_later = point and tests_later and point.tag.endswith("/test")
        if point and (point.step < step or (point.step == step and not is_later)):
            found.append(line)
    return b"".join(found)


def _steps(text: bytes) -> Iterator[int]:
    return (point.step for line in text.splitlines() if (point := _point(line)))


class MetricsReader:
    """A reader of the lines that are added to metrics.jsonl while a worker writes it."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.metrics
        self._offset = 0
        self._before = b""
        """The last bytes that were read; a resumed run may have replaced them."""

    def read(self) -> list[Point]:
        """Return the new points; an unfinished line is left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._before))
                if file.read(len(self._before)) != self._before:  # cut back, by a resumed run
                    self._offset, self._before = 0, b""
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(NEWLINE) + 1]
        self._offset += len(whole)
        self._before = (self._before + whole[-_REMEMBERED:])[-_REMEMBERED:]
        points = [*map(_point, whole.splitlines())]
        if None in points:
            _report_damage(self._path, self._path.read_bytes(), reads=True)
        return [point for point in points if point]


def _is_odd(line: bytes) -> bool:
    """Return whether a line may hold no point; to read each one takes thirty times as long."""
    is_usual = line.startswith(b'{"step": ') and line.endswith(b"}") and line.isascii()
    return not is_usual or b"\0" in line or b"{" in line[1:]


def _report_damage(path: Path, text: bytes, *, reads: bool = False) -> None:
    """Warn once of lines that hold no point; the last is not looked at while it has no end.

    With `reads` each line is read, else those that look odd.
    """
    lines = text[: text.rfind(NEWLINE) + 1].splitlines()
    odd = [at for at, line in enumerate(lines) if (reads or _is_odd(line)) and not _point(line)]
    if odd and (path, odd[0]) not in _reported:
        _reported.add((path, odd[0]))
        first = lines[odd[0]][:40].decode(errors="backslashreplace")
        warn(
            f"{path}: {len(odd)} of {len(lines)} lines ({len(odd) / len(lines):.1%}) are damaged,"
            f" and their points left out, such as line {odd[0] + 1}: {first}"
        )


def _point(line: bytes) -> Point | None:
    """Return the point of a line; None where it is none, as after a crash."""
    try:
        found = Point(**json.loads(line))
        value = math.nan if found.value is None else float(found.value)
        is_whole = isinstance(found.step, int) and isinstance(found.epoch, int)
        return found._replace(value=value) if is_whole else None
    except (ValueError, TypeError, OverflowError):
        return None
