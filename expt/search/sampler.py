"""Choose the next trial: a pure function of the space, the settings and the trials so far.

Nothing is kept between two trials. Optuna's study is rebuilt from the history, and its sampler is
seeded by the number of the trial, so a search that was killed continues with the same trials.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.config.search import Search
from expt.errors import ConfigError, require
from expt.runs.result import COMPLETED, FAILED
from expt.search.space import Parameter, Space, Value, Values, as_key
from expt.search.trial import Goal, Trial, costs_of

if TYPE_CHECKING:
    import optuna

REDRAWS = 10
"""Draws of the sampler until a new point is taken at random."""
FURTHER_DRAWS = 200
"""Draws in all, of a space with too many points to list those that are left."""
POPULATION = 16
"""The default size of a generation of NSGA-II."""
STARTUP = 10
"""Trials that TPE draws at random first."""
RANDOM_FRACTION = {"tpe": 0.25}
"""The default share of a sampler's trials that are drawn at random.

TPE by itself may never leave the first good choice that it met (Falkner et al. 2018, "BOHB").
"""
PACKAGES = {"qmc": "scipy", "cmaes": "cmaes", "gp": "scipy"}
"""The packages that a sampler needs in addition to Optuna."""
GENERATION = "NSGAIISampler:generation"
"""The key under which Optuna's NSGA-II keeps a trial's generation."""


def check(name: str, space: Space, goals: Sequence[Goal], *, limited: bool) -> None:
    """Raise ConfigError where the sampler can't search this, or a package is not installed."""
    require(f"search={name}", "optuna", PACKAGES.get(name, "optuna"), extra="search")
    if name != "cmaes":
        return
    problems = [
        f"{each.name}: search=cmaes takes only numbers; give a range, or use search=tpe"
        for each in space.parameters
        if each.kind == "categorical" or each.when
    ]
    if len(goals) > 1:
        problems.append("objective: search=cmaes takes only one; use search=nsga2 or tpe")
    if limited:
        problems.append(
            "search.constraints: search=cmaes ignores them; use search=tpe, gp or nsga2"
        )
    if problems:
        raise ConfigError(problems)


class Known(NamedTuple):
    """The numbers by which a trial is chosen."""

    space: Space
    trials: Sequence[Trial]
    """The trials to learn from, in the order of their numbers."""
    number: int
    """The number of the trial that is chosen."""
    settings: Search
    goals: Sequence[Goal]
    tried: Sequence[Values] = ()
    """Values that are not suggested again."""


def suggest(known: Known) -> Values | None:
    """Return the values of a new trial, or None where the space has no further point."""
    tried = {as_key(values) for values in known.tried}
    settings, number = known.settings, known.number
    share = settings.random_fraction
    if share is None:
        share = RANDOM_FRACTION.get(settings.name, 0.0)
    is_random = int((number + 1) * share) > int(number * share)
    draw = _random if is_random else SAMPLERS[settings.name]
    for attempt in range(FURTHER_DRAWS):
        if attempt == REDRAWS:
            left = known.space.without(known.tried)
            if left is not None:
                return left[_seed(settings.seed, number) % len(left)] if left else None
            draw = _sobol if settings.name == "qmc" else _random
        values = draw(known, attempt)
        if as_key(values) not in tried:
            return values
    return None


def _seed(*parts: int) -> int:
    """Return 32 bits that differ for any other parts."""
    import numpy as np

    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _random(known: Known, attempt: int) -> Values:
    """Draw from the whole space."""
    return _optuna(
        known._replace(trials=(), settings=replace(known.settings, name="random")), attempt
    )


def _optuna(known: Known, attempt: int) -> Values:
    """Ask one of Optuna's samplers."""
    import optuna

    space, settings = known.space, known.settings
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental features
        is_dense = settings.name in ("gp", "nsga2")
        rated = list(_rated(known.trials, known.goals))
        num_bad = sum(each.is_bad for each in rated)
        study = optuna.create_study(
            directions=["maximize" if goal.highest else "minimize" for goal in known.goals],
            sampler=_sampler(known, num_bad, _seed(settings.seed, known.number, attempt)),
        )
        study.add_trials(_frozen(known, rated, is_dense=is_dense))
        trial = study.ask()
        found: Values = {}
        for label, parameter in zip(space.labels, space.parameters, strict=True):
            is_active = parameter.is_active(found)
            if is_active or is_dense:
                value = _asked(trial, label, parameter)
                if is_active:
                    found[parameter.name] = parameter.rounded(value)
    return found


def _asked(trial: optuna.Trial, name: str, parameter: Parameter) -> Value:
    of = _distribution(parameter)
    if parameter.kind == "categorical":
        return str(trial.suggest_categorical(name, of.choices))
    suggest = trial.suggest_int if parameter.kind == "int" else trial.suggest_float
    return suggest(name, of.low, of.high, step=of.step, log=of.log)


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high, log = parameter.low, parameter.high, parameter.log
    if parameter.kind == "categorical":
        return CategoricalDistribution(parameter.choices)
    if parameter.kind == "int":
        return IntDistribution(int(low), int(high), log, int(parameter.step or 1))
    return FloatDistribution(low, high, log, parameter.step)


def _sampler(known: Known, num_bad: int, seed: int) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    settings = known.settings
    if settings.name == "tpe":
        startup = max(1, STARTUP - num_bad)  # Optuna counts no bad one, see `_frozen`
        some_lack_keys = any(parameter.when for parameter in known.space.parameters)
        return samplers.TPESampler(seed=seed, group=some_lack_keys, n_startup_trials=startup)
    if settings.name == "gp":
        return samplers.GPSampler(seed=seed)
    if settings.name == "nsga2":
        return samplers.NSGAIISampler(seed=seed, population_size=settings.population or POPULATION)
    return samplers.RandomSampler(seed=seed)


class _Rated(NamedTuple):
    """A trial as a sampler learns from it."""

    trial: Trial
    costs: list[float]
    """The cost by each goal; none while it runs."""
    is_bad: bool = False


def _rated(trials: Sequence[Trial], goals: Sequence[Goal]) -> Iterator[_Rated]:
    """Rate each trial, a bad one as the worst of all that was measured, also at rungs.

    Failures of the code or the machine, and runs of other sweeps that did not complete, are left
    out.
    """
    costs = [_costs(trial, goals) for trial in trials]
    measured = [each for each in costs if each and all(map(math.isfinite, each))]
    worst = [max(each) for each in zip(*measured, strict=True)]
    for trial, cost in zip(trials, costs, strict=True):
        if cost and not all(map(math.isfinite, cost)):
            if worst:
                yield _Rated(trial, worst, is_bad=True)
        elif cost or (trial.status != FAILED and trial.number is not None):
            yield _Rated(trial, cost)


def _costs(trial: Trial, goals: Sequence[Goal]) -> list[float]:
    """Return the cost by each goal: infinite for a bad trial, none where it is not known yet."""
    is_refused = trial.status == FAILED and trial.error_kind == ConfigError.__name__
    if trial.is_bad or is_refused:
        return [math.inf] * len(goals)
    if trial.status == COMPLETED:
        return costs_of(goals, trial.objectives)
    if trial.status != FAILED and trial.costs and len(goals) == 1:
        return [trial.costs[trial.epochs]]  # at its last rung
    return []


def _frozen(
    known: Known, rated: Sequence[_Rated], *, is_dense: bool
) -> Iterator[optuna.trial.FrozenTrial]:
    """Yield the history as Optuna has it.

    With `is_dense` each trial has all parameters, those that it lacks in the middle of their range.
    """
    import optuna
    from optuna.trial import TrialState

    space, goals, name = known.space, known.goals, known.settings.name
    named = dict(zip(space.labels, space.parameters, strict=True))
    distributions = {label: _distribution(parameter) for label, parameter in named.items()}
    middle = {label: parameter.at(0.5) for label, parameter in named.items()} if is_dense else {}
    completed, population = 0, known.settings.population or POPULATION
    for trial, costs, is_bad in rated:
        state = TrialState.COMPLETE if costs else TrialState.RUNNING
        attrs = {}
        if name == "tpe" and is_bad:  # TPE takes no running trial for a good one; the worst it may
            state = TrialState.RUNNING
        elif name == "tpe" and costs and trial.status != COMPLETED:
            state = TrialState.PRUNED
        if name == "nsga2" and state == TrialState.COMPLETE:
            attrs = {GENERATION: completed // population}
            completed += 1
        values = [goal.cost(cost) for goal, cost in zip(goals, costs, strict=bool(costs))]
        seen = {epoch: goals[0].cost(cost) for epoch, cost in trial.costs.items()}
        params = {**middle, **space.labelled(trial.values)}
        yield optuna.trial.create_trial(
            state=state,
            values=values if state == TrialState.COMPLETE else None,
            params=params,
            distributions={label: distributions[label] for label in params},
            intermediate_values=seen if state == TrialState.PRUNED else {},
            system_attrs=attrs,
            constraints=dict(trial.violations) if state != TrialState.RUNNING else None,
        )


def _sobol(known: Known, attempt: int) -> Values:
    """Return the point of that number in a scrambled Sobol sequence."""
    from scipy.stats import qmc

    space = known.space
    seed = _seed(known.settings.seed, attempt)
    engine = qmc.Sobol(len(space.parameters), scramble=True, rng=seed)
    if known.number:
        engine.fast_forward(known.number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one point is not a power of two
        shares = engine.random(1)[0]
    pairs = zip(space.parameters, shares, strict=True)
    return space.point(parameter.at(float(share)) for parameter, share in pairs)


def _cmaes(known: Known, attempt: int) -> Values:
    """Return a point of the generation after those that are complete, which it learns in order."""
    import cmaes
    import numpy as np

    parameters, settings = known.space.parameters, known.settings
    known_points = [
        (np.array([each.share(trial.values[each.name]) for each in parameters]), costs[0])
        for trial, costs, _ in _rated(known.trials, known.goals)
        if costs and trial.number is not None
    ]
    size = len(parameters)
    optimizer = cmaes.CMA(
        mean=np.full(size, 0.5),
        sigma=1 / 6,
        bounds=np.array([[0.0, 1.0]] * size),
        n_max_resampling=10 * size,
        population_size=settings.population,
        seed=_seed(settings.seed, known.number, attempt),
    )
    generation = optimizer.population_size
    for start in range(0, len(known_points) - generation + 1, generation):
        optimizer.tell(known_points[start : start + generation])
    shares = [min(float(share), 1 - 1e-9) for share in optimizer.ask()]
    return {each.name: each.at(share) for each, share in zip(parameters, shares, strict=True)}


SAMPLERS: dict[str, Callable[[Known, int], Values]] = {
    **dict.fromkeys(("random", "tpe", "gp", "nsga2"), _optuna),
    "qmc": _sobol,
    "cmaes": _cmaes,
}
