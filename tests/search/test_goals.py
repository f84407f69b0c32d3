"""What a search is for: tags, which way each is better, limits; and what it may spend."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from expt.command.search_conclusion import SearchRecord, bad_points, conclude_search
from expt.errors import ConfigError
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import SWEEP_RECORD, RunPaths
from expt.runs.result import COMPLETED, FAILED, PAUSED, FoundRecord, Record
from expt.runs.sweep import by_objective
from expt.search.budget import budget_of, in_words
from expt.search.goals import Goal, goals_of, limits_of, value_of
from expt.search.history import Point, Reader, best
from expt.search.space import Parameter, Space
from tests.conftest import Configured

NOWHERE = RunPaths(Path("no such run"))
RECORD: Record = {
    "objective": {"name": "accuracy/val", "value": 0.75},
    "metrics": {
        "accuracy/val": 0.5,
        "loss/val": 1.5,
        "memory/gpu_mib": 900.0,
        "speed/samples_per_s": 10.0,
    },
}


def test_a_goal_knows_which_way_is_better_and_what_a_run_has_come_to(
    configured: Configured,
) -> None:
    tags = ["accuracy/val", "loss/val", "speed/samples_per_s", "memory/gpu_mib", "loss/test"]
    goals = goals_of(tags, configured())
    assert [goal.highest for goal in goals] == [True, False, True, False, False]
    assert [goal.value(RECORD, NOWHERE) for goal in goals] == [
        0.75,
        1.5,
        10.0,
        900.0,
        None,
    ], "the best epoch's of its objective"
    assert goals[0].cost(0.75) < goals[0].cost(0.5)
    assert goals_of("auto", configured())[0].tag == "accuracy/val"


def test_the_best_of_equal_first_goals_is_one_that_no_other_beats() -> None:
    goals = [Goal("accuracy/val", highest=True), Goal("speed/samples_per_s", highest=True)]
    reached = [(0.75, 10.0), (0.75, 30.0), (0.5, 99.0), (0.75, math.inf)]
    points = [
        Point(values={}, status=COMPLETED, number=n, objectives=each)
        for n, each in enumerate(reached)
    ]
    found = best(points, goals)
    assert found is not None
    assert found.number == 1
    runs: list[FoundRecord] = [
        {
            "folder": Path(str(n)),
            "status": COMPLETED,
            "metrics": dict(zip((g.tag for g in goals), each, strict=True)),
        }
        for n, each in enumerate(reached)
    ]
    alike = [
        *reversed(points),
        Point(values={}, status=COMPLETED, number=4, objectives=(0.75, 30.0)),
    ]
    assert best(alike[::-1], goals) == found, (
        "of alike ones the first point, in whatever order they come"
    )
    record = SearchRecord(goals, [])
    assert record.best(runs) == runs[1]
    assert record.front(runs) == [runs[1], runs[2]], "of which it is the first"


def test_a_limit_is_exceeded_by_a_number_and_by_having_no_memory(configured: Configured) -> None:
    upper, lower = limits_of(["memory/gpu_mib<800", "speed/samples_per_s >= 20"], configured())
    assert (upper.violation(RECORD, NOWHERE), lower.violation(RECORD, NOWHERE)) == (100.0, 10.0)
    assert upper.violation({"metrics": {"memory/gpu_mib": 700.0}}, NOWHERE) < 0
    assert upper.violation({}, NOWHERE, had_no_memory=True) > 0
    assert upper.violation({"metrics": {}}, NOWHERE) == 0, "what was not measured"


def test_limits_and_goals_are_those_of_the_epoch_that_is_kept(
    tmp_path: Path, configured: Configured
) -> None:
    paths, space = RunPaths(tmp_path), Space((Parameter("seed", "int", 0, 9),))
    with contextlib.closing(MetricsWriter(paths)) as writer:
        for epoch, (accuracy, loss, mib) in enumerate(
            [(0.5, 2.0, 7.0), (0.875, 0.5, 8.0), (0.75, 1.5, 9.0)], start=1
        ):
            writer.write(
                epoch, epoch, {"accuracy/val": accuracy, "loss/val": loss, "memory/worker_mib": mib}
            )
        writer.write(3, 3, {"loss/test": 0.25})
    record: FoundRecord = {
        "folder": tmp_path,
        "status": COMPLETED,
        "overrides": {"seed": 3},
        "objective": {"name": "accuracy/val", "value": 0.875},
        "best": {"metric": "accuracy/val", "value": 0.875, "epoch": 2},
        "metrics": {
            "accuracy/val": 0.75,
            "loss/val": 1.5,
            "memory/worker_mib": 9.0,
            "loss/test": 0.25,
        },
    }
    texts = ["accuracy/val>0.8", "loss/val<1", "memory/worker_mib<8.5", "loss/test<0.3"]
    limits, goals = (
        limits_of(texts, configured()),
        goals_of(["accuracy/val", "loss/val"], configured()),
    )
    point = Reader(space=space, goals=goals, limits=limits).point(paths, record)
    assert point is not None
    assert point.objectives == (0.875, 0.5)
    assert [each for each in texts if point.violations[each] > 0] == ["memory/worker_mib<8.5"], (
        "of the whole run"
    )
    kept = [limit for limit in limits if limit.text != "memory/worker_mib<8.5"]
    assert SearchRecord(goals, kept).allowed(record)
    assert SearchRecord(goals, limits).breaks_limits(record)


def test_memory_and_speed_are_of_all_epochs_that_the_run_itself_has_trained(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    last = {
        "speed/samples_per_s": 400.0,
        "speed/epoch_s": 1.0,
        "memory/gpu_mib": 7.0,
        "skipped_steps": 3.0,
    }
    of_each = [
        (1, 999.0, 9.0, 99.0),
        (2, 100.0, 4.0, 9.0),
        (3, 150.0, 2.0, 8.0),
        (4, 400.0, 1.0, 7.0),
    ]
    with contextlib.closing(MetricsWriter(paths)) as writer:
        for epoch, *values in of_each:  # the first is that of the run that it is a fork of
            writer.write(
                10 * epoch,
                epoch,
                {**dict(zip(last, values, strict=False)), "skipped_steps": epoch - 1.0},
            )
    record: Record = {"metrics": last, "best": {"metric": "accuracy/val", "value": 0.5, "epoch": 2}}
    fork: Any = {**record, "forked_from": {"step": 10}}
    assert [value_of(tag, fork, paths) for tag in last] == [
        pytest.approx(1100 / 7),
        pytest.approx(7 / 3),
        9.0,
        3.0,
    ]
    assert value_of("memory/gpu_mib", record, paths) == 99.0
    assert [value_of(tag, record, NOWHERE) for tag in last] == [*last.values()]


def test_the_limits_of_a_report_name_runs_that_exceed_them(tmp_path: Path) -> None:
    objective = {"name": "accuracy/val", "value": 0.5}
    runs: list[Any] = [
        {"folder": tmp_path / f"run{n}", "status": COMPLETED, "objective": objective, "search": {"number": n},
         "metrics": {"speed/epoch_s": float(n)}} for n in range(7)
    ]  # fmt: skip
    record = {"objective": "accuracy/val", "search": {"constraints": ["speed/epoch_s<2"]}}
    (tmp_path / SWEEP_RECORD).write_text(json.dumps(record))
    console = Console(file=io.StringIO(), width=200)
    conclude_search(console, tmp_path, runs[::-1], lambda _: "again")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "limits       2 of 7 runs keep speed/epoch_s<2; not run6, run5, run4, ..." in said
    assert "best         run0  accuracy/val 0.5000" in said, "of equal ones the first point"
    assert by_objective((run["folder"].name, run) for run in reversed(runs))[0] == "run0"
    none = {
        "objective": ["accuracy/val", "speed/epoch_s"],
        "search": {"constraints": ["speed/epoch_s<0"]},
    }
    (tmp_path / SWEEP_RECORD).write_text(json.dumps(none))
    console = Console(file=io.StringIO(), width=200)
    conclude_search(console, tmp_path, runs, lambda _: "again")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines] == [
        "limits",
        "Pareto",
        "best",
    ], "no table without a row"


@pytest.mark.parametrize(
    ("text", "is_kept"), [("<", False), (">", False), ("<=", True), (">=", True)]
)
@pytest.mark.parametrize("bound", [0.5, 0.0])
def test_the_bound_itself_exceeds_a_strict_limit_and_nan_any(
    text: str, is_kept: bool, bound: float, configured: Configured
) -> None:
    (limit,) = limits_of([f"loss/val{text}{bound}"], configured())
    assert (limit.violation({"metrics": {"loss/val": bound}}, NOWHERE) <= 0) is is_kept
    assert limit.violation({"metrics": {"loss/val": math.nan}}, NOWHERE) > 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("memry/gpu_mib<3", "no run has a tag memry/gpu_mib. Did you mean 'memory/gpu_mib'?"),
        ("memory/gpu_mib", "write TAG<NUMBER or TAG>NUMBER, as in 'memory/gpu_mib<20000'"),
        ("memory/gpu_mib<nan", "write TAG<NUMBER or TAG>NUMBER, as in 'memory/gpu_mib<20000'"),
        ("memory/gpu_mib<lots", "write TAG<NUMBER or TAG>NUMBER, as in 'memory/gpu_mib<20000'"),
    ],
)
def test_a_wrong_limit_is_told(configured: Configured, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        limits_of([text], configured())
    assert str(raised.value) == f"search.constraints={text}: {problem}"


def test_a_wrong_goal_is_told_but_own_code_may_log_any_tag(configured: Configured) -> None:
    with pytest.raises(
        ConfigError,
        match=r"objective=\[loss/val,acuracy/val\]: no run has a tag acuracy/val\. Did you",
    ):
        goals_of(["loss/val", "acuracy/val"], configured())
    with pytest.raises(ConfigError, match="several different ones"):
        goals_of(["loss/val", "loss/val"], configured())
    own = configured("callbacks=[{_target_: mine.Watch}]")
    assert goals_of("mine/of_my_own", own)[0].highest is False


def test_a_budget_is_of_the_clock_or_of_devices() -> None:
    now = [100.0]
    clock = budget_of("30min", lambda: now[0])
    devices = budget_of("2gpu-h", lambda: now[0])
    assert clock is not None
    assert devices is not None
    now[0] += 600
    assert (clock.left_s(5000.0), devices.left_s(5000.0)) == (1200.0, 2200.0)
    assert (clock.warning(on_gpus=False), devices.warning(on_gpus=True)) == (None, None)
    told = (
        "search.budget=2gpu-h: its runs are on CPU cores, whose time counts; write 2core-h, or"
        " another number"
    )
    assert devices.warning(on_gpus=False) == told
    assert in_words(2200.0, of_devices=True, gpus=True) == "36.7gpu-min"
    assert in_words(20.0, of_devices=False, gpus=True) == "20.0s"
    assert budget_of(None) is None


def test_runs_that_are_none_of_its_points_are_no_best_of_a_search(tmp_path: Path) -> None:
    (tmp_path / "multirun.yaml").write_text(
        "objective: auto\nsearch: {constraints: [loss/val<9]}\nruns_not_counted: [a]"
    )
    runs: list[FoundRecord] = [
        {"folder": tmp_path / name, "status": COMPLETED, "search": {"number": number},
         "objective": {"name": objective, "value": value}}
        for number, (name, objective, value) in enumerate([("a", "loss/val", 0.9), ("b", "accuracy/val", 0.5)])
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    conclude_search(console, tmp_path, runs, lambda run: run["folder"].name)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "limits       1 of 1 runs keep loss/val<9",
        "best         b  accuracy/val 0.5000",
        "      alone: b",
    ]


def test_a_bad_point_is_one_of_the_search() -> None:
    failed: Record = {"status": FAILED, "error_kind": "Diverged"}
    made: list[Record] = [{"search": {"number": 0}}, {}]
    runs = [FoundRecord({**failed, **more, "folder": Path(str(more))}) for more in made]
    good: FoundRecord = {"status": PAUSED, "folder": Path("good")}
    assert bad_points([*runs, good]) == runs[:1]
    assert bad_points(runs) == []
    assert bad_points([*runs[1:], good]) == [], "of a grid"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("30", "has no unit"),
        ("h", "is no budget"),
        ("0min", "is no budget"),
        ("3weeks", "is no budget"),
        ("-1h", "is no"),
    ],
)
def test_a_wrong_budget_is_told(text: str, problem: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"search\.budget={text}: {problem}.*as in 30min, 2h .* or 20gpu-h"
    ):
        budget_of(text)
