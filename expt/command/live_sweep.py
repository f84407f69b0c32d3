"""A sweep that another command gives orders to: see `expt sweep --help`."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from expt.command.arguments import readable
from expt.command.composed_run import ComposedRun
from expt.command.hydra_adapter import product
from expt.command.hydra_errors import COMPOSING, as_config_error
from expt.command.overrides import last_of_each, parsed
from expt.command.sweep_display import SweepDisplay
from expt.config.identity import shown
from expt.errors import ConfigError, ExptError
from expt.launch.job import QUEUED, Job
from expt.launch.live_pool import LivePool
from expt.launch.live_queue import LiveQueue
from expt.machine import Machine
from expt.runs import added, orders, provenance
from expt.runs.added import Added
from expt.runs.orders import Order
from expt.runs.paths import RunPaths
from expt.runs.record_parts import OfAdded
from expt.runs.request import RunRequest
from expt.runs.result import PAUSED, RUNNING
from expt.runs.view.query import filter_of, fits, settings_of

LOOK_S = 0.2
"""How often the folder is looked at for orders."""
REST_S = 1.0
"""After which a sweep without a run under way says what it waits for."""

Compose = Callable[[Sequence[Sequence[str]], OfAdded, int], Sequence[ComposedRun]]
"""Makes runs of points that are added; what the first of them is among those that were; its number."""


class LiveSweep:
    """Carries out the orders that come while the pool runs."""

    def __init__(
        self,
        folder: RunPaths,
        machine: Machine,
        pool: LivePool | LiveQueue,
        runs: dict[Job, list[ComposedRun]],
        display: SweepDisplay,
        words: Sequence[str],
        compose: Compose,
        check: Callable[[Sequence[str]], object],
    ) -> None:
        """`words` are those that the sweep was typed with; `check` raises what Hydra does of a point that cannot be."""
        self._folder, self._machine, self._pool, self._runs = folder.folder, machine, pool, runs
        self._display, self._typed, self._compose, self._check = display, words, compose, check
        self._next = 0.0
        self._rests_since: float | None = None
        self._has_told_of_rest = False

    def look(self) -> None:
        """Carry out what has come since the last time."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + LOOK_S
        for order in orders.given(self._folder):
            try:
                lines = self._carry_out(order)
            except COMPOSING as error:
                order.answer(str(as_config_error(error, order.about, may_sweep=True)), refused=True)
            except ExptError as error:
                order.answer(str(error), refused=True)
            else:
                for line in lines:
                    self._display.told(line)
                order.answer(*lines)
        self._tell_of_rest(now)

    def _tell_of_rest(self, now: float) -> None:
        """Say once that the sweep waits for a person; not between two runs, when a search chooses the next, say."""
        if not self._pool.rests:
            self._rests_since, self._has_told_of_rest = None, False
            return
        self._rests_since = now if self._rests_since is None else self._rests_since
        if now - self._rests_since >= REST_S and not self._has_told_of_rest:
            self._has_told_of_rest = True
            how = f"{provenance.program()} sweep resume {shlex.quote(str(self._folder))}"
            self._display.told(f"no run is under way: the sweep is paused; to go on: {how}")

    def _carry_out(self, order: Order) -> list[str]:
        if order.word == "add":
            return self._add(order.about)
        if order.word == "gpus":
            return self._use_gpus(order.about)
        pool = self._pool
        jobs, held = meant(pool.jobs, order.about, self._folder), {*pool.held}
        if order.word in ("pause", "resume") and not order.about:
            pool.is_paused = order.word == "pause"
        if order.word == "resume":
            paused = [job for job in jobs if job in held]
            pool.let_go_on(paused)
            return _told("resumed", paused, "none of these has paused")
        open_ones = [job for job in jobs if job.status in (QUEUED, RUNNING)]
        if order.word == "pause":
            open_ones = [job for job in open_ones if job not in held]
            pool.pause(open_ones)
            return _told("paused", open_ones, "none of these runs or waits")
        if order.word == "drop":
            open_ones += [job for job in jobs if job.status == PAUSED]  # a search would have them go on
        pool.drop(open_ones)
        added.forget(self._folder, [run.overrides for job in open_ones for run in self._runs[job]])
        return _told("dropped", open_ones, "none of these runs or waits")

    def _add(self, words: Sequence[str]) -> list[str]:
        """The grid that was typed, with these words in place of those for the same keys."""
        if of_search := [word for word in words if word.partition("=")[0].partition(".")[0] == "search"]:
            raise ConfigError(f"{of_search[0]}: is the search's; end it by Ctrl-C, and type its command again with it")
        words = readable(words)
        last = last_of_each([*self._typed, *words])
        searched = [each for each in last if each.is_sweep_override() and not each.is_discrete_sweep()]
        if searched:  # a misspelt key, maybe
            self._check(product([each for each in last if each not in searched])[0])
            key = searched[0].get_key_element()
            raise ConfigError(f"{key}: is searched in an interval; give the run a value, as in {key}=1")
        points = product(last)
        keys = [each.key_or_group for each in parsed(words)]
        numbers = [run.number for same in self._runs.values() for run in same]
        first = OfAdded(place=added.next_place(self._folder), keys=keys)
        composed = self._compose(points, first, 1 + max(numbers, default=-1))
        new = [run for run in composed if run.job not in self._runs]
        if refused := [run.job for run in new if run.job.error]:
            raise ConfigError(list(dict.fromkeys(str(job.error) for job in refused)))
        places = {run.job: place for place, run in enumerate(composed, first["place"])}
        added.keep(self._folder, [Added(run.overrides, keys, places[run.job]) for run in new])
        for run in new:
            self._runs[run.job] = [run]
            self._display.total += 1
            self._pool.add(run.job)
        known = f"; {len(composed) - len(new)} are there already" if len(composed) > len(new) else ""
        return [f"{line}{known}" for line in _told("added", [run.job for run in new], "nothing is new")]

    def _use_gpus(self, about: Sequence[str]) -> list[str]:
        gpus = self._machine.gpus
        if isinstance(self._pool, LiveQueue):
            raise ConfigError("gpus: the cluster gives each run its own; pause some runs instead")
        if not gpus:
            raise ConfigError("gpus: this machine has none; pause some runs instead")
        text = ",".join(about)
        named = [] if text == "all" else [_index(part, text, len(gpus)) for part in text.split(",")]
        wanted = named or range(len(gpus))
        moved = self._pool.use_gpus([gpus[index] for index in wanted])
        names = ", ".join(map(str, wanted))
        return [f"GPUs in use from now on: {names}", *_told("paused until others are free", moved, "")]


def meant(jobs: Iterable[Job], about: Sequence[str], folder: Path) -> list[Job]:
    """The jobs that `about` names: runs by their names, or settings that they all have; without any all of them.

    Raises ConfigError where it names none of the sweep's in `folder`.
    """
    found = [job for job in jobs if job.request is not None]
    names = [text for text in about if any(fits(job.name, text) for job in found)]
    filters = [text for text in about if text not in names]
    if unknown := [text for text in filters if not re.search("[=<>]", text)]:
        raise ConfigError(f"{unknown[0]}: no run of {folder} has that name")
    if filters:
        settings = {job: _settings(job.request) for job in found if job.request is not None}
        tests = [filter_of(text, [*settings.values()], is_order=True) for text in filters]
        found = [job for job in found if all(test(settings[job]) for test in tests)]
    if names:
        found = [job for job in found if any(fits(job.name, name) for name in names)]
    if not found and about:
        raise ConfigError(f"{' '.join(about)}: no run of {folder} is that")
    return found


def _settings(request: RunRequest) -> dict[str, Any]:
    """Also what was typed and is none, as `experiment`, of which the folders' names may tell."""
    typed: dict[str, Any] = request.about.get("overrides", {})
    return {**typed, **settings_of({"config": shown(request.config), "overrides": typed})}


def _index(part: str, text: str, have: int) -> int:
    if not part.isdigit() or int(part) >= have:
        raise ConfigError(f"gpus {text}: give numbers from 0 to {have - 1}, as in 0,1, or all")
    return int(part)


def _told(what: str, jobs: Sequence[Job], nothing: str) -> list[str]:
    if not jobs:
        return [nothing] if nothing else []
    names = ", ".join(job.name for job in jobs[:5]) + (", ..." if len(jobs) > 5 else "")
    return [f"{what} {len(jobs)} run{'s' * (len(jobs) > 1)}: {names}"]
