"""Whether settings differ, by their seeds."""

from __future__ import annotations

import io
import json
import math
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import expt
from expt.command import report
from expt.errors import ConfigError
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, FoundRecord, create_result, update_result
from expt.runs.view import verdict
from expt.runs.view.power import pairs_needed

A = [0.90, 0.91, 0.93, 0.92, 0.94]
B = [0.89, 0.91, 0.90, 0.90, 0.93]
C = [0.50, 0.52, 0.51, 0.53, 0.50]


def runs_of(objective: str = "accuracy/val", **rows: Sequence[float]) -> list[FoundRecord]:
    """A run for each row and seed."""
    found: list[Any] = []
    for name, values in rows.items():
        for seed, value in enumerate(values):
            config = {"seed": seed, "model": name, "task": {"name": "classification"}}
            run = {
                "folder": Path(f"{name}{seed}"),
                "status": COMPLETED,
                "config": config,
                "seedless_identity": name,
            }
            run["overrides"] = {"model": name, "seed": seed}
            metrics = {objective: value, "loss/test": 1 - value}
            found.append(
                {
                    **run,
                    "objective": {"name": objective, "value": value},
                    "metrics": metrics,
                    "epoch_s": [1.0],
                }
            )
    return found


def of(name: str, found: Sequence[verdict.Verdict]) -> verdict.Verdict:
    return next(one for one in found if one.other.settings["model"] == name)


def test_the_best_is_compared_by_paired_seeds_and_corrected_for_all_pairs() -> None:
    found = verdict.verdicts(runs_of(b=B, a=A, c=C))
    assert found.best.settings["model"] == "a"
    b, c = of("b", found.others), of("c", found.others)
    differences = [
        0.01,
        0.0,
        0.03,
        0.02,
        0.01,
    ]  # mean 0.014, deviation sqrt(0.00052 / 4), t = 2.746 of 4 degrees
    assert b.lead == pytest.approx(0.014)
    half = 2.7764 * math.sqrt(0.00052 / 4) / math.sqrt(5)
    assert b.low == pytest.approx(0.014 - half, abs=1e-5)
    assert b.high == pytest.approx(0.014 + half, abs=1e-5)
    assert b.pairs == len(differences)
    assert b.p == pytest.approx(0.0516, abs=1e-3), "the largest of three p is corrected by 1"
    assert c.p < 1e-3
    assert (b.in_words.partition(";")[0], c.in_words) == ("none shown", "a difference")


def test_a_loss_leads_where_it_is_lower() -> None:
    found = verdict.verdicts(runs_of("loss/val", low=C, high=A))
    assert found.best.settings["model"] == "low"
    assert found.others[0].lead == pytest.approx(0.92 - 0.512)
    runs = runs_of(b=B, a=A)
    del runs[-1]["metrics"]["loss/test"]
    found = verdict.verdicts(runs, "loss/test")
    assert (found.best.settings["model"], found.best_seeds) == ("a", 4)


def test_a_speed_leads_where_it_is_higher() -> None:
    found = verdict.verdicts(
        runs_of("speed/samples_per_s", slow=[90, 91], fast=[100, 102]), "speed/samples_per_s"
    )
    assert found.best.settings["model"] == "fast"
    assert found.others[0].lead == pytest.approx(10.5)


def test_only_seeds_that_both_have_completed_are_compared() -> None:
    runs = runs_of(a=A, b=B)
    runs[0]["status"] = FAILED
    runs[-1]["objective"] = {"name": "accuracy/val", "value": math.nan}
    (only,) = verdict.verdicts(runs).others
    assert only.pairs == 3
    assert only.lead == pytest.approx((0.0 + 0.03 + 0.02) / 3)


def test_the_number_of_seeds_is_what_the_power_needs() -> None:
    (only,) = verdict.verdicts(runs_of(a=A, b=B), difference=0.005).others
    # By a normal distribution ((1.960 + 0.842) * 0.01140 / 0.005)^2 = 40.8; a t-test needs about
    # two more.
    assert only.seeds in (42, 43, 44)
    (lead,) = verdict.verdicts(runs_of(a=A, b=B)).others
    assert lead.seeds in (7, 8)
    assert lead.in_words == f"none shown; {lead.seeds} seeds would"


@pytest.mark.parametrize(
    ("effect", "comparisons", "pairs"),
    [
        *[(0.2, 1, 199), (0.5, 1, 34), (0.8, 1, 15)],  # as G*Power has them
        *[
            (3.08, 15, 6),
            (3.5, 10, 5),
            (2.6, 45, 8),
            (3.6, 105, 7),
            (2, 190, 12),
            (1.1, 190, 24),
        ],  # by 2,000,000 draws
        *[(5, 1, 3), (1e4, 190, 2)],
    ],
)
def test_the_pairs_needed_are_the_fewest_of_that_power(
    effect: float, comparisons: int, pairs: int
) -> None:
    assert pairs_needed(effect, 0.05 / comparisons) == pairs


def test_a_difference_too_small_to_look_for_would_take_more_than_the_most() -> None:
    bound = math.floor(
        ((1.95996 + 0.84162) / 0.02) ** 2
    )  # of a normal distribution; a t-test needs about two more
    (only,) = verdict.verdicts(runs_of(a=A, b=B), difference=1e-9).others
    assert only.seeds in range(bound, bound + 4)
    assert only.in_words == f"none shown; more than {only.seeds:,} seeds would"
    (alike,) = verdict.verdicts(runs_of(a=[0.25, 0.5], b=[0.5, 0.25])).others
    assert alike.in_words == "none shown", "no number of seeds shows that they are the same"


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "abc"])
def test_a_difference_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"--difference: {text} is no difference to look for; give a number above 0",
    ):
        report.parse(["sweep", "--verdict", "--difference", text])


def test_differences_without_spread_say_nothing_but_that() -> None:
    (same,) = verdict.verdicts(runs_of(a=A, b=A)).others
    assert same.in_words == "equal in each seed"
    (shifted,) = verdict.verdicts(runs_of(a=[0.75, 0.5], b=[0.5, 0.25])).others
    assert shifted.in_words == "the same lead in each, no spread to judge it by"


@pytest.mark.parametrize(
    "digits", [float, lambda value: struct.unpack("f", struct.pack("f", value))[0]]
)
def test_a_spread_that_is_but_rounding_is_none(digits: Callable[[float], float]) -> None:
    a, b, c = (
        [digits(right / 144) for right in row]
        for row in ((138, 140, 141), (137, 139, 140), (136, 139, 141))
    )
    assert len({x - y for x, y in zip(a, b, strict=True)}) > 1
    found = verdict.verdicts(runs_of(a=a, b=b, c=c))
    assert of("b", found.others).in_words == "the same lead in each, no spread to judge it by"
    assert of("c", found.others).p < 1
    assert found.corrected_for == 2
    assert next(verdict.notes(found)).endswith(
        "corrected (Holm) for 2 comparisons that have one, of 3"
    )


def test_of_unequal_seeds_those_count_that_both_have() -> None:
    runs = runs_of(a=[0.980, 0.981, 0.983], b=[0.990, 0.992, 0.993, 0.90], c=[0.995])
    found = verdict.verdicts(runs)
    assert (found.best.settings["model"], found.best_seeds) == ("b", 4)
    assert of("a", found.others).lead == pytest.approx(0.0310 / 3)
    assert of("a", found.others).in_words == "a difference"
    assert of("c", found.others).lead == pytest.approx(-0.005), "which is of one seed"
    assert of("c", found.others).in_words == "too few seeds in common"
    assert (
        [*verdict.notes(found)][1]
        == "the rows have unequal seeds: no other with two or more in common leads the best on those; by the mean of all its own it would be model=c"
    )


def test_the_best_by_the_mean_is_that_of_the_metric_which_is_compared() -> None:
    runs = runs_of(a=[0.980, 0.981, 0.983], b=[0.990, 0.992, 0.993, 0.90], c=[0.995])
    for run in runs:
        run["objective"] = {"name": "loss/val", "value": -run["metrics"]["accuracy/val"]}
    unfinished: Any = {
        **runs[-1],
        "folder": Path("c1"),
        "status": FAILED,
        "metrics": {"accuracy/val": 0.1},
    }
    runs = [*runs, unfinished]  # which counts nowhere
    note = [*verdict.notes(verdict.verdicts(runs, "accuracy/val"))][1]
    assert note.endswith("by the mean of all its own it would be model=c")


def test_another_metric_is_that_of_the_epoch_whose_checkpoint_a_run_keeps(tmp_path: Path) -> None:
    runs: list[Any] = [*runs_of(a=A), *runs_of("loss/val", b=B)]
    for run, kept in zip(runs, [*A, *B], strict=True):
        run["folder"] = tmp_path / run["folder"]
        run["best"] = {
            "metric": run["objective"]["name"],
            "value": run["objective"]["value"],
            "epoch": 1,
        }
        run["metrics"]["accuracy/val"] = 1 - kept
        run["folder"].mkdir()
        writer = MetricsWriter(RunPaths(run["folder"]))
        for epoch, value in ((1, kept), (2, 1 - kept)):
            writer.write(epoch, epoch, {"accuracy/val": value})
        writer.close()
    found = verdict.verdicts(runs, "accuracy/val")
    assert found.best.settings["model"] == "a"
    assert found.others[0].lead == pytest.approx(0.014)
    assert verdict.verdicts(runs[:5] + runs_of(b=B), "accuracy/val").others[
        0
    ].lead == pytest.approx(0.014)


def test_of_rows_that_lead_one_another_in_a_circle_each_is_led() -> None:
    nothing = math.nan
    a = [0.90, 0.9201, nothing, nothing, 0.50, 0.51]
    b = [0.80, 0.82, 0.80, 0.82, nothing, nothing]
    c = [nothing, nothing, 0.70, 0.71, 0.70, 0.7101]
    runs = [run for run in runs_of(a=a, b=b, c=c) if not math.isnan(run["metrics"]["accuracy/val"])]
    found = verdict.verdicts(runs)
    assert found.best.settings["model"] == "b", "by its mean"
    assert of("a", found.others).lead == pytest.approx(-0.10005)
    assert of("a", found.others).in_words == "a difference, and not in favour of the best"
    assert of("c", found.others).lead == pytest.approx(0.105)
    note = [*verdict.notes(found)][1]
    assert (
        note
        == "the rows have unequal seeds: another with two or more in common leads the best on those"
    )


def test_a_row_of_which_a_run_came_to_nothing_is_not_the_best_by_the_others() -> None:
    found = verdict.verdicts(runs_of(a=A, b=[*(value + 0.03 for value in A[:4]), math.nan]))
    assert found.best.settings["model"] == "a"
    assert found.others[0].lead == pytest.approx(-0.03)
    assert "completed runs without a finite number, which count nowhere: 1" in [
        *verdict.notes(found)
    ]


def test_a_run_with_the_seed_of_one_before_it_does_not_take_its_place() -> None:
    runs = runs_of(a=A, b=B)
    more: list[Any] = runs_of(b=[0.5] * 5)
    for run in more:
        run["folder"] = Path(f"again/{run['folder']}")
    found = verdict.verdicts([*runs, *more])
    assert (found.others[0].lead, found.others[0].pairs) == (
        verdict.verdicts(runs).others[0].lead,
        5,
    )
    told = (
        "a seed that a run before them in the row has, which count nowhere: again/b0, again/b1,"
        " again/b2 and 2 more"
    )
    assert f"completed runs of {told}" in [*verdict.notes(found)]
    assert len([*verdict.notes(verdict.verdicts(runs))]) == 1


def test_the_rounding_of_one_large_seed_hides_no_difference_of_the_others() -> None:
    large, sure = 2.0**20, [0.5] * 4
    found = verdict.verdicts(
        runs_of("loss/val", a=[large, *sure], b=[large, 0.75, 0.8125, 0.75, 0.8125])
    )
    (b,) = found.others
    assert (b.lead, b.p < 0.05, b.in_words) == (0.225, True, "a difference")
    (b,) = verdict.verdicts(runs_of("loss/val", a=[large, *sure], b=[large, *[0.75] * 4])).others
    assert (b.lead, b.in_words) == (0.25, "the same lead in each, no spread to judge it by")


def test_no_lead_is_written_as_0_and_one_below_the_digits_shown_with_its_own() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(
        verdict.table(
            verdict.verdicts(runs_of("loss/val", a=A, b=A, c=[value + 2e-5 for value in A]))
        )
    )
    same, more = (line.split("  ") for line in console.export_text().splitlines()[2:])
    assert (
        "0" in [cell.strip() for cell in same],
        "+2.0e-05" in [cell.strip() for cell in more],
    ) == (True, True)


def test_runs_of_several_objectives_are_compared_by_one_that_is_named() -> None:
    runs = [*runs_of(a=A), *runs_of("loss/val", b=B)]
    said = "these were chosen by accuracy/val and loss/val; name one, as in --metric accuracy/val"
    with pytest.raises(ConfigError, match=f"^--verdict: compares runs by one number, and {said}$"):
        verdict.verdicts(runs)
    assert len(verdict.verdicts(runs, "loss/test").others) == 1


def test_a_mean_that_is_but_rounding_is_none() -> None:
    runs = runs_of(a=[0.1 + 0.2, 0.4], b=[0.4, 0.3])
    assert verdict.verdicts(runs).others[0].lead == 0


@pytest.mark.parametrize(
    ("rows", "have"),
    [
        ({"a": A}, "here 1 setting has completed runs of 5 seeds"),
        ({"a": A[:1], "b": B[:1]}, "here 2 settings have completed runs of 1 seed"),
        ({}, "here 0 settings have completed runs"),
    ],
)
def test_without_seeds_there_is_nothing_to_compare(rows: dict[str, Any], have: str) -> None:
    mend = "make seeds an axis of the sweep beside others, seed=0,1,2,3,4"
    with pytest.raises(ConfigError) as refused:
        verdict.verdicts(runs_of(**rows))
    assert str(refused.value) == f"--verdict: compares settings by their seeds; {have}; {mend}"


@pytest.fixture(scope="module")
def sweep_of_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds") / "sweep"
    small = ("world_size=1", "epochs=1", "dataset.train_limit=320", f"hydra.sweep.dir='{folder}'")
    expt.sweep("seed=0,1", "optimizer.lr=0.1,0.001", *small)
    return folder


def test_of_a_real_sweep(sweep_of_seeds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(sweep_of_seeds), "--verdict", "--metric", "accuracy/test"]) == 0
    shown = capsys.readouterr().out
    assert "lead of the best" in shown
    assert "p by a paired t-test, corrected (Holm) for 1 comparison" in shown
    assert "the best" in shown.splitlines()[1]
    for metric, hint in (
        ("accuracy/tests", "Did you mean 'accuracy/test'"),
        ("best", "They have loss/train, .*/test; with"),
    ):
        with pytest.raises(
            ConfigError, match=f"^--metric {metric}: no run has such a metric. {hint}"
        ):
            report.main([str(sweep_of_seeds), "--verdict", "--metric", metric])
    with pytest.raises(ConfigError, match=r"^--metric, --difference: say what --verdict compares"):
        report.main([str(sweep_of_seeds), "--metric", "accuracy/test"])


def test_runs_that_break_a_limit_of_their_search_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[Any] = runs_of(a=A, b=B, c=C)
    for number, run in enumerate(runs):
        name = str(run.pop("folder"))
        create_result(
            RunPaths(tmp_path / name), name=name, search={"number": number}, identity=name, **run
        )
    record = {"objective": "accuracy/val", "search": {"constraints": ["loss/test>0.065"]}}
    (tmp_path / "multirun.yaml").write_text(json.dumps(record))
    assert report.main([str(tmp_path), "--verdict"]) == 0
    *shown, note = capsys.readouterr().out.splitlines()
    assert (shown[1].split()[:2], note) == (
        ["a", "4"],
        "left out: 1 completed run that breaks search.constraints",
    )
    (tmp_path / "multirun.yaml").write_text(
        json.dumps({**record, "search": {"constraints": ["loss/test>0.3"]}})
    )
    told = r"here 1 setting has .*; left out: 10 completed runs that break search\.constraints$"
    with pytest.raises(ConfigError, match=told):
        report.main([str(tmp_path), "--verdict"])


def test_a_copy_of_a_run_is_no_further_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[Any] = runs_of(a=A, b=B)
    for run in runs:
        name = str(run.pop("folder"))
        create_result(RunPaths(tmp_path / name), name=name, identity=name, **run)
    shutil.copytree(tmp_path / "a1", tmp_path / "0 backup")
    update_result(
        RunPaths(tmp_path / "0 backup"), objective={"name": "accuracy/val", "value": 0.1}
    )  # of before
    assert report.main([str(tmp_path), "--verdict"]) == 0
    *shown, note = capsys.readouterr().out.splitlines()
    assert "+0.0140" in shown[2]
    assert note == "left out: a copy of a run, which does not count: 0 backup (of a1)"


def test_the_table_says_what_would_show_it() -> None:
    found = verdict.verdicts(runs_of(a=A, b=B), difference=0.005)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(verdict.table(found, 0.005))
    line = console.export_text().splitlines()[2]
    assert "+0.0140" in line
    assert "seeds would 0.005" not in line
    assert f"{found.others[0].seeds} seeds would show one of 0.005" in line
