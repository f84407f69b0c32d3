"""What a sampler takes each point for: no bad one for a good one, whatever else is known."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers._tpe.sampler import _split_trials, default_gamma
from optuna.trial import TrialState

from expt.config.search import parse_search
from expt.errors import ConfigError, Diverged, OutOfMemory
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PAUSED, RUNNING, create_result
from expt.search.folder import of_another, read
from expt.search.goals import Goal
from expt.search.history import Point, Reader
from expt.search.rated import rated
from expt.search.sampler import _trials, suggest
from expt.search.space import Parameter, Space

SPACE = Space((Parameter("lr", "float", 1e-4, 1e4, log=True),))
GOALS = [Goal("accuracy/val", highest=True)], [Goal("loss/val", highest=False)]
BAD: list[dict[str, Any]] = [
    {"status": FAILED, "kind_of_error": Diverged.__name__},
    {"status": FAILED, "kind_of_error": OutOfMemory.__name__, "rung_values": {1: 0.5, 2: 0.5}},
    {"status": FAILED, "kind_of_error": ConfigError.__name__},
    {"status": PAUSED, "rung_values": {1: 0.5, 3: math.nan}},
    {"status": COMPLETED, "objectives": (math.nan,)},
]


def point(number: int, lr: float, **more: Any) -> Point:
    return Point(values={"lr": lr}, number=number, **more)


def at_rungs(goal: Goal, num_bad: int, num_paused: int, *, num_completed: int = 1) -> list[Point]:
    """The bad ones have the highest rates, and the best ones have completed."""
    found = [
        point(number, 10.0 ** (3 + number / 100), **BAD[number % len(BAD)])
        for number in range(num_bad)
    ]
    sign = 1 if goal.highest else -1
    for place in range(num_paused + num_completed):
        number, value = num_bad + place, sign * (5 + place / 100)
        lr = 10.0 ** (-3 + place / 100)
        if place < num_paused:
            rung_values = {1: value, 3: value} if place % 3 else {1: value}
            found.append(point(number, lr, status=PAUSED, rung_values=rung_values))
        else:
            more: Any = {
                "objectives": (value + sign,),
                "rung_values": {1: value, 3: value, 9: value + sign},
            }
            found.append(point(number, lr, status=COMPLETED, **more))
    return found


@pytest.mark.parametrize("goals", GOALS)
@pytest.mark.parametrize(
    ("num_bad", "num_paused", "num_completed"), [(5, 20, 1), (5, 20, 0), (25, 2, 1), (25, 0, 1)]
)
def test_tpe_takes_no_bad_point_for_a_good_one(
    goals: list[Goal], num_bad: int, num_paused: int, num_completed: int
) -> None:
    points = at_rungs(goals[0], num_bad, num_paused, num_completed=num_completed)
    study = optuna.create_study(direction="maximize" if goals[0].highest else "minimize")
    study.add_trials(
        _trials(
            SPACE, list(rated(points, goals)), parse_search({"name": "tpe"}), goals, padded=False
        )
    )
    assert len(study.trials) == len(points)
    measured = sum(trial.state != TrialState.RUNNING for trial in study.trials)
    for count in {default_gamma(measured), default_gamma(len(points))}:
        good, bad = _split_trials(study, study.trials, count)
        assert good
        assert max(trial.params["lr"] for trial in good) < 1
        assert sum(trial.params["lr"] > 1 for trial in bad) == num_bad, (
            "and it learns that they are bad"
        )


@pytest.mark.parametrize("goals", GOALS)
def test_a_bad_point_is_no_better_than_any_that_was_measured_also_at_a_rung(
    goals: list[Goal],
) -> None:
    """The samplers but TPE go by the costs."""
    found = [*rated(at_rungs(goals[0], 5, 20), goals)]
    costs = [each.costs[0] for each in found if each.costs and not each.is_bad]
    assert len(costs) == 21
    assert [each.costs for each in found if each.is_bad] == [[max(costs)]] * 5


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "cmaes"])
def test_it_keeps_away_from_where_points_were_bad(name: str) -> None:
    points = at_rungs(GOALS[0][0], 9, 5)
    settings = parse_search(
        {"name": name, "random_fraction": 0.0, **({"population": 5} if name == "cmaes" else {})}
    )
    drawn = [suggest(SPACE, points, number, settings, GOALS[0]) for number in range(20, 30)]
    rates = [float(values["lr"]) for values in drawn if values]
    assert sum(lr < 10 for lr in rates) >= 7, "of ten at random it would be six"
    assert name == "cmaes" or max(rates) < 100, (
        "nine bad points and six others are enough to begin with"
    )


@pytest.mark.parametrize("status", [RUNNING, INTERRUPTED])
def test_who_goes_on_from_a_rung_counts_as_before(status: str) -> None:
    """The best ones do: while they train on they would count as bad ones, as a point does that has
    come to nothing.
    """
    points = at_rungs(GOALS[0][0], 0, 20)
    going_on = [replace(each, status=status) if each.status == PAUSED else each for each in points]
    assert [each[1:] for each in rated(going_on, GOALS[0])] == [
        each[1:] for each in rated(points, GOALS[0])
    ]
    for number in (21, 22):
        found = [
            suggest(SPACE, each, number, parse_search({"name": "tpe"}), GOALS[0])
            for each in (points, going_on)
        ]
        assert found[0] == found[1]
    begun = point(21, 1.0, status=status)
    assert [*rated([begun], GOALS[0])] == [(begun, None, False, False)]


@pytest.mark.parametrize("status", [RUNNING, INTERRUPTED, "lost"])
def test_a_run_of_others_that_has_come_to_nothing_yet_is_left_out(status: str) -> None:
    own, other = point(0, 1.0, status=status), point(2, 1.0, status=status)
    other = replace(other, number=None)
    assert [each.point for each in rated([own, other], GOALS[0])] == [own]


@pytest.mark.parametrize("number", [None, 0])
def test_a_run_that_has_paused_informs_a_search_without_rungs_by_its_last_value(
    number: int | None, tmp_path: Path
) -> None:
    """Of another search, which had rungs, or of this one's folder."""
    about: Any = {"overrides": {"lr": 0.1}} | (
        {} if number is None else {"search": {"number": number}}
    )
    paths = RunPaths(tmp_path / "run")
    create_result(paths, status=PAUSED, **about)
    with contextlib.closing(MetricsWriter(paths)) as writer:
        for epoch, value in ((1, 0.5), (2, 0.75), (3, 0.7)):
            writer.write(epoch, epoch, {"accuracy/val": value})
    reader = Reader(space=SPACE, goals=GOALS[0])
    for points in (of_another(reader, tmp_path, ()), [*read(tmp_path, reader).points.values()]):
        assert [each[1:] for each in rated(points, GOALS[0])] == [([-0.7], True, False)]
