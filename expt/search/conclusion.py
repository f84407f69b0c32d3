"""The result of a search: the runs that keep its limits, the best of them, the Pareto front.

Also the runs of a search or a grid as a study of Optuna's, and how much each setting mattered.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from rich.table import Table

from expt.config import read_yaml
from expt.config.identity import REPEATED
from expt.errors import BAD_TRIALS, ConfigError, decimals, listed, require, warn_once
from expt.runs.found import FoundRun, by_objective
from expt.runs.paths import SWEEP_RECORD
from expt.runs.result import COMPLETED, FAILED, PRUNED, RUNNING
from expt.runs.view.settings import Row, objective_name, rows, rows_in_order
from expt.runs.view.text import Console, field, plain_table, say, setting
from expt.search.space import Space
from expt.search.trial import Goal, Limit, Reader, costs_of, goals_for, limits_of

if TYPE_CHECKING:
    import optuna

NAMED = 3
"""The largest number of runs that are named for violating a limit."""
NEEDED, TOP = 10, 5
"""Completed runs without which importance is noise, and how many of the best PED-ANOVA takes."""
WIDE = 30
"""A range whose ends differ by this factor is one of logarithms."""


class SearchRecord(NamedTuple):
    """The goals and limits of the search that was made in a sweep's folder."""

    goals: list[Goal]
    limits: list[Limit]

    def may_be_best(self, run: FoundRun) -> bool:
        """Return whether the run is completed or pruned, has all goals, and keeps all limits."""
        if run.status not in (COMPLETED, PRUNED) or self.breaks_limits(run):
            return False
        return all(value is not None and math.isfinite(value) for value in self.values(run))

    def breaks_limits(self, run: FoundRun) -> bool:
        """Return whether it has measured something that violates a limit."""
        return any(limit.violation(run) > 0 for limit in self.limits)

    def ranked(self, runs: Sequence[FoundRun]) -> list[Row]:
        """Return the settings that may be the best, by the first goal, equal ones by the next.

        One that lacks repetitions comes after all others.
        """
        return sorted((row for _, row in self._reached(runs)), key=lambda row: not row.is_whole)

    def front(self, runs: Sequence[FoundRun]) -> list[Row]:
        """Return the Pareto front of the settings, sorted by the first goal."""
        reached = self._reached(runs)

        def is_beaten(costs: Sequence[float]) -> bool:
            others = (each for each, _ in reached if each != costs)
            return any(all(a <= b for a, b in zip(each, costs, strict=True)) for each in others)

        return [row for costs, row in reached if not is_beaten(costs)]

    def values(self, run: FoundRun) -> list[float | None]:
        """Return the value of each goal."""
        return [run.value_of(goal.tag) for goal in self.goals]

    def means(self, row: Row) -> list[float]:
        """Return the mean of each goal over the repetitions of a setting that may be the best."""
        costs = (costs_of(self.goals, self.values(run)) for run in row.counted)
        every = zip(self.goals, zip(*costs, strict=True), strict=True)
        return [goal.cost(statistics.fmean(each)) for goal, each in every]

    def _reached(self, runs: Sequence[FoundRun]) -> list[tuple[list[float], Row]]:
        """Return the settings whose repetitions may be the best, with costs, the lowest first."""
        found = [row for row in rows_in_order(runs) if row.counted]
        found = [row for row in found if all(map(self.may_be_best, row.counted))]
        reached = [(costs_of(self.goals, self.means(row)), row) for row in found]
        return sorted(reached, key=lambda pair: (pair[0], pair[1].first.number))


def search_in(folder: Path, runs: Sequence[FoundRun]) -> SearchRecord | None:
    """Return the search of a sweep's folder; None where it was none, or nothing was measured."""
    is_measured = any(run.record.get("objective") for run in runs)
    if not is_measured or not any("search" in run.record for run in runs):
        return None
    path, by_own_objective = folder / SWEEP_RECORD, _by_own_objective(runs)
    if not path.is_file():  # the sweep's runs were moved
        return by_own_objective
    try:
        record = read_yaml(path)
        tags = record.get("objective")
        goals = _goals(tags, runs) if isinstance(tags, list) else by_own_objective.goals
        constraints = (record.get("search") or {}).get("constraints") or []
        limits = limits_of([constraints] if isinstance(constraints, str) else constraints)
    except (AttributeError, ConfigError, TypeError, ValueError, yaml.YAMLError):
        warn_once(f"{path}: is damaged; the best run is chosen by the runs' own objective")
        return by_own_objective
    return SearchRecord(goals, limits)


def _by_own_objective(runs: Sequence[FoundRun]) -> SearchRecord:
    return SearchRecord(_goals([objective_name(runs)], runs), [])


def _goals(tags: Sequence[str], runs: Sequence[FoundRun]) -> list[Goal]:
    measured = (run for run in runs if run.record.get("objective"))
    return goals_for(tags, next((run.config.get("task") for run in measured), None))


def ranked_in(search: SearchRecord | None, runs: Sequence[FoundRun]) -> list[Row]:
    """Return the settings of a sweep's runs that may be the best, best first.

    Empty where no run has completed, or they were chosen by different metrics.
    """
    if search is not None:
        return search.ranked(runs)
    measured = by_objective(run for run in runs if run.status == COMPLETED)
    if len({run.objective for run in measured}) != 1:
        return []
    return [row for row in rows(runs) if not math.isnan(row.mean)]


def best_of(folder: Path, runs: Sequence[FoundRun]) -> Row | None:
    """Return the best setting of a sweep; None where none may be."""
    return next(iter(ranked_in(search_in(folder, runs), runs)), None)


def bad_trials(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return the trials that failed because of their values, if any other trial did not."""
    trials = [run for run in runs if "search" in run.record]
    failed = [run for run in trials if run.status == FAILED]
    bad = [run for run in failed if run.record.get("error_kind") in BAD_TRIALS]
    return bad if any(run.status in (COMPLETED, PRUNED) for run in trials) else []


def conclude_search(
    console: Console,
    found: SearchRecord | None,
    runs: Sequence[FoundRun],
    again: Callable[[Row], str],
) -> None:
    """Print the best setting of a search and its command, and the Pareto front of several goals.

    Print nothing for another sweep.
    """
    if found is None:
        return
    if found.limits:
        kept = sum(map(found.may_be_best, runs))
        within = " and ".join(limit.text for limit in found.limits)
        broken = [run.folder.name for run in runs if found.breaks_limits(run)]
        others = f"; not {listed(broken, NAMED)}" if broken else ""
        say(console, field("limits", f"{kept} of {len(runs)} runs keep {within}{others}"))
    if len(found.goals) > 1:
        front = found.front(runs)
        number = sum(len(row.runs) for row in front)
        of_all = f"{number} of {len(runs)} runs, which no other beats in all goals"
        say(console, field("Pareto", of_all), "bold")
        lines = ((row.name, *(f"{value:.6g}" for value in found.means(row))) for row in front)
        if front:
            columns = "run", *(goal.tag for goal in found.goals)
            console.print(plain_table(columns, lines, left=["run"]))
    best = next(iter(found.ranked(runs)), None)
    if best is None:
        say(console, field("best", "none yet: no run has measured all goals and kept all limits"))
        return
    tag, value = found.goals[0].tag, found.means(best)[0]
    say(console, field("best", f"{best.name}  {tag} {decimals(value)}"), "bold green")
    say(console, f"      to train it: {again(best)}")


def study_of(
    folder: Path, runs: Sequence[FoundRun], file: Path | None = None
) -> tuple[optuna.Study, list[Goal]]:
    """Return the runs as a study of Optuna's, in memory or in its journal `file`, and the goals."""
    require("--optuna, --importance", "optuna", extra="search")
    import optuna
    from optuna.storages.journal import JournalFileBackend

    runs = sorted(runs, key=lambda run: (run.number, run.record.get("started", math.inf)))
    search = search_in(folder, runs) or _by_own_objective(runs)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental features
        journal = optuna.storages.JournalStorage(JournalFileBackend(str(file))) if file else None
        study = optuna.create_study(
            storage=journal,
            study_name=folder.absolute().name,
            directions=["maximize" if goal.highest else "minimize" for goal in search.goals],
        )
        study.set_metric_names([goal.tag for goal in search.goals])
        study.add_trials(_trials(runs, search))
    return study, search.goals


def _trials(runs: Sequence[FoundRun], search: SearchRecord) -> Iterator[optuna.trial.FrozenTrial]:
    """Yield each run, with the typed settings in which they differ, but for seed and fold."""
    from optuna.trial import TrialState, create_trial

    states = {PRUNED: TrialState.PRUNED, RUNNING: TrialState.RUNNING}
    keys = dict.fromkeys(key for run in runs for key in run.typed if key not in REPEATED)
    known = {key: [run.typed[key] for run in runs if key in run.typed] for key in keys}
    axes = {key: _axis(each) for key, each in known.items() if len({*map(repr, each)}) > 1}
    reader = Reader(space=Space(()), goals=search.goals, limits=search.limits)
    for run in runs:
        if (read := reader.trial(run)) is None:  # damaged
            continue
        done = read.status == COMPLETED and read.has_values
        own = [key for key in axes if key in run.typed]
        costs = {} if search.goals[1:] else read.costs
        yield create_trial(
            state=TrialState.COMPLETE if done else states.get(read.status, TrialState.FAIL),
            values=read.objectives if done else None,  # type: ignore[arg-type]
            params={
                key: setting(run.typed[key]) if hasattr(axes[key], "choices") else run.typed[key]
                for key in own
            },
            distributions={key: axes[key] for key in own},
            intermediate_values={x: search.goals[0].cost(cost) for x, cost in costs.items()},
            constraints=dict(read.violations),
            user_attrs={"folder": str(run.folder.absolute()), "status": read.status},
        )


def _axis(values: Sequence[Any]) -> optuna.distributions.BaseDistribution:
    """Return the distribution of a setting that has had these values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        return CategoricalDistribution([*dict.fromkeys(map(setting, values))])
    low, high = min(values), max(values)
    are_whole = all(isinstance(value, int) for value in values)
    kind = IntDistribution if are_whole else FloatDistribution
    return kind(low, high, log=low > 0 and high >= WIDE * low)


def importance(folder: Path, runs: Sequence[FoundRun]) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each goal, by each of Optuna's evaluators, how much each setting mattered.

    Raises ConfigError where too few runs say so.
    """
    study, goals = study_of(folder, runs)
    from optuna import importance as of_optuna

    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    equal = " of equal settings" if done and not any(trial.params for trial in done) else ""
    if len(done) < NEEDED or equal:
        there = f"{len(done)} completed runs{equal}"
        raise ConfigError(f"--importance: {folder} has {there}; it takes {NEEDED} that differ")
    top = min(0.5, max(0.1, TOP / len(done)))
    by: dict[str, Any] = {"ped_anova": of_optuna.PedAnovaImportanceEvaluator(target_quantile=top)}
    if find_spec("sklearn"):
        by["fanova"] = of_optuna.FanovaImportanceEvaluator(seed=0)
    found = dict[str, dict[str, dict[str, float]]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the target is to be low
        for name, (place, goal) in itertools.product(by, enumerate(goals)):

            def cost(trial: Any, place: int = place, goal: Goal = goal) -> float:
                return goal.cost(trial.values[place])

            try:
                weights = of_optuna.get_param_importances(study, evaluator=by[name], target=cost)
            except RuntimeError as error:  # all have the same value
                raise ConfigError(f"--importance: {goal.tag}: {error}") from None
            found.setdefault(goal.tag, {})[name] = weights
    return found


def importance_tables(weights: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[Table]:
    """Yield a table for each goal of `importance`."""
    for tag, by in weights.items():
        keys, evaluated = next(iter(by.values())), by.values()
        lines = ((key, *(f"{each.get(key, 0.0):.3f}" for each in evaluated)) for key in keys)
        yield plain_table((f"importance for {tag}", *by), lines, left=[f"importance for {tag}"])
