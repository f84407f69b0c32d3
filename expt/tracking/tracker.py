"""What every dashboard's client does: opens its copy of a run, adds points to it, and ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from expt.config.trackers import without_password
from expt.runs.metrics_file import Point
from expt.tracking.cursor import Cursor
from expt.tracking.snapshot import Marks, Snapshot

Times = Callable[[int], float]
"""When a step was logged [seconds since the epoch]."""


class Refused(Exception):
    """The dashboard does not take this run, now or later; the text says why."""


class Copy(Protocol):
    """A dashboard's copy of one run."""

    marks: Marks
    """What it has already."""

    def name_of(self, tag: str) -> str:
        """The tag as the dashboard writes it."""

    def describe(self, run: Snapshot) -> None:
        """Settings, tags and status of a run that begins, or goes on."""

    def add(self, points: Sequence[Point], times: Times) -> None:
        """Points that lie after `marks`, which know of them then."""

    def end(self, run: Snapshot) -> bool:
        """Status, summary and files of a run that has ended; returns whether these were not there
        yet.
        """

    def leave(self) -> None:
        """Nothing more comes now, though the run is under way."""


class Tracker(Protocol):
    """A dashboard. All methods may raise anything where it cannot be reached."""

    where: str
    """Its address, without a password."""

    def check(self) -> None:
        """Raise where it cannot be reached, if that is quickly known."""

    def open(self, run: Snapshot, cursor: Cursor) -> Copy:
        """Find the run's copy, or make one. Raises Refused."""

    def address(self) -> str | None:
        """Where a person sees what was sent; None before that is known."""

    def end_sweeps(self) -> None:
        """Say what has become of the sweeps whose runs were opened."""


def in_a_line(error: BaseException) -> str:
    """What a library says, cut to what a person reads: its innermost reason, without addresses in
    memory.
    """
    while error.__cause__ is not None or error.__context__ is not None:
        inner = error.__cause__ or error.__context__
        assert inner is not None
        if isinstance(inner, KeyboardInterrupt) or not str(inner):
            break
        error = inner
    text = " ".join(without_password(str(error) or type(error).__name__).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return text if len(text) <= 160 else f"{text[:160]}..."
