"""A search as a command: its trials are run as those of a grid."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from expt.command.compose import contained
from expt.command.grammar import last_of_each
from expt.command.search_space import refuse_repetitions, space_of
from expt.command.sweep import Runner, Sweep, SweepObserver
from expt.command.sweep_display import show_dry_run
from expt.command.sweep_folder import SweepRun
from expt.config import own_code
from expt.config.identity import REPEATED, differences
from expt.config.keys import without_effect
from expt.config.kinds import metrics_of
from expt.config.schema import RunConfig
from expt.config.search import parse_search
from expt.errors import ConfigError, Diverged, OutOfMemory, warn
from expt.launch.job import Job
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

NEAR = 32
"""How far the integers of a trial are moved to those with which a run can be."""


class SearchCommand:
    """One command's search, from its overrides to its runs."""

    def __init__(self, sweep: Sweep, words: Sequence[str]) -> None:
        """Read the search as its folder has it. Raises ConfigError for impossible settings."""
        self._sweep, composed = sweep, sweep.config
        with sweep.composer.explained(words):
            search, objective = map(contained, (composed.search, composed.objective))
        self._settings = settings = parse_search(search)
        self._budget = Budget(settings.budget) if settings.budget is not None else None
        self._fixed, axes = _split(words)
        if isinstance(objective, list):
            self._fixed = [word for word in self._fixed if not word.startswith("objective=")]
            self._fixed += _objective_of_runs(objective, self._settings_of(()))
        self._space = space_of(
            axes, settings.when, sweep.composer, self._settings_of, sweep.machine
        )
        self._keys = [*dict.fromkeys(parameter.name for parameter in self._space.parameters)]
        self._folder = sweep.open()
        refuse_repetitions(self._space, self._config_of)
        self._corners = [*map(self._nearest, self._space.corners())]
        config = self._check_trials()
        goals, limits = goals_of(objective, config), limits_of(settings.constraints, config)
        for line in without_effect(config, map(key_of, self._fixed), self._keys):
            warn(line)
        sampler.check(settings.name, self._space, goals, limited=bool(limits))
        reader = Reader(self._space, goals, limits, self._differences)
        rungs = rungs_of(settings, config, goals)
        self._search = Search(sweep.folder, settings, reader, rungs, self._budget, self._nearest)
        if others := self._search.trials.others:
            names = dict.fromkeys(key for differing in others.values() for key in differing)
            warn(
                f"hydra.sweep.dir={sweep.folder}: has {len(others)} runs of other settings"
                f" ({', '.join(names) or 'outside the space'}), which are not trials of this search"
            )

    def run(self) -> None:
        """Search until there are as many trials as were asked for.

        Raises ConfigError, Interrupted.
        """
        sweep, search = self._sweep, self._search
        if sweep.is_preflight:
            corners = (self._run(*each) for each in enumerate(self._corners))
            return sweep.try_out(corners, search.num_left)
        if sweep.is_dry_run:
            return self._dry_run()
        observer = SweepObserver(
            sweep.console,
            total=max(self._settings.runs, search.count),
            folder=sweep.folder,
            what="search",
            on_end=lambda job: "  best so far" if search.trials.is_new_best(job.paths) else "",
            look=search.look,
        )
        try:
            with sweep.running(observer, (Diverged, OutOfMemory)) as runner:
                self._begin(observer, runner)
                while not (search.is_over or runner.is_closed):
                    runner.run(search)  # once by the pool, on a cluster once for each batch
        finally:
            others = search.trials.others.items()
            left_out = [name for name, by in others if not by or {*by} - {*REPEATED}]
            write_grid(sweep.folder, GridRecord(left_out=left_out))
            sweep.outcome.notes += self._at_end()
            if not {COMPLETED, PRUNED} & {*sweep.outcome.ended.values()}:
                for trial in search.trials:  # those of earlier commands that were bad
                    if trial.folder and RunPaths(trial.folder) not in sweep.outcome.ended:
                        sweep.outcome.add(RunPaths(trial.folder), trial.status)

    def _dry_run(self) -> None:
        """Show the next trial; those after it depend on its result."""
        search, what = self._search, "no further trial"
        if search.count < self._settings.runs and (found := search.suggest()) is not None:
            show_dry_run([self._run(*found)])
            what = f"trial {search.count + 1}"
        before = f"; {len(search.unfinished)} continue first" if search.unfinished else ""
        say(Console(), f"{what} of {self._settings.runs}{before}")

    def _settings_of(self, words: Sequence[str]) -> dict[str, Any]:
        return self._sweep.composer.settings([*self._fixed, *words], sweep=True)

    def _config_of(self, values: Values) -> RunConfig:
        return self._folder.config_of([*self._fixed, *self._space.words(values)])

    def _check_trials(self) -> RunConfig:
        """Return the configuration of one trial, after a look at each choice and each end.

        Raises ConfigError where no such trial can begin, or where rungs could not compare them.
        """
        found, errors = list[RunConfig](), list[ConfigError]()
        for values in self._corners:
            try:
                found.append(self._config_of(values))
            except ConfigError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        self._folder.identity_of(found[0])
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
        """Return how a run of these values differs from this command's: see `differences`."""
        if "identity" not in record:  # refused before it had settings
            return {}
        try:
            config = self._config_of(values)
            known = self._folder.identity_of(config)
        except ConfigError:
            return {}
        if record["identity"] == known.digest and not own_code.changed(record):
            return {}
        return differences(record, config, known)

    def _run(self, number: int, values: Values) -> SweepRun:
        words = [*self._fixed, *self._space.words(values)]
        return self._folder.run(words, number, self._keys, search=OfSearch(number=number))

    def _begin(self, observer: SweepObserver, runner: Runner) -> None:
        """Count the trials of earlier commands, and let the search make further ones."""
        search = self._search

        def make(number: int, values: Values) -> Job | None:
            run = self._run(number, values)
            if run.job not in observer.runs and search.trials.is_of_another(number, run.job.paths):
                observer.repeated(run.job)
                return None
            return next(self._sweep.jobs([run], observer), None)

        unfinished = search.unfinished
        for trial in search.trials:
            if trial.folder is None or trial in unfinished:
                continue
            if trial.number is not None:
                observer.ended_before(trial.folder, trial.status)
            if trial.status in (COMPLETED, PRUNED):
                self._sweep.outcome.add(RunPaths(trial.folder), trial.status)
        batch = self._settings.batch or runner.batch
        search.begin(make, has_room=runner.has_room, finish=runner.finish, batch=batch)

    def _at_end(self) -> Iterator[str]:
        search = self._search
        if search.is_exhausted:
            yield f"search       ends after {search.count} trials: the space has no further one"
        if (budget := self._budget) is not None:
            left_s = max(0.0, budget.left_s(search.note_costs()))
            begun = f"{search.count} of {self._settings.runs} trials have begun"
            yield f"budget       {left_s:.0f} s of {budget.text} are left; {begun}"


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides that all trials share, and the axes."""
    every = last_of_each(words)
    own = [each for each in every if each.key_or_group.partition(".")[0] != "search"]
    axes = [each for each in own if each.is_sweep_override()]
    if any(each.key_or_group == "objective" for each in axes):
        raise ConfigError(
            "objective: give several in brackets, such as 'objective=[accuracy/val,loss/val]'"
        )
    fixed = [str(each.input_line) for each in own if each not in axes]
    return fixed, [str(each.input_line) for each in axes]


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
