"""The result of a search: its best run and Pareto front, and its study as Optuna has it."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from rich.table import Table

from expt.config.identity import REPEATED
from expt.errors import BAD_TRIALS, ConfigError, listed, require, warn
from expt.runs.found import FoundRun, by_objective
from expt.runs.paths import SWEEP_RECORD
from expt.runs.result import COMPLETED, FAILED, PRUNED, RUNNING
from expt.runs.view.leaderboard import objective_of
from expt.runs.view.text import Console, cells, plain_table, say, setting
from expt.search.space import Space
from expt.search.trial import Goal, Limit, Reader, costs_of, goals_for, limits_of

if TYPE_CHECKING:
    import optuna

NAMED = 3
"""The largest number of runs that are named for violating a limit."""


class SearchRecord(NamedTuple):
    """The goals and limits of the search that was made in a sweep's folder."""

    goals: list[Goal]
    limits: list[Limit]

    def allowed(self, run: FoundRun) -> bool:
        """Return whether the run has ended or was pruned, and has all goals and limits."""
        if run.status not in (COMPLETED, PRUNED) or self.breaks_limits(run):
            return False
        return all(value is not None and math.isfinite(value) for value in self.values(run))

    def breaks_limits(self, run: FoundRun) -> bool:
        """Return whether it has measured something that violates a limit."""
        return any(limit.violation(run) > 0 for limit in self.limits)

    def best(self, runs: Sequence[FoundRun]) -> FoundRun | None:
        """Return the best allowed run by the first goal, of equal ones by the next."""
        allowed = [run for run in runs if self.allowed(run)]
        return min(allowed, key=lambda run: (self._costs(run), run.number), default=None)

    def front(self, runs: Sequence[FoundRun]) -> list[FoundRun]:
        """Return the Pareto front, sorted by the first goal."""
        reached = [(self._costs(run), run.number, run) for run in runs if self.allowed(run)]
        found = [
            each for each in reached if not any(_beats(other[0], each[0]) for other in reached)
        ]
        return [run for _, _, run in sorted(found, key=lambda each: each[:2])]

    def values(self, run: FoundRun) -> list[float | None]:
        """Return the value of each goal."""
        return [run.value_of(goal.tag) for goal in self.goals]

    def _costs(self, run: FoundRun) -> list[float]:
        return costs_of(self.goals, self.values(run))


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def search_in(folder: Path, runs: Sequence[FoundRun]) -> SearchRecord | None:
    """Return the search of a sweep's folder; None where it was none, or nothing was measured."""
    measured = next((run for run in runs if run.record.get("objective")), None)
    if measured is None or not any("search" in run.record for run in runs):
        return None
    task, own, path = measured.config.get("task"), [measured.objective], folder / SWEEP_RECORD
    if not path.is_file():  # the sweep's runs were moved
        return SearchRecord(goals_for(own, task), [])
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 20 times as fast
        record = yaml.load(path.read_bytes(), loader)
        tags, constraints = record.get("objective"), (record.get("search") or {}).get("constraints")
        limits = limits_of([constraints] if isinstance(constraints, str) else constraints or [])
        return SearchRecord(goals_for(tags if isinstance(tags, list) else own, task), limits)
    except (AttributeError, ConfigError, TypeError, ValueError, yaml.YAMLError):
        warn(f"{path}: is damaged; the best run is chosen by the runs' own objective")
        return SearchRecord(goals_for(own, task), [])


def best_of(folder: Path, runs: Sequence[FoundRun]) -> tuple[FoundRun | None, list[FoundRun]]:
    """Return the best run of a sweep, and the Pareto front of a search of several goals.

    None where no run has completed, or they were chosen by different metrics.
    """
    if (search := search_in(folder, runs)) is not None:
        return search.best(runs), search.front(runs) if len(search.goals) > 1 else []
    ranked = by_objective(run for run in runs if run.status == COMPLETED)
    same = len({run.objective for run in ranked}) == 1
    return ranked[0] if same else None, []


def bad_trials(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return the trials that failed because of their values, if any other trial did not."""
    trials = [run for run in runs if "search" in run.record]
    if not any(run.status in (COMPLETED, PRUNED) for run in trials):
        return []
    failed = [run for run in trials if run.status == FAILED]
    return [run for run in failed if run.record.get("error_kind") in BAD_TRIALS]


def conclude_search(
    console: Console, folder: Path, runs: Sequence[FoundRun], again: Callable[[FoundRun], str]
) -> None:
    """Print the best run of a search and the command for it, and the Pareto front of several goals.

    Print nothing for another sweep.
    """
    found = search_in(folder, runs)
    if found is None:
        return
    if found.limits:
        kept = sum(map(found.allowed, runs))
        within = " and ".join(limit.text for limit in found.limits)
        broken = [run.folder.name for run in runs if found.breaks_limits(run)]
        others = f"; not {listed(broken, NAMED)}" if broken else ""
        say(console, f"limits       {kept} of {len(runs)} runs keep {within}{others}")
    if len(found.goals) > 1:
        front = found.front(runs)
        of_all = f"{len(front)} of {len(runs)} runs, which no other beats in all goals"
        say(console, f"Pareto       {of_all}", "bold")
        if front:
            console.print(_table(front, found))
    best = found.best(runs)
    if best is None:
        say(console, "best         none yet: no run has measured all goals and kept all limits")
        return
    tag, value = found.goals[0].tag, found.values(best)[0]
    say(console, f"best         {best.folder.name}  {tag} {value:.4f}", "bold green")
    say(console, f"      to train it: {again(best)}")


def _table(front: Sequence[FoundRun], found: SearchRecord) -> Table:
    table = plain_table(("run", *(goal.tag for goal in found.goals)), left=["run"])
    for run in front:
        table.add_row(*cells(run.folder.name, *(f"{value:.6g}" for value in found.values(run))))
    return table


NEEDED, TOP = 10, 5
"""Completed runs without which importance is noise, and how many of the best PED-ANOVA takes."""
WIDE = 30
"""A range whose ends differ by this factor is one of logarithms."""


def study_of(
    folder: Path, runs: Sequence[FoundRun], file: Path | None = None
) -> tuple[optuna.Study, list[Goal]]:
    """Return the runs as a study of Optuna's, in memory or in its journal `file`, and the goals."""
    require("--optuna, --importance", "optuna", extra="search")
    import optuna
    from optuna.storages.journal import JournalFileBackend

    runs = sorted(runs, key=lambda run: (run.number, run.record.get("started", math.inf)))
    task = next((run.config["task"] for run in runs if run.record.get("objective")), None)
    grid = SearchRecord(goals_for([objective_of(runs)], task), [])
    search = search_in(folder, runs) or grid
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
            params={key: _in(axes[key], run.typed[key]) for key in own},
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


def _in(axis: optuna.distributions.BaseDistribution, value: Any) -> Any:
    return setting(value) if hasattr(axis, "choices") else value


def importance(folder: Path, runs: Sequence[FoundRun]) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each goal, by each of Optuna's evaluators, how much each setting mattered.

    Raises ConfigError where too few runs say so.
    """
    study, goals = study_of(folder, runs)
    from optuna import importance as of_optuna

    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    equal = " of equal settings" if done and not any(trial.params for trial in done) else ""
    if len(done) < NEEDED or equal:
        what = f"{len(done)} completed runs{equal}"
        raise ConfigError(f"--importance: {folder} has {what}; it takes {NEEDED} that differ")
    top, found = min(0.5, max(0.1, TOP / len(done))), dict[str, dict[str, dict[str, float]]]()
    by: dict[str, Any] = {"ped_anova": of_optuna.PedAnovaImportanceEvaluator(target_quantile=top)}
    if find_spec("sklearn"):
        by["fanova"] = of_optuna.FanovaImportanceEvaluator(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the target is to be low
        for name, goal in itertools.product(by, goals):
            cost = functools.partial(_cost, goals.index(goal), goal)
            try:
                weights = of_optuna.get_param_importances(study, evaluator=by[name], target=cost)
            except RuntimeError as error:  # all have the same value
                raise ConfigError(f"--importance: {goal.tag}: {error}") from None
            found.setdefault(goal.tag, {})[name] = weights
    return found


def _cost(place: int, goal: Goal, trial: optuna.trial.FrozenTrial) -> float:
    return goal.cost(trial.values[place])
