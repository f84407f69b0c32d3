"""The samplers: the next trial follows from the history, and beats random ones."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expt.config.search import Search, parse_search
from expt.errors import ConfigError, Diverged, OutOfMemory
from expt.runs.found import FoundRun
from expt.runs.result import COMPLETED, FAILED, PRUNED, RUNNING
from expt.search.sampler import Known, check
from expt.search.sampler import suggest as suggested
from expt.search.space import Parameter, Space, Values, as_key
from expt.search.trial import Goal, Limit, Trial
from tests.facade import Patch

LR = Parameter("lr", "float", 1e-4, 1.0, log=True)
WIDTH = Parameter("width", "int", 8, 64)
MODEL = Parameter("model", "categorical", choices=("mlp", "convnet"), meant=("mlp", "convnet"))
POOL = Parameter("pool", "int", 1, 4, when=("model", "convnet"))
NUMBERS, MIXED, CONDITIONAL = (
    Space((LR, WIDTH)),
    Space((LR, WIDTH, MODEL)),
    Space((LR, MODEL, POOL)),
)
ACCURACY, SPEED = Goal("accuracy/val", highest=True), Goal("speed/epoch_s", highest=False)
SAMPLERS = ("random", "tpe", "gp", "cmaes", "qmc", "nsga2")


def settings(name: str, **more: object) -> Search:
    return parse_search({"name": name, **more})


def suggest(
    space: Space, trials: Sequence[Trial], number: int, settings: Search, goals: Sequence[Goal]
) -> Values | None:
    tried = [trial.values for trial in trials]
    return suggested(Known(space, trials, number, settings, goals, tried))


def quality(values: Values) -> float:
    """Best at lr=0.01 and width=48, and of a convnet with pool=2."""
    lr, width = float(values.get("lr", 0.01)), float(values.get("width", 48))
    model = values.get("model", "convnet")
    pool = abs(float(values.get("pool", 2)) - 2)
    return -((math.log10(lr) + 2) ** 2) - ((width - 48) / 40) ** 2 - (model != "convnet") - pool / 2


def completed(number: int, values: Values, *objectives: float) -> Trial:
    return Trial(values=values, status=COMPLETED, number=number, objectives=objectives)


def searched(
    name: str, space: Space, runs: int, goals: Sequence[Goal] = (ACCURACY,), **more: object
) -> list[Trial]:
    points = list[Trial]()
    for number in range(runs):
        values = suggest(space, points, number, settings(name, **more), goals)
        assert values is not None
        found = (quality(values), float(values.get("width", 1)))
        points.append(completed(number, values, *found[: len(goals)]))
    return points


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) if each == "gp" else each for each in SAMPLERS],
)
def test_a_point_follows_from_the_history_alone(name: str) -> None:
    """Resume a killed search from its run folders with the same trials."""
    space = NUMBERS if name == "cmaes" else CONDITIONAL
    more: dict[str, Any] = {"population": 4} if name in ("cmaes", "nsga2") else {}
    points = searched(name, space, 11, seed=3, **more)  # what learns does so from the 11th on
    assert len({tuple(point.values.items()) for point in points}) == 11
    for number in (0, 1, 5, 10):
        again = suggest(space, points[:number], number, settings(name, seed=3, **more), [ACCURACY])
        assert again == points[number].values
    assert suggest(space, points[:5], 5, settings(name, seed=4), [ACCURACY]) != points[5].values
    for point in points:
        assert ("pool" in point.values) == (point.values.get("model") == "convnet")
        assert all(
            each.read(point.values[each.name]) is not None
            for each in space.parameters
            if each.name in point.values
        )


def ranged(ranges: dict[str, tuple[float, float]]) -> Space:
    """A model, and one key whose range depends on it."""
    below = [
        Parameter("lr", "float", *ends, log=True, when=("model", each))
        for each, ends in ranges.items()
    ]
    return Space((MODEL, *below))


@pytest.mark.parametrize("name", ["tpe", "qmc", "nsga2"])
def test_each_choice_has_a_range_of_its_own_of_one_key(name: str) -> None:
    ranges = {"mlp": (1e-4, 1e-2), "convnet": (1e-1, 1.0)}
    points = searched(name, ranged(ranges), 13)
    assert {point.values["model"] for point in points} == {*ranges}
    for point in points:
        low, high = ranges[str(point.values["model"])]
        assert low <= float(point.values["lr"]) <= high


def test_what_a_range_has_taught_counts_below_its_choice() -> None:
    space, means = ranged(dict.fromkeys(("mlp", "convnet"), (1e-4, 1.0))), []
    for sign in (1, -1):
        known = [
            completed(step, {"model": "mlp", "lr": 10 ** (-step / 4)}, sign * step)
            for step in range(16)
        ]
        only_tpe = settings("tpe", random_fraction=0.0)
        asked = [suggest(space, known, number, only_tpe, [ACCURACY]) for number in range(16, 32)]
        of_mlps = [float(each["lr"]) for each in asked if each and each["model"] == "mlp"]
        means.append(statistics.fmean(map(math.log10, of_mlps)))
    assert means[0] < means[1] - 1, "low where low ones were good, high where high ones were"


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "cmaes"])
def test_it_learns(name: str) -> None:
    def best_of(name: str, seed: int) -> float:
        return max(p.objectives[0] or 0 for p in searched(name, NUMBERS, 30, seed=seed))

    by_chance, learnt = (
        statistics.fmean(best_of(each, seed) for seed in range(3)) for each in ("random", name)
    )
    assert learnt > by_chance


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [11, 15, 19]),
        ({"random_fraction": 0}, []),
        ({"random_fraction": 0.5}, [11, 13, 15, 17, 19]),
    ],
)
def test_tpe_draws_a_share_at_random(more: dict[str, Any], expected: list[int]) -> None:
    points = searched("tpe", MIXED, 20, **more)
    by_chance = searched("random", MIXED, 20)
    same = [
        p.number for p, other in zip(points, by_chance, strict=True) if p.values == other.values
    ]
    assert [number for number in same if number is not None and number >= 10] == expected, "random"


def test_a_generation_of_nsga2_follows_the_best_of_the_one_before() -> None:
    points = searched("nsga2", NUMBERS, 48, (ACCURACY, SPEED), population=8)
    early, late = ([quality(point.values) for point in part] for part in (points[:8], points[-8:]))
    assert statistics.median(late) > statistics.median(early)


def test_qmc_covers_the_space_evenly_whatever_has_come_of_its_points() -> None:
    points = searched("qmc", NUMBERS, 16)
    shares = sorted(LR.share(point.values["lr"]) for point in points)
    assert all(index / 16 <= share <= (index + 1) / 16 for index, share in enumerate(shares))
    assert suggest(NUMBERS, [], 9, settings("qmc"), [ACCURACY]) == points[9].values


def test_what_runs_what_is_paused_and_what_is_bad_informs_it() -> None:
    """Rank diverged runs last, pruned ones by their last rung, and avoid running ones."""
    points = searched("tpe", NUMBERS, 12)
    low = [p for p in points if float(p.values["lr"]) < 0.01]
    assert low

    def low_ones(**end: Any) -> list[Trial]:
        return [replace(p, objectives=(), **end) if p in low else p for p in points]

    def chosen(known: Sequence[Trial], name: str = "tpe") -> Values | None:
        return suggest(NUMBERS, known, 12, settings(name), [ACCURACY])

    bad = low_ones(status=FAILED, error_kind=OutOfMemory.__name__)
    pruned = low_ones(status=PRUNED, costs={1: 9.0})
    found = [chosen(known) for known in (points, bad, pruned, low_ones(status=RUNNING))]
    assert len({str(each) for each in found}) > 1
    assert chosen(low_ones(status=FAILED)) == chosen([p for p in points if p not in low])
    for known, name in ((bad, "cmaes"), (pruned, "cmaes"), (pruned, "nsga2")):
        assert chosen(known, name)


@pytest.mark.parametrize("name", ["tpe", "cmaes", pytest.param("gp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("measured", [True, False])
def test_a_rungs_value_that_is_no_number_is_the_worst(name: str, measured: bool) -> None:
    """As that of a run which has diverged, wherever it stands among the others."""
    points = searched("random", NUMBERS, 12)
    if not measured:
        points = [
            replace(p, status=PRUNED, objectives=(), costs={1: -float(p.objectives[0] or 0)})
            for p in points
        ]
    more: dict[str, Any] = {"population": 4} if name == "cmaes" else {}
    diverged: dict[str, Any] = {"status": FAILED, "error_kind": Diverged.__name__}
    bad = diverged, {"costs": {1: math.nan}}, {"costs": {1: -1.0, 2: math.inf}}
    found = []
    for how in bad:
        changed = {"status": PRUNED, "objectives": (), **how}
        known = [replace(point, **changed) if point.number in (0, 5) else point for point in points]
        found.append(suggest(NUMBERS, known, 12, settings(name, **more), [ACCURACY]))
    assert found[0]
    assert found == [found[0]] * 3


def test_constraints_keep_it_from_where_they_were_exceeded() -> None:
    """Wide runs exceed the limit: of twelve further points most are narrow."""

    def limited(point: Trial) -> Trial:
        exceeded = {"memory": float(point.values["width"]) - 24}
        return replace(point, violations=exceeded)

    points = list(map(limited, searched("random", NUMBERS, 20)))
    widths = []
    for number in range(20, 32):
        values = suggest(NUMBERS, points, number, settings("tpe"), [ACCURACY])
        assert values is not None
        widths.append(float(values["width"]))
        points.append(limited(completed(number, values, quality(values))))
    assert sum(width <= 24 for width in widths) >= 8


def test_a_small_space_is_tried_to_its_end_and_no_point_twice() -> None:
    space = Space((MODEL, Parameter("width", "int", 8, 24, step=8)))
    points = searched("tpe", space, 6)
    assert len({tuple(point.values.items()) for point in points}) == 6
    assert suggest(space, points, 6, settings("tpe"), [ACCURACY]) is None


@pytest.mark.parametrize("name", ["random", "qmc", "tpe"])
def test_where_most_choices_are_known_the_next_point_is_of_those_that_have_more(name: str) -> None:
    """Find trials where eight of nine choices are one point each and the ninth has many."""
    choices = tuple("abcdefghi")
    model = Parameter("model", "categorical", choices=choices, meant=choices)
    space = Space((model, Parameter("model.dropout", "float", 0.0, 0.5, when=("model", "i"))))
    found = searched(name, space, 24)
    assert len({as_key(point.values) for point in found}) == 24


def test_a_search_that_a_sampler_cannot_do_is_refused(monkeypatch: Patch) -> None:
    for space, goals, limited, key in (
        (MIXED, [ACCURACY], False, "model"),
        (NUMBERS, [ACCURACY, SPEED], False, "objective"),
        (NUMBERS, [ACCURACY], True, "search.constraints"),
    ):
        with pytest.raises(ConfigError, match=f"^{key}: search=cmaes"):
            check("cmaes", space, goals, limited=limited)
    for name in set(SAMPLERS) - {"cmaes"}:
        check(name, MIXED, [ACCURACY, SPEED], limited=True)
    monkeypatch.setattr("expt.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^search=tpe: .*pip install 'expt\[search\]'"):
        check("tpe", NUMBERS, [ACCURACY], limited=False)


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_unmeasured_limit_is_exceeded_for_samplers(name: str, measured: float) -> None:
    limit = Limit("mine/x<3", "mine/x", True, 3.0, True)
    points = list[Trial]()
    for point in searched("random", NUMBERS, 12):
        value = measured if (point.number or 0) % 2 else 1.0
        run = FoundRun(Path("nowhere"), {"metrics": {"mine/x": value}})
        points.append(replace(point, violations={limit.text: limit.violation(run)}))
    assert [point.is_allowed for point in points] == [True, False] * 6
    assert suggest(NUMBERS, points, 12, settings(name), [ACCURACY]) is not None
