"""A search: what Hydra's sweeper `search` does.

Points are chosen one by one, and run as those of a grid are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from expt.command.composed_run import ComposedRun
from expt.command.hydra_adapter import settings_of_point
from expt.command.overrides import last_of_each
from expt.command.own_class import folded
from expt.command.preflight import Samples
from expt.command.search_conclusion import NOT_COUNTED
from expt.command.search_points import SHARES, PointMaker
from expt.command.search_settings import (
    UNTAUGHT,
    FixedSettings,
    names_of_others,
    told,
    told_by_hand,
    told_copies,
)
from expt.command.search_space import space_of
from expt.command.sweep import Multirun, Runner
from expt.command.sweep_display import SweepDisplay, show_dry_run
from expt.command.sweep_runs import Runs, is_new
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.config.search import parse_search
from expt.config.tasks import metrics_of
from expt.errors import ConfigError, Diverged, OutOfMemory, warn
from expt.launch.job import Job
from expt.launch.pool import Pool
from expt.launch.submitit_jobs import Queue
from expt.runs.parent import key_of
from expt.runs.paths import SWEEP_RECORD, RunPaths
from expt.runs.result import COMPLETED, PAUSED, OfSearch, read_result
from expt.runs.view import leaderboard
from expt.runs.view.text import say
from expt.search.budget import budget_of, in_words, stopped_in_words
from expt.search.goals import goals_of, limits_of
from expt.search.history import Point, Reader
from expt.search.pausing import Pausing
from expt.search.population import NewRun, PopulationTraining
from expt.search.sampler import refuse_missing, refuse_unfit
from expt.search.search import Searching
from expt.search.source import Source, running_elsewhere_s
from expt.search.space import Space, Values

BATCH = 8
"""Points that are chosen together where another launcher than the pool starts the runs."""


def search(
    context: HydraContext, config: DictConfig, launcher: Launcher, arguments: Sequence[str]
) -> list[JobReturn]:
    """Do what `arguments` ask for, `search=...` among them. Raises ConfigError, Interrupted."""
    multirun = getattr(launcher, "multirun", None)
    if not isinstance(multirun, Multirun):
        raise ConfigError(
            "search: its runs are started by hydra/launcher=pool or submitit_slurm; leave other"
            " ones out"
        )
    return SearchCommand(context, config, multirun, arguments).run()


class SearchCommand:
    """One command's search, from its words to its runs."""

    def __init__(
        self,
        context: HydraContext,
        config: DictConfig,
        multirun: Multirun,
        arguments: Sequence[str],
    ) -> None:
        self._context, self._config, self._multirun = context, config, multirun
        self._settings = parse_search(_plain(config.search))
        self._budget = budget_of(self._settings.budget)
        self._source: Source | None = None
        self._is_sent = False
        refuse_missing(self._settings.name)
        params = OmegaConf.select(config, "hydra.sweeper.params") or {}
        self._fixed, self._axes = self._parted(
            [*(f"{key}={value}" for key, value in params.items()), *arguments]
        )

    def run(self) -> list[JobReturn]:
        """Search until there are as many points as were asked for."""
        multirun = self._multirun
        multirun.begin()
        searching = self._searching()
        if multirun.is_preflight:
            corners = [self._found(searching, *each) for each in enumerate(self._maker.samples())]
            return multirun.try_out(corners, Samples(searching.num_left, self._settings.rungs))
        if multirun.is_dry_run:
            return self._dry_run(searching)
        display = SweepDisplay(
            Console(), total=searching.total, folder=multirun.folder, what="search"
        )
        display.note = lambda job: "  best so far" if searching.is_new_best(job.paths) else ""
        try:
            return multirun.carry_out(
                lambda *each: self._rounds(searching, *each), display, (Diverged, OutOfMemory)
            )
        finally:
            for line in self._at_end(searching):
                multirun.note(line)

    def _dry_run(self, searching: Searching) -> list[JobReturn]:
        """Show the next point: those after it depend on what comes of it."""
        found = None if searching.is_complete else searching.next()
        runs = [] if found is None else [self._found(searching, *found)]
        returned = show_dry_run(runs, len(runs)) if runs else []
        total, unfinished, place = (
            self._settings.runs,
            len(searching.unfinished),
            searching.count + 1,
        )
        what = f"no further point of {total}" if found is None else f"point {place} of {total}"
        later = (
            ""
            if found is None or place >= total
            else "; each later one is chosen when its turn comes"
        )
        before = f"; {unfinished} begun before would go on first" if unfinished else ""
        say(leaderboard.wide_console(), f"{what}{later}{before}")
        return returned

    def _parted(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """The words that all points share, and the axes; of several words for a key the last
        counts.
        """
        last = last_of_each(folded(words))
        own = [each for each in last if each.key_or_group.partition(".")[0] != "search"]
        several = [each for each in own if each.is_sweep_override()]
        if any(each.key_or_group == "objective" for each in several):
            raise ConfigError(
                "objective: several are given in brackets, as in"
                " 'objective=[accuracy/val,loss/val]'"
            )
        fixed = [str(each.input_line) for each in own if each not in several]
        if OmegaConf.is_list(self._config.objective):
            fixed = [word for word in fixed if not word.startswith("objective=")]
        return fixed, [str(each.input_line) for each in several]

    def _searching(self) -> Searching:
        """The search as the folder has it.

        Raises ConfigError for all that can be known to be wrong.
        """
        multirun, settings = self._multirun, self._settings
        objective = (
            _plain(self._config.objective) if OmegaConf.is_list(self._config.objective) else ""
        )
        if objective:
            self._fixed += _objective_of_runs(objective, self._settings_of(()))
        loader = self._context.config_loader
        space = space_of(
            self._axes,
            settings.when,
            loader,
            self._settings_of,
            multirun.machine,
            multirun.is_group,
        )
        self._keys = [*dict.fromkeys(parameter.name for parameter in space.parameters)]
        example, config = self._example(space)
        if self._budget and (other := self._budget.warning(on_gpus=bool(config.num_gpus))):
            warn(other)
        goals, limits = (
            goals_of(objective or config.objective, config),
            limits_of(settings.constraints, config),
        )
        refuse_unfit(settings.name, space, goals, limited=bool(limits))
        self._maker = maker = PointMaker(
            multirun.open(), multirun.composer, self._config, self._fixed, space
        )
        pausing: Pausing | PopulationTraining | None = None
        if settings.name == "pbt":
            pausing = PopulationTraining(settings, config, goals, space, maker.changes(example))
        elif settings.rungs:
            begins_at = self._begins_at(space, config)
            pausing = Pausing(settings, config, goals, space, maker.changes(example), begins_at)
        reader = Reader(
            space=space,
            goals=goals,
            limits=limits,
            with_rungs=pausing is not None,
            differences=FixedSettings(maker, self._keys, [*map(key_of, self._fixed)]).differences,
        )
        searching = Searching(multirun.folder, space, settings, reader, pausing)
        if searching.unfinished or not searching.is_complete:
            maker.refuse_if_none_can_begin(anew=not searching.is_complete)
        found, folder = searching.found, str(multirun.folder)
        others_told = told(found, folder, can_learn=self._may_learn)
        for line in filter(
            None, (others_told, told_by_hand(found, folder, settings), told_copies(found, folder))
        ):
            warn(line)
        if not (multirun.is_dry_run or multirun.is_preflight):
            others = names_of_others(found)
            record = OmegaConf.to_yaml(self._config) + (
                yaml.safe_dump({NOT_COUNTED: others}) if others else ""
            )
            (multirun.folder / SWEEP_RECORD).write_text(record)
        return searching

    @property
    def _may_learn(self) -> bool:
        """Whether runs of other settings could inform it, and do not yet."""
        sources = {Path(source).resolve() for source in self._settings.warm_start}
        return (
            self._settings.name not in UNTAUGHT and self._multirun.folder.resolve() not in sources
        )

    def _settings_of(self, words: Sequence[str]) -> dict[str, Any]:
        return settings_of_point(
            self._multirun.composer.compose(self._config, [*self._fixed, *words])
        )

    def _example(self, space: Space) -> tuple[Values, RunConfig]:
        """One of its points, and the configuration of that.

        Raises ConfigError where none of some has one.
        """
        problem: ConfigError | None = None
        for share in SHARES:
            try:
                point = space.at(share)
                return point, parse(self._settings_of(space.words(point)), self._multirun.machine)
            except ConfigError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _begins_at(self, space: Space, config: RunConfig) -> int:
        """The epochs that points have of the runs that they are forks of; of several the most."""
        known = self._multirun.composer.parents
        searched = [each.meant for each in space.parameters if each.name == "fork"]
        given = [str(fork) for fork in (config.fork, *itertools.chain(*searched)) if fork]
        return max(map(known.epochs_before, given), default=0)

    def _found(self, searching: Searching, number: int, values: Values) -> ComposedRun:
        new = searching.new(number)
        words = [*self._fixed, *new.words, *searching.space.words(values)]
        return self._composed(words, number, new)

    def _composed(self, words: Sequence[str], number: int, new: NewRun | Point) -> ComposedRun:
        multirun, of_search = self._multirun, OfSearch(number=number)
        if new.replaces is not None and new.parent is not None:
            of_search |= {"replaces": new.replaces, "parent": new.parent}
        run = multirun.open().found(multirun.composer, self._config, words, of_search, self._keys)
        if self._settings.name == "pbt":
            run.job.least_restarts = 1  # else a worker's death would have its place given away
        if not self._is_sent:
            multirun.send_along(run)
        self._is_sent = True
        return run

    def _rounds(
        self, searching: Searching, runs: Runs, display: SweepDisplay, runner: Runner
    ) -> Iterator[Iterator[Job | None]]:
        """One where the pool asks for each point by itself; elsewhere batches, each after the end
        of the one before.
        """

        def take(run: ComposedRun) -> Job | None:
            return run.job if is_new(run, runs, display) else None

        def make(number: int, values: Values) -> Job | None:
            display.total += searching.new(number).replaces is not None
            run, replaces = self._found(searching, number, values), searching.new(number).replaces
            if (
                run.job not in runs and replaces is None and searching.has(run.job.paths)
            ):  # of an earlier command
                display.repeated(run.job)
                return None
            job = take(run)
            if job and searching.is_missing(number):
                display.told(
                    f"point {number + 1} has no run in {self._multirun.folder} any more; it is"
                    " made now"
                )
            return job

        def again(point: Point) -> Job | None:
            assert point.folder is not None
            assert point.number is not None
            words = read_result(RunPaths(point.folder))["arguments"]
            return take(self._composed(words, point.number, point))

        multirun, unfinished = self._multirun, searching.unfinished
        for point in searching.own:
            if point.folder is not None and point.number is not None and point not in unfinished:
                display.known(point.folder if point.status == PAUSED else None)
                multirun.known(RunPaths(point.folder), point.status)
            elif (
                point.folder is not None
                and point.number is None
                and point.status in (COMPLETED, PAUSED)
            ):
                multirun.known(RunPaths(point.folder), point.status, counts=False)
        for number in searching.forks_gone:
            gone = f"point {number + 1} has no run in {multirun.folder} any more"
            display.told(
                f"{gone}; as a fork it is not made again: the run whose place it had goes on, if"
                " it can"
            )
        self._source = source = self._source_for(runner, searching, make, again)
        while not source.is_over:
            yield source

    def _source_for(self, runner: Runner, searching: Searching, make: Any, again: Any) -> Source:
        more: Any = {"batch": self._settings.batch, "budget": self._budget, "finish": runner.finish}
        if isinstance(runner, Pool):
            return Source(searching, make, again, runner.has_room, **more)
        more |= {"batch": more["batch"] or BATCH, "running_s": running_elsewhere_s}
        source = Source(searching, make, again, None, **more)
        if isinstance(runner, Queue):
            runner.look_on = source.has_spent_all
        return source

    def _at_end(self, searching: Searching) -> Iterator[str]:
        """What the budget has left, and what is left to do."""
        source, budget, total = self._source, self._budget, self._settings.runs
        if source is not None and source.is_exhausted:
            yield f"search       ends after {searching.count} points: the space has no further one"
        if budget is None or source is None:
            return
        gpus = bool(self._multirun.machine.gpus)
        left = in_words(
            max(0.0, budget.left_s(searching.spent_s)), of_devices=budget.of_devices, gpus=gpus
        )
        if not source.is_spent:
            yield f"budget       {left} of {budget.text} are left"
            return
        stopped, begun = searching.stopped, searching.num_begun
        kept = f"{stopped_in_words(stopped)}, " if stopped else ""
        yield (
            f"budget       {budget.text} is used up: {begun} of {total} points,"
            f" {kept}{total - begun} not begun"
        )
        yield "      to go on: the same command there with a larger search.budget"


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True)


def _objective_of_runs(tags: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """What each run itself is to be best at: the first of several goals that is a metric of an
    evaluation.
    """
    known = metrics_of(settings.get("task"))
    measured = [
        tag
        for tag in tags
        if tag.partition("/")[0] in known and tag.partition("/")[2] in ("val", "test")
    ]
    return [f"objective={tag}" for tag in measured[:1]]
