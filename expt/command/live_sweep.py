"""A sweep that another command gives orders to: see `expt sweep --help`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from expt.command.aim import Aim, KnownRun, StandingOrders, TakenBack, meant
from expt.command.arguments import readable
from expt.command.composed_run import ComposedRun
from expt.command.hydra_adapter import product
from expt.command.hydra_errors import COMPOSING, as_config_error
from expt.command.overrides import key_typed, last_of_each, parsed
from expt.command.points_to_come import ComingPoint, PointsToCome
from expt.command.sweep_display import SweepDisplay
from expt.errors import ConfigError, ExptError
from expt.launch.job import DROPPED, QUEUED, Job, request_of
from expt.launch.live_pool import LivePool
from expt.launch.live_queue import LiveQueue
from expt.machine import Machine
from expt.runs import added, orders, provenance
from expt.runs.added import Added
from expt.runs.orders import Order
from expt.runs.paths import RunPaths
from expt.runs.result import OfAdded
from expt.runs.result import INTERRUPTED, PAUSED, RUNNING

LOOK_S = 0.2
"""How often the folder is looked at for orders."""
REST_S = 1.0
"""After which a sweep without a run under way says what it waits for."""

Compose = Callable[[Sequence[Sequence[str]], OfAdded | None, int], Sequence[ComposedRun]]
"""Makes runs of points; what the first of them is among those that were added, if it is one; its
number.
"""


class _Coming(NamedTuple):
    """Points that an order is about; `more` where it may be about others, of which only the runs
    will tell.
    """

    points: Sequence[ComingPoint] = ()
    more: bool = False

    @property
    def told(self) -> str:
        num = len(self.points)
        sure = f"{num} point{'s' * (num != 1)} still to come" if num else ""
        return " and ".join(
            filter(None, [sure, "those still to come that are that" if self.more else ""])
        )


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
        to_come: PointsToCome,
        standing: StandingOrders,
    ) -> None:
        """`words` are those that the sweep was typed with; `check` raises what Hydra does of a
        point that cannot be.
        """
        self._folder, self._machine, self._pool, self._runs = folder.folder, machine, pool, runs
        self._display, self._typed, self._compose, self._check = display, words, compose, check
        self._to_come, self._standing = to_come, standing
        pool.is_dropped, pool.is_held = standing.is_dropped, standing.is_held
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
                order.answer(str(as_config_error(error, order.about)), refused=True)
            except ExptError as error:
                order.answer(str(error), refused=True)
            else:
                for line in lines:
                    self._display.told(line)
                order.answer(*lines)
        self._tell_of_rest(now)

    def _tell_of_rest(self, now: float) -> None:
        """Say once that the sweep waits for a person; not between two runs, when a search chooses
        the next, say.
        """
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
        runs: list[KnownRun | ComingPoint] = [
            KnownRun(job) for job in self._pool.jobs if job.request is not None
        ]
        left = self._to_come.left()
        aim, found = meant(order.about, [*runs, *left], self._folder)
        jobs = [run.job for run in found if isinstance(run, KnownRun)]
        points = [
            run for run in found if isinstance(run, ComingPoint) and not self._standing.drops(run)
        ]
        coming = _Coming(
            points, any(aim.hits(run, if_unsure=True) and not aim.hits(run) for run in left)
        )
        if order.word == "resume":
            return self._resume(order.about, aim, jobs, coming)
        if order.word == "pause":
            return self._pause(order.about, aim, jobs, coming)
        return self._drop(aim, jobs, coming)

    def _resume(
        self, about: Sequence[str], aim: Aim, jobs: Sequence[Job], coming: _Coming
    ) -> list[str]:
        pool, held, standing = self._pool, {*self._pool.held}, self._standing
        coming = coming if pool.is_paused or standing.pauses_any else _Coming()
        if not about:
            pool.is_paused = False
            standing.resume_all()
        elif any(coming):
            standing.resume(aim)
        paused = [job for job in jobs if job in held]
        pool.let_go_on(paused)
        return _told("resumed", paused, "none of these has paused", coming.told)

    def _pause(
        self, about: Sequence[str], aim: Aim, jobs: Sequence[Job], coming: _Coming
    ) -> list[str]:
        pool, held = self._pool, {*self._pool.held}
        pool.is_paused |= not about
        if any(coming):
            self._standing.pause(aim)
        running = [job for job in jobs if job.status in (QUEUED, RUNNING) and job not in held]
        pool.pause(running)
        return _told("paused", running, "none of these runs or waits", coming.told)

    def _drop(self, aim: Aim, jobs: Sequence[Job], coming: _Coming) -> list[str]:
        if any(coming):
            self._standing.drop(aim)
        open_ones = [job for job in jobs if job.status in (QUEUED, RUNNING)]
        open_ones += [job for job in jobs if job.status == PAUSED]  # a search would have them go on
        self._pool.drop(open_ones)
        words = [run.overrides for job in open_ones for run in self._runs[job]]
        added.forget(self._folder, [*words, *(point.words for point in coming.points)])
        return _told("dropped", open_ones, "none of these runs or waits", coming.told)

    def _add(self, words: Sequence[str]) -> list[str]:
        """The grid that was typed, with these words in place of those for the same keys."""
        if of_search := [
            word for word in words if word.partition("=")[0].partition(".")[0] == "search"
        ]:
            raise ConfigError(
                f"{of_search[0]}: is the search's; end it by Ctrl-C, and type its command again"
                " with it"
            )
        words = readable(words)
        points = self._product(words)
        left = self._to_come.left()
        coming = {self._to_come.same(point.words): point for point in left}
        named = [coming.get(self._to_come.same(point)) if coming else None for point in points]
        new_points = [point for point, known in zip(points, named, strict=True) if known is None]
        new = self._made(new_points, [key_typed(each) for each in parsed(words)], len(left))
        new += [self._taken_back(point) for point in named if point and self._standing.drops(point)]
        num_known = len(points) - len(new)
        known = (
            f"; {num_known} {'is' if num_known == 1 else 'are'} there already" if num_known else ""
        )
        return [f"{line}{known}" for line in _told("added", new, "nothing is new")]

    def _product(self, words: Sequence[str]) -> list[list[str]]:
        last = last_of_each([*self._typed, *words])
        searched = [
            each for each in last if each.is_sweep_override() and not each.is_discrete_sweep()
        ]
        if searched:  # a misspelt key, maybe
            self._check(product([each for each in last if each not in searched])[0])
            key = searched[0].get_key_element()
            raise ConfigError(
                f"{key}: is searched in an interval; give the run a value, as in {key}=1"
            )
        return product(last)

    def _made(self, points: Sequence[Sequence[str]], keys: list[str], num_coming: int) -> list[Job]:
        """The jobs of these points that are new, and in the pool now; their numbers lie behind
        those to come.
        """
        if not points:
            return []
        numbers = [run.number for same in self._runs.values() for run in same]
        first = OfAdded(place=added.next_place(self._folder), keys=keys)
        composed = self._compose(points, first, 1 + max(numbers, default=-1) + num_coming)
        new = [run for run in composed if run.job not in self._runs]
        again = {run.job: run for run in composed if run.job in self._runs and _is_dropped(run.job)}
        if refused := [run.job for run in new if run.job.error]:
            raise ConfigError(list(dict.fromkeys(str(job.error) for job in refused)))
        places = {run.job: place for place, run in enumerate(composed, first["place"])}
        kept = [*new, *(run for job, run in again.items() if "added" in request_of(job).about)]
        added.keep(self._folder, [Added(run.overrides, keys, places[run.job]) for run in kept])
        for run in new:
            self._runs[run.job] = [run]
            self._display.total += 1
            self._standing.leave_out(run.job)
            self._pool.add(run.job)
        for job in again:
            job.go_on(request_of(job).until_epoch)
            self._display.taken_back()
            self._standing.leave_out(job)
            self._pool.add(job)
        return [*(run.job for run in new), *again]

    def _taken_back(self, point: ComingPoint) -> Job:
        """The job of a dropped point of the grid that starts, after all, when its turn comes."""
        (run,) = self._compose([point.words], None, 0)
        self._standing.take_back(TakenBack(point.name, run.job))
        return run.job

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
        return [
            f"GPUs in use from now on: {names}",
            *_told("paused until others are free", moved, ""),
        ]


def _is_dropped(job: Job) -> bool:
    return job.status == INTERRUPTED and str(job.error) == DROPPED


def _index(part: str, text: str, have: int) -> int:
    if not part.isdigit() or int(part) >= have:
        raise ConfigError(f"gpus {text}: give numbers from 0 to {have - 1}, as in 0,1, or all")
    return int(part)


def _told(what: str, jobs: Sequence[Job], nothing: str, coming: str = "") -> list[str]:
    if not jobs:
        return [f"{what} {coming}"] if coming else [nothing] if nothing else []
    names = ", ".join(job.name for job in jobs[:5]) + (", ..." if len(jobs) > 5 else "")
    return [
        f"{what} {len(jobs)} run{'s' * (len(jobs) > 1)}: {names}"
        + (f"; and {coming}" if coming else "")
    ]
