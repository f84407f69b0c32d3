"""The runs of a search or a grid as a study of Optuna's, and how much each setting mattered."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from expt.config.identity import REPEATED
from expt.errors import ConfigError, require
from expt.runs.found import FoundRun
from expt.runs.result import COMPLETED, PRUNED, RUNNING
from expt.runs.view.settings import objective_name
from expt.runs.view.text import cells, plain_table, setting
from expt.search.conclusion import SearchRecord, search_in
from expt.search.space import Space
from expt.search.trial import Goal, Reader, goals_for

if TYPE_CHECKING:
    import optuna

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
    grid = SearchRecord(goals_for([objective_name(runs)], task), [])
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
        table = plain_table((f"importance for {tag}", *by), left=[f"importance for {tag}"])
        for key in next(iter(by.values())):
            table.add_row(*cells(key, *(f"{each.get(key, 0.0):.3f}" for each in by.values())))
        yield table
