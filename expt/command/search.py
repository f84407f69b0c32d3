"""A search as a command: its trials are run as those of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from expt.command.grid import last_of_each
from expt.command.preflight import Samples
from expt.command.search_space import space_of
from expt.command.sweep import Runner, Runs, Sweep
from expt.command.sweep_display import SweepDisplay, show_dry_run
from expt.command.sweep_folder import SweepRun
from expt.config import keys
from expt.config.identity import identity, shown
from expt.config.schema import RunConfig
from expt.config.search import parse_search
from expt.config.tasks import metrics_of
from expt.errors import ConfigError, Diverged, OutOfMemory, warn
from expt.launch.job import Job
from expt.launch.pool import Pool
from expt.launch.submitit_jobs import Queue
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PAUSED, OfSearch, Record
from expt.runs.view import leaderboard
from expt.runs.view.text import say
from expt.search import sampler
from expt.search.rungs import rungs_of
from expt.search.search import Budget, Search
from expt.search.space import Values
from expt.search.trial import Reader, goals_of, limits_of

BATCH = 8
"""Trials that are chosen together where another launcher than the pool starts the runs."""
NAMED = 3
"""Settings that a warning names."""


def search(sweep: Sweep, words: Sequence[str]) -> None:
    """Run the search of `words`. Raises ConfigError, Interrupted."""
    SearchCommand(sweep, words).run()


class SearchCommand:
    """One command's search, from its overrides to its runs."""

    def __init__(self, sweep: Sweep, words: Sequence[str]) -> None:
        self._sweep, self._config = sweep, sweep.config
        self._settings = parse_search(_plain(sweep.config.search))
        self._budget = None if self._settings.budget is None else Budget(self._settings.budget)
        self._fixed, self._axes = self._parted(words)

    def run(self) -> None:
        """Search until there are as many trials as were asked for."""
        sweep = self._sweep
        search = self._search()
        if sweep.is_preflight:
            corners = [self._run(*each) for each in enumerate(self._samples())]
            return sweep.try_out(corners, Samples(search.num_left, self._settings.rungs))
        if sweep.is_dry_run:
            return self._dry_run(search)
        total = max(self._settings.runs, search.count)
        display = SweepDisplay(sweep.console, total=total, folder=sweep.folder, what="search")
        display.note = lambda job: "  best so far" if search.is_new_best(job.paths) else ""
        try:
            sweep.carry_out(
                lambda *each: self._rounds(search, *each), display, (Diverged, OutOfMemory)
            )
        finally:
            for line in self._at_end(search):
                sweep.note(line)

    def _dry_run(self, search: Search) -> None:
        """Show the next trial; those after it depend on its result."""
        found = search.suggest() if search.count < self._settings.runs else None
        runs = [] if found is None else [self._run(*found)]
        if runs:
            show_dry_run(runs, len(runs))
        what = "no further trial" if found is None else f"trial {search.count + 1}"
        before = f"; {len(search.unfinished)} continue first" if search.unfinished else ""
        say(leaderboard.wide_console(), f"{what} of {self._settings.runs}{before}")

    def _parted(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
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
        """Return the search as its folder has it. Raises ConfigError for what can't work."""
        sweep, settings = self._sweep, self._settings
        objective = _plain(self._config.objective)
        if isinstance(objective, list):
            self._fixed += _objective_of_runs(objective, self._settings_of(()))
        self._space = space = space_of(
            self._axes, settings.when, sweep.composer, self._settings_of, sweep.machine
        )
        self._keys = [*dict.fromkeys(parameter.name for parameter in space.parameters)]
        sweep.open()
        config = self._checked()
        goals, limits = goals_of(objective, config), limits_of(settings.constraints, config)
        sampler.check(settings.name, space, goals, limited=bool(limits))
        rungs = rungs_of(settings, config, goals)
        reader = Reader(space=space, goals=goals, limits=limits, differences=self._differences)
        found = Search(sweep.folder, settings, reader, rungs, self._budget)
        self._warn_of_others(found.others)
        return found

    def _settings_of(self, words: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = self._sweep.composer.settings([*self._fixed, *words], sweep=True)
        return found

    def _config_of(self, values: Values) -> RunConfig:
        words = [*self._fixed, *self._space.words(values)]
        return self._sweep.open().config_of(words)

    def _checked(self) -> RunConfig:
        """Return the configuration of one trial, after a look at each choice and each end.

        Raises ConfigError where no such trial can begin, or where rungs could not compare them.
        """
        found, errors = list[RunConfig](), list[ConfigError]()
        for values in self._space.corners():
            try:
                found.append(self._config_of(values))
            except ConfigError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        self._sweep.open().content_of(found[0])
        if self._settings.rungs and len({(each.epochs, each.max_steps) for each in found}) > 1:
            raise ConfigError(
                f"search.rungs={self._settings.rungs}: compares runs of equal length; search"
                " neither epochs nor max_steps, or leave rungs out"
            )
        return found[0]

    def _samples(self) -> list[Values]:
        """Return the corners; the values of one that is refused also with those of valid ones."""
        corners = self._space.corners()
        valid = [values for values in corners if self._is_valid(values)]
        for values in [values for values in corners if values not in valid]:
            for name, value in values.items():
                if any(point.get(name) == value for point in valid):
                    continue
                others = (
                    self._space.point(
                        value if each.name == name else point.get(each.name, each.at(0.5))
                        for each in self._space.parameters
                    )
                    for point in valid
                )
                valid += [other for other in others if self._is_valid(other)][:1]
        return [*corners, *(values for values in valid if values not in corners)]

    def _is_valid(self, values: Values) -> bool:
        try:
            self._config_of(values)
        except ConfigError:
            return False
        return True

    def _differences(self, values: Values, record: Record) -> list[str]:
        """Return the settings in which a run of these values differs from this command's."""
        if "identity" not in record:  # refused before it had settings
            return []
        try:
            config = self._config_of(values)
            content = self._sweep.open().content_of(config)
        except ConfigError:
            return []
        if record["identity"] == identity(config, content):
            return []
        then, now = keys.flat(record.get("config", {})), keys.flat(shown(config))
        differing = keys.differing(then, now, "result")
        return [key.removesuffix(".name") for key in differing] or ["its data or code"]

    def _warn_of_others(self, others: Mapping[str, Sequence[str]]) -> None:
        if not others:
            return
        names = list(dict.fromkeys(key for differing in others.values() for key in differing))
        named = ", ".join([*names[:NAMED], *["..."] * (len(names) > NAMED)])
        named = named or "outside the space"
        warn(
            f"hydra.sweep.dir={self._sweep.folder}: has {len(others)} runs of other settings"
            f" ({named}), which are no trials of this search"
        )

    def _run(self, number: int, values: Values) -> SweepRun:
        words = [*self._fixed, *self._space.words(values)]
        run = self._sweep.open().trial(words, OfSearch(number=number), self._keys)
        self._sweep.send_along(run)
        return run

    def _rounds(
        self, search: Search, runs: Runs, display: SweepDisplay, runner: Runner
    ) -> Iterator[Iterator[Job | None]]:
        """Yield the search once to the pool, and to a cluster as often as it has a batch."""

        def make(number: int, values: Values) -> Job | None:
            run = self._run(number, values)
            if run.job not in runs and search.is_of_another(number, run.job.paths):
                display.repeated(run.job)
                return None
            return self._sweep.take(run, runs, display)

        unfinished = search.unfinished
        for trial in search.trials:
            if trial.folder is None or trial in unfinished:
                continue
            counts = trial.number is not None
            if counts:
                display.known(trial.folder if trial.status == PAUSED else None)
            if counts or trial.status in (COMPLETED, PAUSED):
                self._sweep.known(RunPaths(trial.folder), trial.status, counts=counts)
        has_room = runner.has_room if isinstance(runner, Pool) else None
        batch = self._settings.batch or (None if has_room else BATCH)
        search.begin(make, has_room=has_room, finish=runner.finish, batch=batch)
        if isinstance(runner, Queue):
            runner.look_on = search.has_spent_all
        while not search.is_over:
            yield search

    def _at_end(self, search: Search) -> Iterator[str]:
        if search.is_exhausted:
            yield f"search       ends after {search.count} trials: the space has no further one"
        budget, total = self._budget, self._settings.runs
        if budget is None:
            return
        if search.is_spent:
            yield (
                f"budget       {budget.text} is used up: {search.count} of {total} trials have"
                " begun; to continue, type the command with a larger search.budget"
            )
        else:
            left_s = max(0.0, budget.left_s(search.spent_s))
            yield f"budget       {left_s:.0f} s of {budget.text} are left"


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _objective_of_runs(tags: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the override for what each run itself chooses its checkpoint by.

    It is the first of several goals that an evaluation measures.
    """
    known = metrics_of(settings.get("task"))
    for tag in tags:
        name, _, split = tag.partition("/")
        if name in known and split in ("val", "test"):
            return [f"objective={tag}"]
    return []
