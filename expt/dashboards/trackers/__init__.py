"""Trackers: a module for each, with its settings and the copy of a run in it.

Its `Config` becomes the key of the module's name, and is found there by expt.catalogue. The driver
reads it: such a module must import without the tracker's client, and without the configuration.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT
from expt.errors import warn

if TYPE_CHECKING:
    from expt.dashboards.snapshot import Snapshot
    from expt.runs.metrics_file import Point

MAX_TEXT = 5000
"""Characters of a text, as MLflow documents."""
Named: TypeAlias = Sequence[tuple[str, Any]]
"""Values by their names."""
_REFUSED = set[str]()
"""Names of values whose refusal was reported."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tracker:
    """The settings of a tracker; conf/config.yaml explains them."""

    if TYPE_CHECKING:
        checkpoints: bool
    PACKAGE: ClassVar[str | None] = None
    """The package that sends, if one is needed; the extra of expt has the tracker's name."""

    def problems(self, read: Mapping[str, str]) -> Sequence[str]:
        """Return problems of the settings, a line each; `read` are the keys read from variables."""
        return ()

    def copy(self, run: Snapshot, state: dict[str, Any], key_of: Callable[[Path], str]) -> Copy:
        """Return the copy of a run, whose `state` is kept here; `key_of` a sweep is its key."""
        raise NotImplementedError


class Copy:
    """A run's copy in a tracker, made of a snapshot, its state that is kept here, and settings."""

    address: str
    """Its address for a person."""

    def describe(self, run: Snapshot) -> None:
        """Send settings and tags."""

    def add(self, points: Sequence[Point], at: float) -> None:
        """Send the points that are not there yet."""

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send status, summary and files of a run that has ended."""

    def leave(self) -> None:
        """Let go of a run that is still under way."""


def send_apart(
    named: Named, send: Callable[[Named], object], reach: Callable[[Exception], object]
) -> None:
    """Send these together, or else all that is not refused, and warn of the rest.

    `reach` raises where nothing can be sent now.
    """
    try:
        send(named)
    except Exception as error:
        reach(error)
        if half := len(named) // 2:
            for some in (named[:half], named[half:]):
                send_apart(some, send, reach)
        elif (key := named[0][0]) not in _REFUSED:
            _REFUSED.add(key)
            warn(f"{key}: the dashboard refuses its value ({in_a_line(error)}); all else is sent")


def in_a_line(error: BaseException) -> str:
    """Return the innermost reason of a library's error, in a line."""
    while (inner := error.__cause__ or error.__context__) is not None and str(inner):
        error = inner
    text = " ".join(without_password(str(error) or type(error).__name__).split())
    return text if len(text) <= 160 else f"{text[:160]}..."


def without_password(uri: str) -> str:
    """Return the address without the part between `://` and `@`, and the part after a `?`."""
    return re.sub(r"(://)[^/@]*@|\?.*", lambda found: found[1] or "", uri)


def unsent(
    points: Sequence[Point], state: dict[str, Any]
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step's points that `state` does not have, and then note them: they are sent."""
    sent = state.setdefault("steps", {})
    for step, row in itertools.groupby(points, key=lambda point: point.step):
        if new := {each.tag: each.value for each in row if step > sent.get(each.tag, -1)}:
            yield step, new
            sent |= dict.fromkeys(new, step)
