"""Who chooses the next point: a pure function of the space, the settings, and what is known so far.

Nothing is kept between two points. Optuna's study is made anew from the history, and its sampler
seeded by the number of the point; so a search that was killed, and one whose space was edited, go
on as if nothing had happened."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from expt.config.search import Search
from expt.errors import ConfigError
from expt.search.goals import Goal
from expt.search.history import Point
from expt.search.rated import Rated, rated
from expt.search.space import Parameter, Space, Value, Values, as_key

if TYPE_CHECKING:
    import optuna

REDRAWS = 10
"""How often a point that is known already is drawn again, before one is taken from what is left of
a small space.
"""
POPULATION = 16
"""Of a generation of NSGA-II, where nothing else is said."""
STARTUP = 10
"""Points that TPE draws at random first."""
RANDOM_FRACTION = {"tpe": 0.25}
"""Of each sampler's points, where nothing else is said."""
LEAST_OTHERS = 10
"""Runs of others that CMA-ES takes its start from: it goes by their best tenth."""
FURTHER_DRAWS = 200
"""Of a point that is still known, in a space with too many points to name what is left."""
PACKAGES = {"random": ["optuna"], "qmc": ["scipy"], "cmaes": ["cmaes"], "pbt": []}
"""What each sampler needs; all others need Optuna, and `gp` scipy too."""


def refuse_missing(name: str) -> None:
    """Raise ConfigError where a package of the sampler is not installed."""
    from importlib.util import find_spec

    for package in [
        "numpy",
        *PACKAGES.get(name, ["optuna", "scipy"] if name == "gp" else ["optuna"]),
    ]:
        if find_spec(package) is None:
            raise ConfigError(
                f"search={name}: needs the package {package}; pip install 'expt[search]'"
            )


def refuse_unfit(name: str, space: Space, goals: Sequence[Goal], *, limited: bool) -> None:
    """Raise ConfigError where the sampler cannot do what is asked for."""
    problems = []
    if name == "cmaes":
        words = [each.name for each in space.parameters if each.kind == "categorical"]
        problems += [f"{key}: search=cmaes moves numbers alone; give an interval or a range, or use search=tpe"
                     for key in words]  # fmt: skip
    if name in ("cmaes",) and len(goals) > 1:
        problems.append(
            f"objective: search={name} has one goal alone; use search=nsga2 or tpe for {len(goals)}"
        )
    if name in ("cmaes",) and limited:
        problems.append(
            f"search.constraints: search={name} does not heed them; use search=tpe, gp or nsga2"
        )
    if problems:
        raise ConfigError(problems)


def suggest(
    space: Space,
    points: Sequence[Point],
    number: int,
    settings: Search,
    goals: Sequence[Goal],
    later: Sequence[Point] = (),
) -> Values | None:
    """The point of that number, one that is not among the known ones; None where the space has no
    further one.

    `points` are in the order of their numbers. From `later` ones nothing is learnt: the point once
    came before them."""
    tried = [point for point in (*points, *later) if not point.is_of_others]
    known = {as_key(point.values) for point in tried}
    if _is_random(number, settings):
        settings = replace(settings, name="random")
    draw = _SAMPLERS.get(settings.name, _ask_optuna)
    for attempt in range(REDRAWS):
        values = draw(space, points, number, attempt, settings, goals)
        if as_key(values) not in known:
            return values
    left = space.without([point.values for point in tried])
    if left is None:
        return _further(space, number, settings, goals, known) or values
    return left[_seed(settings.seed, number) % len(left)] if left else None


def _further(
    space: Space, number: int, settings: Search, goals: Sequence[Goal], known: Collection[Hashable]
) -> Values | None:
    """A new point of a space with few choices of which most are known, whatever has come of those:
    at random.
    """
    draw = _SAMPLERS.get(settings.name, _ask_optuna)
    settings = settings if settings.name in _SAMPLERS else replace(settings, name="random")
    for attempt in range(REDRAWS, FURTHER_DRAWS):
        values = draw(space, (), number, attempt, settings, goals)
        if as_key(values) not in known:
            return values
    return None


def _is_random(number: int, settings: Search) -> bool:
    """Whether the point of that number is drawn at random: a share of them is, evenly spread.

    TPE by itself may never leave the first good choice that it met (Falkner et al. 2018, "BOHB").
    """
    share = (
        RANDOM_FRACTION.get(settings.name, 0.0)
        if settings.random_fraction is None
        else settings.random_fraction
    )
    return int((number + 1) * share) > int(number * share)


def _seed(*parts: int) -> int:
    """Of 32 bits; another for any other parts."""
    import numpy as np

    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _ask_optuna(
    space: Space,
    points: Sequence[Point],
    number: int,
    attempt: int,
    settings: Search,
    goals: Sequence[Goal],
) -> Values:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is new in Optuna
        padded = settings.name in ("gp", "nsga2")
        known = list(rated(points, goals))
        num_bad = sum(each.is_bad for each in known)
        sampler = _sampler(settings, space, _seed(settings.seed, number, attempt), num_bad)
        study = optuna.create_study(
            directions=["maximize" if goal.highest else "minimize" for goal in goals],
            sampler=sampler,
        )
        if settings.name != "random":
            study.add_trials(_trials(space, known, settings, goals, padded=padded))
        trial = study.ask()
        found: Values = {}
        for label, parameter in zip(space.labels, space.parameters, strict=True):
            is_active = parameter.is_active(found)
            value = _asked(trial, label, parameter) if padded or is_active else None
            if value is not None and is_active:
                found[parameter.name] = parameter.rounded(value)
    return found


def _asked(trial: optuna.Trial, name: str, parameter: Parameter) -> Value:
    low, high, log = parameter.low, parameter.high, parameter.log
    if parameter.kind == "categorical":
        return str(trial.suggest_categorical(name, parameter.choices))
    if parameter.kind == "int":
        return trial.suggest_int(name, int(low), int(high), step=int(parameter.step or 1), log=log)
    return trial.suggest_float(name, low, high, step=parameter.step, log=log)


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high, log = parameter.low, parameter.high, parameter.log
    if parameter.kind == "categorical":
        return CategoricalDistribution(parameter.choices)
    if parameter.kind == "int":
        return IntDistribution(int(low), int(high), log=log, step=int(parameter.step or 1))
    return FloatDistribution(low, high, log=log, step=parameter.step)


def _sampler(
    settings: Search, space: Space, seed: int, num_bad: int
) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    if settings.name == "tpe":
        startup = max(
            1, STARTUP - num_bad
        )  # the bad ones are known too, and Optuna counts none that runs
        return samplers.TPESampler(
            seed=seed, group=space.is_conditional, n_startup_trials=startup, constant_liar=True
        )
    if settings.name == "gp":
        return samplers.GPSampler(seed=seed)
    if settings.name == "nsga2":
        return samplers.NSGAIISampler(seed=seed, population_size=settings.population or POPULATION)
    return samplers.RandomSampler(seed=seed)


def _trials(
    space: Space, known: Sequence[Rated], settings: Search, goals: Sequence[Goal], *, padded: bool
) -> Iterator[optuna.trial.FrozenTrial]:
    """The history as Optuna has it.

    With `padded` each has all parameters, those that it lacks in their middle.
    """
    import optuna
    from optuna.trial import TrialState

    named = dict(
        zip(space.labels, space.parameters, strict=True)
    )  # one distribution for each name, as Optuna wants
    distributions = {label: _distribution(parameter) for label, parameter in named.items()}
    middle = {label: parameter.at(0.5) for label, parameter in named.items()}
    completed = 0
    for point, costs, is_of_rung, is_bad in known:
        values = (
            {**middle, **space.labelled(point.values)} if padded else space.labelled(point.values)
        )
        state, result, seen = TrialState.RUNNING, None, {}
        if is_bad and settings.name == "tpe":
            # TPE never takes a trial that runs for a good one, and the worst of few it may
            costs = None
        if costs is not None:
            state, result = (
                TrialState.COMPLETE,
                [-c if goal.highest else c for c, goal in zip(costs, goals, strict=True)],
            )
            if is_of_rung and settings.name == "tpe":
                state, result, seen = TrialState.PRUNED, None, dict(point.rung_values)
        attrs = {}
        if settings.name == "nsga2" and state == TrialState.COMPLETE:
            attrs = {_GENERATION: completed // (settings.population or POPULATION)}
            completed += 1
        yield optuna.trial.create_trial(
            state=state,
            values=result,
            params=values,
            distributions={name: distributions[name] for name in values},
            intermediate_values=seen,
            system_attrs=attrs,
            constraints=dict(point.violations) if costs is not None else None,
        )


_GENERATION = "NSGAIISampler:generation"
"""Under which Optuna's sampler keeps a trial's generation."""


def _sobol(
    space: Space,
    points: Sequence[Point],
    number: int,
    attempt: int,
    settings: Search,
    goals: Sequence[Goal],
) -> Values:
    """The point of that number in a scrambled Sobol sequence, whatever has come of the others."""
    from scipy.stats import qmc

    engine = qmc.Sobol(len(space.parameters), scramble=True, rng=_seed(settings.seed, attempt))
    if number:
        engine.fast_forward(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one point is no power of two; it is one of a sequence
        shares = engine.random(1)[0]
    return space.point(
        [p.at(float(share)) for p, share in zip(space.parameters, shares, strict=True)]
    )


def _cmaes(
    space: Space,
    points: Sequence[Point],
    number: int,
    attempt: int,
    settings: Search,
    goals: Sequence[Goal],
) -> Values:
    """Of the generation that comes after those that are complete: all of them are told again, in
    order.

    Runs that this search has not made give the first mean and covariance (Nomura et al. 2021).
    """
    import cmaes
    import numpy as np

    def told(point: Point, costs: Sequence[float]) -> tuple[Any, float]:
        return np.array([p.share(point.values[p.name]) for p in space.parameters]), costs[0]

    known = [(each.point, each.costs) for each in rated(points, goals) if each.costs is not None]
    own = [told(*each) for each in known if each[0].number is not None]
    others = [told(*each) for each in known if each[0].number is None]
    size = len(space.parameters)
    mean, sigma, covariance = np.full(size, 0.5), 1 / 6, None
    if len(others) >= max(2 * size + 1, LEAST_OTHERS):
        mean, sigma, covariance = cmaes.get_warm_start_mgd(others)
    optimizer = cmaes.CMA(
        mean=np.clip(mean, 0.0, 1.0),
        sigma=max(sigma, 1e-6),
        cov=covariance,
        bounds=np.array([[0.0, 1.0]] * size),
        n_max_resampling=10 * size,
        population_size=settings.population,
        seed=_seed(settings.seed, number, attempt),
    )
    for start in range(0, len(own) - optimizer.population_size + 1, optimizer.population_size):
        optimizer.tell(own[start : start + optimizer.population_size])
    return {
        p.name: p.at(min(float(share), 1 - 1e-9))
        for p, share in zip(space.parameters, optimizer.ask(), strict=True)
    }


Draw: TypeAlias = Callable[[Space, Sequence[Point], int, int, Search, Sequence[Goal]], Values]
_SAMPLERS: dict[str, Draw] = {"qmc": _sobol, "cmaes": _cmaes}
