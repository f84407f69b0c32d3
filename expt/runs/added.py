"""Points that `expt sweep add` gave to a sweep: kept in its folder, so that its command knows them
when typed again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from expt.errors import warn
from expt.runs.files import write_atomically
from expt.runs.result import OfAdded

NAME = ".added.json"


class Added(NamedTuple):
    """One point."""

    words: list[str]
    """All that ask for it."""
    keys: list[str]
    """Those that were typed to add it, by which its folder is named too."""
    place: int = 0
    """Among all that were ever added, in their order."""

    @property
    def about(self) -> OfAdded:
        """What the run's record says of it."""
        return {"place": self.place, "keys": self.keys}


def read(sweep: Path) -> list[Added]:
    """Those of the sweep's folder, in their order."""
    file = sweep / NAME
    try:
        points = json.loads(file.read_bytes())
        return [
            Added(list(each["words"]), list(each["keys"]), int(each.get("place", place)))
            for place, each in enumerate(points)
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError):
        warn(
            f"{file}: cannot be read; points that were added to the sweep by expt sweep are not"
            " known any more"
        )
        return []


def next_place(sweep: Path) -> int:
    """That of the next point that is added."""
    return 1 + max((point.place for point in read(sweep)), default=-1)


def keep(sweep: Path, points: Sequence[Added]) -> None:
    """Let the folder have these further points."""
    if points:
        _write(sweep, [*read(sweep), *points])


def forget(sweep: Path, points: Collection[Sequence[str]]) -> None:
    """Let the folder not have the points any more that these words ask for."""
    gone, before = {frozenset(words) for words in points}, read(sweep)
    left = [point for point in before if frozenset(point.words) not in gone]
    if len(left) < len(before):
        _write(sweep, left)


def _write(sweep: Path, points: Sequence[Added]) -> None:
    if points:
        write_atomically(sweep / NAME, json.dumps([point._asdict() for point in points]))
    else:
        (sweep / NAME).unlink(missing_ok=True)
