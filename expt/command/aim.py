"""Which runs an order of `expt sweep` is about, those that are still to come among them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from expt.config.identity import shown
from expt.errors import ConfigError
from expt.launch.job import Job, request_of
from expt.runs.view.query import Values, filter_of, fits, key_of, settings_of


class Described(Protocol):
    """What an order may be about: a run, or a point that is to become one."""

    @property
    def name(self) -> str:
        """That of its folder."""

    @property
    def settings(self) -> Values:
        """All of them, flat, as they are typed."""

    @property
    def unsure(self) -> Collection[str]:
        """Those of which only the run itself will tell."""


D = TypeVar("D", bound=Described)


class KnownRun:
    """A run that has been composed."""

    unsure: Collection[str] = ()

    def __init__(self, job: Job) -> None:
        self.job, self.name = job, job.name

    @functools.cached_property
    def settings(self) -> Values:
        """Also what was typed and is none, as `experiment`, of which the folders' names may tell."""
        request = request_of(self.job)
        typed: dict[str, Any] = request.about.get("overrides", {})
        return {**typed, **settings_of({"config": shown(request.config), "overrides": typed})}


class Aim:
    """Runs by their names, or by settings that they all have; without any all of them."""

    def __init__(self, about: Sequence[str], runs: Sequence[Described], folder: Path) -> None:
        """`runs` are all that there are.

        Raises ConfigError for what can be about none of those in `folder`.
        """
        self._names = [text for text in about if any(fits(run.name, text) for run in runs)]
        filters = [text for text in about if text not in self._names]
        if unknown := [text for text in filters if not re.search("[=<>]", text)]:
            raise ConfigError(f"{unknown[0]}: no run of {folder} has that name")
        settings = [run.settings for run in runs] if filters else []
        self._tests = list[tuple[str, Callable[[Values], bool]]]()
        for text in filters:
            key = key_of(text, settings)
            is_known = not any(
                key in run.unsure for run in runs
            )  # else no run may seem to have the value
            self._tests.append((key, filter_of(text, settings, is_order=is_known)))

    def hits(self, run: Described, *, if_unsure: bool = False) -> bool:
        """Whether it is about this one; `if_unsure` where only the run itself will tell."""
        if self._names and not any(fits(run.name, name) for name in self._names):
            return False
        return all(
            if_unsure if key in run.unsure else test(run.settings) for key, test in self._tests
        )


def meant(about: Sequence[str], runs: Sequence[D], folder: Path) -> tuple[Aim, list[D]]:
    """What `about` aims at, and those of the `runs` that it hits; ConfigError where it names none
    in `folder`.
    """
    aim = Aim(about, runs, folder)
    found = [run for run in runs if aim.hits(run)]
    if about and not any(aim.hits(run, if_unsure=True) for run in runs):
        raise ConfigError(f"{' '.join(about)}: no run of {folder} is that")
    return aim, found


class TakenBack:
    """A point that was dropped and added again; `job` is what it is to become."""

    def __init__(self, name: str, job: Job) -> None:
        self._name, self._job = name, job

    def hits(self, run: Described) -> bool:
        """Whether it is this one."""
        return run.job is self._job if isinstance(run, KnownRun) else run.name == self._name


class StandingOrders:
    """Orders to drop and to pause, for the runs of the typed grid that come later; those added
    since are not meant.
    """

    def __init__(self) -> None:
        self._drops = list[tuple[Aim | TakenBack, bool]]()
        self._pauses = list[tuple[Aim, bool]]()
        self._exempt = set[Job]()

    @property
    def pauses_any(self) -> bool:
        """Whether some of those that come later are to wait."""
        return any(pauses for _, pauses in self._pauses)

    def drop(self, aim: Aim) -> None:
        """Let these not start."""
        self._drops.append((aim, True))

    def take_back(self, point: TakenBack) -> None:
        """Let this one start after all."""
        self._drops.append((point, False))

    def pause(self, aim: Aim) -> None:
        """Let these wait."""
        self._pauses.append((aim, True))

    def resume(self, aim: Aim) -> None:
        """Let these not wait, whatever was said of them before."""
        self._pauses.append((aim, False))

    def resume_all(self) -> None:
        """Let none wait."""
        self._pauses.clear()

    def leave_out(self, job: Job) -> None:
        """Let it run, whatever was said of runs like it before."""
        self._exempt.add(job)

    def drops(self, run: Described) -> bool:
        """Whether a run like this is not to start, by the last order that was about it."""
        return next((drops for aim, drops in reversed(self._drops) if aim.hits(run)), False)

    def is_dropped(self, job: Job) -> bool:
        """Whether it is not to start."""
        return bool(self._drops) and job not in self._exempt and self.drops(KnownRun(job))

    def is_held(self, job: Job) -> bool | None:
        """Whether it is to wait, by the last order that was about it; None where none was."""
        if not self._pauses or job in self._exempt:
            return None
        run = KnownRun(job)
        return next((pauses for aim, pauses in reversed(self._pauses) if aim.hits(run)), None)
