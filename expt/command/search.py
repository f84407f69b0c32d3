"""A search as a command: its trials are run as those of a grid."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from expt.command.grammar import last_of_each
from expt.command.search_space import refuse_repetitions, space_of
from expt.command.sweep import Runner, Sweep, SweepObserver
from expt.command.sweep_display import show_dry_run
from expt.command.sweep_folder import SweepRun
from expt.config import keys, own_code
from expt.config.constraints import typed
from expt.config.identity import REPEATED, shown
from expt.config.keys import without_effect
from expt.config.kinds import metrics_of
from expt.config.schema import RunConfig
from expt.config.search import parse_search
from expt.errors import ConfigError, Diverged, OutOfMemory, warn
from expt.launch.job import Job
from expt.launch.pool import Pool
from expt.launch.submitit_jobs import Queue
from expt.runs.found import GridRecord, write_grid
from expt.runs.overrides import key_of
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PRUNED, OfSearch, Record
from expt.runs.view.text import Console, say
from expt.search import sampler
from expt.search.rungs import rungs_of
from expt.search.search import Budget, Search
from expt.search.space import Values
from expt.search.trial import Reader, goals_of, limits_of

BATCH = 8
"""Trials that are chosen together where another launcher than the pool starts the runs."""
NEAR = 32
"""How far the integers of a trial are moved to those with which a run can be."""


class SearchCommand:
    """One command's search, from its overrides to its runs."""

    def __init__(self, sweep: Sweep, words: Sequence[str]) -> None:
        self._sweep, self._config = sweep, sweep.config
        self._settings = parse_search(_plain(sweep.config.search))
        self._budget = None if self._settings.budget is None else Budget(self._settings.budget)
        self._fixed, self._axes = self._split_words(words)

    def run(self) -> None:
        """Search until there are as many trials as were asked for.

        Raises ConfigError, Interrupted.
        """
        sweep = self._sweep
        search = self._search()
        if sweep.is_preflight:
            corners = (self._run(*each) for each in enumerate(self._space.corners()))
            return sweep.try_out(corners, search.num_left)
        if sweep.is_dry_run:
            return self._dry_run(search)
        total = max(self._settings.runs, search.count)
        display = SweepObserver(
            sweep.console,
            total=total,
            folder=sweep.folder,
            what="search",
            note=lambda job: "  best so far" if search.trials.is_new_best(job.paths) else "",
        )
        try:
            sweep.carry_out(
                lambda *each: self._rounds(search, *each), display, (Diverged, OutOfMemory)
            )
        finally:
            others = search.trials.others.items()
            left_out = [name for name, by in others if not by or {*by} - {*REPEATED}]
            write_grid(sweep.folder, GridRecord(left_out=left_out))
            sweep.outcome.notes += self._at_end(search)
            if not {COMPLETED, PRUNED} & {*sweep.outcome.ended.values()}:
                for trial in search.trials:  # those of earlier commands that were bad
                    if trial.folder and RunPaths(trial.folder) not in sweep.outcome.ended:
                        sweep.outcome.add(RunPaths(trial.folder), trial.status)

    def _dry_run(self, search: Search) -> None:
        """Show the next trial; those after it depend on its result."""
        what = "no further trial"
        if search.count < self._settings.runs and (found := search.suggest()) is not None:
            show_dry_run([self._run(*found)])
            what = f"trial {search.count + 1}"
        before = f"; {len(search.unfinished)} continue first" if search.unfinished else ""
        say(Console(), f"{what} of {self._settings.runs}{before}")

    def _split_words(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the overrides that all trials share, and the axes."""
        own = [
            each for each in last_of_each(words) if each.key_or_group.partition(".")[0] != "search"
        ]
        several = [each for each in own if each.is_sweep_override()]
        if any(each.key_or_group == "objective" for each in several):
            raise ConfigError(
                "objective: give several in brackets, such as 'objective=[accuracy/val,loss/val]'"
            )
        fixed = [str(each.input_line) for each in own if each not in several]
        if OmegaConf.is_list(self._config.objective):
            fixed = [word for word in fixed if not word.startswith("objective=")]
        return fixed, [str(each.input_line) for each in several]

    def _search(self) -> Search:
        """Return the search as its folder has it. Raises ConfigError for impossible settings."""
        sweep, settings = self._sweep, self._settings
        objective = _plain(self._config.objective)
        if isinstance(objective, list):
            self._fixed += _objective_of_runs(objective, self._settings_of(()))
        composer, when = sweep.composer, settings.when
        self._space = space_of(self._axes, when, composer, self._settings_of, sweep.machine)
        space = self._space
        self._keys = [*dict.fromkeys(parameter.name for parameter in space.parameters)]
        sweep.open()
        refuse_repetitions(space, self._config_of)
        config = self._check_trials()
        goals, limits = goals_of(objective, config), limits_of(settings.constraints, config)
        for line in without_effect(config, map(key_of, self._fixed), self._keys):
            warn(line)
        sampler.check(settings.name, space, goals, limited=bool(limits))
        rungs = rungs_of(settings, config, goals)
        reader = Reader(space=space, goals=goals, limits=limits, differences=self._differences)
        found = Search(sweep.folder, settings, reader, rungs, self._budget)
        self._warn_of_others(found.trials.others)
        found.nearest = self._nearest
        return found

    def _settings_of(self, words: Sequence[str]) -> dict[str, Any]:
        return self._sweep.composer.settings([*self._fixed, *words], sweep=True)

    def _config_of(self, values: Values) -> RunConfig:
        return self._sweep.open().config_of([*self._fixed, *self._space.words(values)])

    def _check_trials(self) -> RunConfig:
        """Return the configuration of one trial, after a look at each choice and each end.

        Raises ConfigError where no such trial can begin, or where rungs could not compare them.
        """
        found, errors = list[RunConfig](), list[ConfigError]()
        for values in self._space.corners():
            try:
                found.append(self._config_of(self._nearest(values)))
            except ConfigError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        self._sweep.open().identity_of(found[0])
        if self._settings.rungs and len({(each.epochs, each.max_steps) for each in found}) > 1:
            raise ConfigError(
                f"search.rungs={self._settings.rungs}: compares runs of equal length; search"
                " neither epochs nor max_steps, or leave rungs out"
            )
        return found[0]

    def _is_valid(self, values: Values) -> bool:
        with contextlib.suppress(ConfigError):
            self._config_of(values)
            return True
        return False

    def _nearest(self, values: Values, tried: Sequence[Values] = ()) -> Values:
        """Return the values, or those with the nearest integer with which a run can be.

        Where workers must share a batch equally, say. Rather one that was not `tried`.
        """
        whole = [p for p in self._space.parameters if p.kind == "int" and p.is_active(values)]
        if not whole or self._is_valid(values):
            return values
        valid = list[Values]()
        for distance, each, way in itertools.product(range(1, NEAR + 1), whole, (-1, 1)):
            near = int(values[each.name]) + way * distance * int(each.step or 1)
            trial = {**values, each.name: near}
            if each.low <= near <= each.high and self._is_valid(trial):
                valid.append(trial)
                if trial not in tried:
                    return trial
        return valid[0] if valid else values

    def _differences(self, values: Values, record: Record) -> dict[str, str]:
        """Return how a run of these values differs from this command's: data and choices first.

        Each key is a setting, or "its data", "its code", ..., and the text has both values.
        """
        if "identity" not in record:  # refused before it had settings
            return {}
        try:
            config = self._config_of(values)
            known = self._sweep.open().identity_of(config)
        except ConfigError:
            return {}
        if record["identity"] == known.digest and not own_code.changed(record):
            return {}
        then, now = keys.flat(record.get("config", {})), keys.flat(shown(config))
        settings = keys.differing(then, now, "result")
        settings.sort(key=lambda key: (not key.startswith("dataset."), not key.endswith(".name")))
        found = dict[str, str]()
        for key in settings:
            short = key.removesuffix(".name")
            found[short] = f"{short}={typed(then.get(key))} there, {typed(now.get(key))} here"
        before: Mapping[str, Any] = record.get("content", {})
        content: Mapping[str, Any] = known.content
        names = ("data", "code", "weights", "base")
        parts = [part for part in names if before.get(part) != content.get(part)]
        if not next(iter(settings), "").startswith("dataset."):  # which would give other data
            found = {**{f"its {part}": f"its {part} has changed since" for part in parts}, **found}
        return found or {"its code": "its code has changed since"}

    def _warn_of_others(self, others: Mapping[str, Collection[str]]) -> None:
        if others:
            names = dict.fromkeys(key for differing in others.values() for key in differing)
            warn(
                f"hydra.sweep.dir={self._sweep.folder}: has {len(others)} runs of other settings"
                f" ({', '.join(names) or 'outside the space'}), which are not trials of this search"
            )

    def _run(self, number: int, values: Values) -> SweepRun:
        words = [*self._fixed, *self._space.words(values)]
        of_search = OfSearch(number=number)
        run = self._sweep.open().run(words, number, self._keys, search=of_search)
        self._sweep.send_along(run)
        return run

    def _rounds(
        self, search: Search, display: SweepObserver, runner: Runner
    ) -> Iterator[Iterator[Job | None]]:
        """Yield the search once to the pool, and to a cluster as often as it has a batch."""

        def make(number: int, values: Values) -> Job | None:
            run = self._run(number, values)
            if run.job not in display.runs and search.trials.is_of_another(number, run.job.paths):
                display.repeated(run.job)
                return None
            return display.take(run)

        unfinished = search.unfinished
        for trial in search.trials:
            if trial.folder is None or trial in unfinished:
                continue
            if trial.number is not None:
                if trial.status == PRUNED:
                    display.count_pruned(trial.folder)
                else:
                    display.count_ended()
            if trial.status in (COMPLETED, PRUNED):
                self._sweep.outcome.add(RunPaths(trial.folder), trial.status)
        has_room = runner.has_room if isinstance(runner, Pool) else None
        batch = self._settings.batch or (None if has_room else BATCH)
        search.begin(make, has_room=has_room, finish=runner.finish, batch=batch)
        if isinstance(runner, Queue):
            runner.look_on = search.has_spent_all
        while not (search.is_over or (isinstance(runner, Pool) and runner.is_closed)):
            yield search

    def _at_end(self, search: Search) -> Iterator[str]:
        if search.is_exhausted:
            yield f"search       ends after {search.count} trials: the space has no further one"
        if (budget := self._budget) is not None:
            left_s = max(0.0, budget.left_s(search.spent_s))
            begun = f"{search.count} of {self._settings.runs} trials have begun"
            yield f"budget       {left_s:.0f} s of {budget.text} are left; {begun}"


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _objective_of_runs(tags: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the override of the objective by which each run chooses its checkpoint.

    It is the first of several goals that an evaluation measures.
    """
    known = metrics_of(settings.get("task"))
    for tag in tags:
        name, _, split = tag.partition("/")
        if name in known and split in ("val", "test"):
            return [f"objective={tag}"]
    return []
