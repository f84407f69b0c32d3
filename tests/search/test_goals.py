"""What a search is for: tags, which way each is better, limits; and what it may spend."""

import io
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from expt.errors import ConfigError, OutOfMemory
from expt.runs.found import FoundRun, by_objective
from expt.runs.paths import SWEEP_RECORD, RunPaths
from expt.runs.result import COMPLETED, FAILED, PRUNED, Record
from expt.runs.view.text import Console
from expt.search.conclusion import SearchRecord, bad_trials, conclude_search, search_in
from expt.search.search import Budget
from expt.search.space import Parameter, Space
from expt.search.trial import Goal, Reader, Trial, best, goals_of, limits_of
from tests.conftest import Configured
from tests.facade import record_points


def nowhere(**record: Any) -> FoundRun:
    """A run with this record, and without any other file."""
    return FoundRun(Path("no such run"), cast(Record, record))


RECORD: dict[str, Any] = {
    "objective": {"name": "accuracy/val", "value": 0.75},
    "metrics": {
        "accuracy/val": 0.5,
        "loss/val": 1.5,
        "memory/gpu_mib": 900.0,
        "speed/samples_per_s": 10.0,
    },
}


def test_goals_know_direction_and_value(configured: Configured) -> None:
    tags = ["accuracy/val", "loss/val", "speed/samples_per_s", "memory/gpu_mib", "loss/test"]
    goals = goals_of(tags, configured())
    assert [goal.highest for goal in goals] == [True, False, True, False, False]
    assert [nowhere(**RECORD).value_of(goal.tag) for goal in goals] == [
        0.75, 1.5, 10.0, 900.0, None,
    ], "the best epoch's of its objective"  # fmt: skip
    assert goals[0].cost(0.75) < goals[0].cost(0.5)
    assert goals_of("auto", configured())[0].tag == "accuracy/val"


def test_the_best_of_equal_first_goals_is_one_that_no_other_beats() -> None:
    goals = [Goal("accuracy/val", highest=True), Goal("speed/samples_per_s", highest=True)]
    reached = [(0.75, 10.0), (0.75, 30.0), (0.5, 99.0), (0.75, math.inf)]
    points = [
        Trial(values={}, status=COMPLETED, number=n, objectives=each)
        for n, each in enumerate(reached)
    ]
    found = best(points, goals)
    assert found is not None
    assert found.number == 1
    tags = [goal.tag for goal in goals]
    records = [{"status": COMPLETED, "metrics": dict(zip(tags, x, strict=True))} for x in reached]
    runs = [FoundRun(Path(f"run{n}"), cast(Record, record)) for n, record in enumerate(records)]
    alike = [
        *reversed(points),
        Trial(values={}, status=COMPLETED, number=4, objectives=(0.75, 30.0)),
    ]
    assert best(alike[::-1], goals) == found, "of equal ones the first point"
    record = SearchRecord(goals, [])
    first = record.ranked(runs)[0]
    assert first is not None
    assert first.runs == (runs[1],)
    assert [row.runs for row in record.front(runs)] == [(runs[1],), (runs[2],)], "it is the first"


def test_a_limit_is_exceeded_by_a_number_and_by_having_no_memory(configured: Configured) -> None:
    upper, lower = limits_of(["memory/gpu_mib<800", "speed/samples_per_s >= 20"], configured())
    run = nowhere(**RECORD)
    assert (upper.violation(run), lower.violation(run)) == (100.0, 10.0)
    assert upper.violation(nowhere(metrics={"memory/gpu_mib": 700.0})) < 0
    assert upper.violation(nowhere(error_kind=OutOfMemory.__name__)) > 0
    assert upper.violation(nowhere(metrics={})) == 0, "what was not measured"


def test_limits_and_goals_of_the_kept_epoch(tmp_path: Path, configured: Configured) -> None:
    paths, space = RunPaths(tmp_path), Space((Parameter("seed", "int", 0, 9),))
    record_points(
        paths,
        (1, 1, {"accuracy/val": 0.5, "loss/val": 2.0, "memory/worker_mib": 7.0}),
        (2, 2, {"accuracy/val": 0.875, "loss/val": 0.5, "memory/worker_mib": 8.0}),
        (3, 3, ends := {"accuracy/val": 0.75, "loss/val": 1.5, "memory/worker_mib": 9.0}),
        (3, 3, {"loss/test": 0.25}),
    )
    record: Record = {
        "status": COMPLETED,
        "overrides": {"seed": 3},
        "objective": {"name": "accuracy/val", "value": 0.875},
        "best": {"metric": "accuracy/val", "value": 0.875, "epoch": 2},
    }
    record["metrics"] = {**ends, "loss/test": 0.25}
    texts = ["accuracy/val>0.8", "loss/val<1", "memory/worker_mib<8.5", "loss/test<0.3"]
    limits = limits_of(texts, configured())
    goals = goals_of(["accuracy/val", "loss/val"], configured())
    run = FoundRun(tmp_path, record)
    point = Reader(space=space, goals=goals, limits=limits).trial(run)
    assert point is not None
    assert point.objectives == (0.875, 0.5)
    assert [each for each in texts if point.violations[each] > 0] == ["memory/worker_mib<8.5"]
    kept = [limit for limit in limits if limit.text != "memory/worker_mib<8.5"]
    assert SearchRecord(goals, kept).may_be_best(run)
    assert SearchRecord(goals, limits).breaks_limits(run)


def test_memory_and_speed_are_of_all_epochs_that_the_run_itself_has_trained(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    last = {"speed/samples_per_s": 400.0, "speed/epoch_s": 1.0, "memory/gpu_mib": 7.0}
    last["skipped_steps"] = 3.0
    of_each = (999.0, 9.0, 99.0), (100.0, 4.0, 9.0), (150.0, 2.0, 8.0), (400.0, 1.0, 7.0)
    for epoch, values in enumerate(of_each, 1):  # the first is that of the run that it is a fork of
        measured = {**dict(zip(last, values, strict=False)), "skipped_steps": epoch - 1.0}
        record_points(paths, (10 * epoch, epoch, measured))
    record: Record = {"metrics": last, "best": {"metric": "accuracy/val", "value": 0.5, "epoch": 2}}
    fork: Any = {**record, "forked_from": {"step": 10}}
    expected = [pytest.approx(1100 / 7), pytest.approx(7 / 3), 9.0, 3.0]
    assert [FoundRun(tmp_path, fork).value_of(tag) for tag in last] == expected
    assert FoundRun(tmp_path, record).value_of("memory/gpu_mib") == 99.0
    assert [nowhere(**record).value_of(tag) for tag in last] == [*last.values()]


def conclusion(folder: Path, runs: list[FoundRun]) -> str:
    out = io.StringIO()
    conclude_search(Console(file=out, width=200), search_in(folder, runs), runs, lambda _: "again")
    return out.getvalue()


def test_the_limits_of_a_report_name_runs_that_exceed_them(tmp_path: Path) -> None:
    objective = {"name": "accuracy/val", "value": 0.5}
    runs = list[FoundRun]()
    for n in range(7):
        done: Any = {"status": COMPLETED, "objective": objective, "search": {"number": n}}
        done["metrics"] = {"speed/epoch_s": float(n)}
        runs.append(FoundRun(tmp_path / f"run{n}", done))
    record = {"objective": "accuracy/val", "search": {"constraints": ["speed/epoch_s<2"]}}
    (tmp_path / SWEEP_RECORD).write_text(json.dumps(record))
    said = conclusion(tmp_path, runs[::-1])
    assert "limits       2 of 7 runs keep speed/epoch_s<2; not run6, run5, run4 and " in said
    assert "best         run0  accuracy/val 0.5000" in said, "of equal ones the first point"
    assert by_objective(reversed(runs))[0].folder.name == "run0"
    search = {"constraints": ["speed/epoch_s<0"]}
    none = {"objective": ["accuracy/val", "speed/epoch_s"], "search": search}
    (tmp_path / SWEEP_RECORD).write_text(json.dumps(none))
    lines = conclusion(tmp_path, runs).splitlines()
    assert [line.split()[0] for line in lines] == ["limits", "Pareto", "best"], "only with rows"
    for damaged in ("{", "[1]", "search: foo", "objective: [loss/val, 3]"):
        (tmp_path / SWEEP_RECORD).write_text(damaged)
        assert conclusion(tmp_path, runs).startswith("best         run0  accuracy/val 0.5")


@pytest.mark.parametrize(
    ("text", "is_kept"), [("<", False), (">", False), ("<=", True), (">=", True)]
)
@pytest.mark.parametrize("bound", [0.5, 0.0])
def test_strict_limits(text: str, is_kept: bool, bound: float, configured: Configured) -> None:
    (limit,) = limits_of([f"loss/val{text}{bound}"], configured())
    assert (limit.violation(nowhere(metrics={"loss/val": bound})) <= 0) is is_kept
    assert limit.violation(nowhere(metrics={"loss/val": math.nan})) > 0


@pytest.mark.parametrize(
    "text", ["memry/gpu_mib<3", "memory/gpu_mib", "memory/gpu_mib<nan", "memory/gpu_mib<lots"]
)
def test_a_wrong_limit_is_refused(configured: Configured, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^search\.constraints={text}: "):
        limits_of([text], configured())


def test_a_wrong_goal_is_refused_but_custom_code_may_log_any_tag(configured: Configured) -> None:
    for tags in (["loss/val", "acuracy/val"], ["loss/val", "loss/val"]):
        with pytest.raises(ConfigError, match=r"^objective="):
            goals_of(tags, configured())
    custom = configured("callbacks=[{_target_: mine.Watch}]")
    assert goals_of("mine/of_my_own", custom)[0].highest is False


def test_a_budget_is_of_the_clock_or_of_devices() -> None:
    now = [100.0]
    clock, devices = Budget("30min", lambda: now[0]), Budget("2gpu-h", lambda: now[0])
    now[0] += 600
    assert (clock.left_s(5000.0), devices.left_s(5000.0)) == (1200.0, 2200.0)


@pytest.mark.parametrize("text", ["30", "h", "0min", "3weeks", "-1h"])
def test_a_wrong_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^search\.budget={text}: "):
        Budget(text)


def test_a_bad_trial_is_one_of_the_search() -> None:
    failed = {"status": FAILED, "error_kind": "Diverged"}
    runs = [nowhere(**failed, search={"number": 0}), nowhere(**failed)]
    good = nowhere(status=PRUNED, search={"number": 1})
    assert bad_trials([*runs, good]) == runs[:1]
    assert bad_trials(runs) == []
    assert bad_trials([*runs[1:], good]) == [], "of a grid"
