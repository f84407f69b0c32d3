"""Orders to the command that is at work in a sweep's folder: files there, each with its answer
beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from expt.errors import ConfigError
from expt.runs.files import write_atomically
from expt.runs.folder_lock import is_held
from expt.runs.paths import RunPaths

FOLDER = ".orders"
POLL_S = 0.05
PATIENCE_S = 60.0
"""How long the command gets to answer: it may be starting a run, or reading a dataset."""

READ_S = 1.0
"""How long an answer is left to who asked, at the end of the command that gave it."""


@dataclass(frozen=True)
class Order:
    """A word, and what it is about."""

    word: str
    about: tuple[str, ...]
    file: Path

    def answer(self, *lines: str, refused: bool = False) -> None:
        """Tell who gave it what has become of it."""
        write_atomically(
            self.file.with_suffix(".answer"), json.dumps({"lines": lines, "refused": refused})
        )
        self.file.unlink()


def give(sweep: Path, word: str, about: tuple[str, ...]) -> list[str]:
    """Have the command in the folder `sweep` carry out an order; returns its answer.

    Raises ConfigError where none is at work there, or the order is refused.
    """
    if not is_held(RunPaths(sweep)):
        raise ConfigError(
            f"{sweep}: no sweep is under way there; type its command again, which resumes it"
        )
    folder = sweep / FOLDER
    folder.mkdir(exist_ok=True)
    file = folder / f"{time.time_ns()}-{os.getpid()}.json"
    answer = file.with_suffix(".answer")
    write_atomically(file, json.dumps({"word": word, "about": about}))
    deadline = time.monotonic() + PATIENCE_S
    while not answer.exists():
        if time.monotonic() > deadline or not is_held(RunPaths(sweep)):
            file.unlink(missing_ok=True)
            raise ConfigError(
                f"{sweep}: the command there does not answer; see what it does, and try again"
            )
        time.sleep(POLL_S)
    found = json.loads(answer.read_text())
    answer.unlink()
    if found["refused"]:
        raise ConfigError(list(found["lines"]))
    return list(found["lines"])


def given(sweep: Path) -> list[Order]:
    """The orders that wait, in their order."""
    try:
        files = sorted(path for path in (sweep / FOLDER).iterdir() if path.suffix == ".json")
    except OSError:
        return []
    found = [(file, json.loads(file.read_text())) for file in files]
    return [Order(content["word"], tuple(content["about"]), file) for file, content in found]


def left(sweep: Path) -> list[Path]:
    """All files of orders; while nobody is at work in the folder nobody has heard them, or will."""
    return [*(sweep / FOLDER).glob("*")]


def clear(sweep: Path) -> None:
    """Remove the orders that nobody has heard, and nobody will; who waits for an answer gets a
    moment to read it.
    """
    deadline = time.monotonic() + READ_S
    while any((sweep / FOLDER).glob("*.answer")) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    shutil.rmtree(sweep / FOLDER, ignore_errors=True)
