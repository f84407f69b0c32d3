"""Whether settings differ, by their seeds."""

import io
import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from expt.command import report
from expt.errors import ConfigError
from expt.runs.found import FoundRun
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, Record
from expt.runs.view import verdict
from expt.runs.view.text import Console
from tests.facade import Capture, record_points

A = [0.90, 0.91, 0.93, 0.92, 0.94]
B = [0.89, 0.91, 0.90, 0.90, 0.93]
C = [0.50, 0.52, 0.51, 0.53, 0.50]


def runs_of(objective: str = "accuracy/val", **rows: Sequence[float]) -> list[FoundRun]:
    """A run for each row and seed."""
    found = list[FoundRun]()
    for name, values in rows.items():
        for seed, value in enumerate(values):
            record: Record = {
                "status": COMPLETED,
                "config": {"seed": seed, "model": name, "task": {"name": "classification"}},
                "seedless_identity": name,
                "overrides": {"model": name, "seed": seed},
                "objective": {"name": objective, "value": value},
                "metrics": {objective: value, "loss/test": 1 - value},
                "epoch_s": [1.0],
            }
            found.append(FoundRun(Path(f"{name}{seed}"), record))
    return found


def of(name: str, found: verdict.Verdicts) -> verdict.Verdict:
    return next(one for one in found.others if one.other.settings["model"] == name)


def test_the_best_is_compared_by_paired_seeds_and_corrected_for_all_pairs() -> None:
    found = verdict.verdicts(runs_of(b=B, a=A, c=C))
    assert found.best.settings["model"] == "a"
    b, c = of("b", found), of("c", found)
    # Differences 0.01, 0, 0.03, 0.02, 0.01: deviation sqrt(0.00052 / 4), t = 2.746 of 4 degrees.
    assert b.lead == pytest.approx(0.014)
    half = 2.7764 * math.sqrt(0.00052 / 4) / math.sqrt(5)  # Holm corrects the largest p by 1
    assert b.low == pytest.approx(0.014 - half, abs=1e-5)
    assert b.high == pytest.approx(0.014 + half, abs=1e-5)
    assert b.seeds == 5
    assert b.p == pytest.approx(0.0516, abs=1e-3), "the largest of three p is corrected by 1"
    assert c.p < 1e-3
    assert (b.in_words, c.in_words) == ("none shown", "a difference")
    assert "3 comparisons" in found.notes[0]


@pytest.mark.parametrize("seed", range(20))
def test_interval_and_p_agree(seed: int) -> None:
    draw = random.Random(seed).gauss
    rows = {
        name: [draw(0.9 + 0.01 * at, 0.008) for _ in range(4)] for at, name in enumerate("abcdef")
    }
    for one in verdict.verdicts(runs_of("accuracy/val", **rows)).others:
        assert (
            (one.low < 0 < one.high) == (one.p >= verdict.LEVEL) == (one.in_words == "none shown")
        )
        assert one.low < one.lead < one.high


def test_p_is_corrected_as_holm_has_it() -> None:
    found = verdict._holm({(0, 1): 0.01, (0, 2): 0.04, (1, 2): 0.03, (0, 3): math.nan, (2, 3): 0.9})
    expected = {(0, 1): 0.04, (0, 2): 0.09, (1, 2): 0.09, (0, 3): math.nan, (2, 3): 0.9}
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "rows", "best", "lead"),
    [
        ("loss/val", {"low": C, "high": A}, "low", 0.92 - 0.512),
        ("speed/samples_per_s", {"slow": [90, 91], "fast": [100, 102]}, "fast", 10.5),
    ],
)
def test_best_by_direction(metric: str, rows: dict[str, Any], best: str, lead: float) -> None:
    found = verdict.verdicts(runs_of(metric, **rows), metric)
    assert found.best.settings["model"] == best
    assert found.others[0].lead == pytest.approx(lead)
    assert found.others[0].low < lead < found.others[0].high


def test_only_seeds_that_both_have_completed_are_compared() -> None:
    runs = runs_of(a=A, b=B)
    runs[0].record["status"] = FAILED
    found = verdict.verdicts(runs)
    assert found.best.settings["model"] == "b", "it is whole"
    (only,) = found.others
    assert only.seeds == 4
    assert only.lead == pytest.approx(-(0.0 + 0.03 + 0.02 + 0.01) / 4)


@pytest.mark.parametrize(("failed", "best"), [((0,), "b"), ((0, 5), "a")])
def test_repetitions_that_failed_are_said(
    tmp_path: Path, failed: tuple[int, ...], best: str
) -> None:
    runs = [FoundRun(tmp_path / run.folder, run.record) for run in runs_of(a=A, b=B, c=C)]
    (tmp_path / "multirun.yaml").touch()
    for number in (*failed, *range(10, 15)):
        runs[number].record["status"] = FAILED
    found = verdict.verdicts(runs)
    assert found.best.settings["model"] == best
    (incomplete,) = (note for note in found.notes if note.startswith("incomplete: "))
    for number in (0, 5):
        name = f"model={'ab'[number == 5]} (4 of 5 repetitions)"
        assert (name in incomplete) == (number in failed)
    assert any("not compared: model=c (0 of 5 repetitions)" in note for note in found.notes)
    unequal = [note for note in found.notes if "unequal seeds" in note]
    assert len(unequal) == (len(failed) == 1)
    assert all("of the rows with all repetitions" in note for note in unequal)


def test_of_unequal_seeds_those_count_that_both_have() -> None:
    runs = runs_of(a=[0.980, 0.981, 0.983], b=[0.990, 0.992, 0.993, 0.98], c=[0.995])
    found = verdict.verdicts(runs)
    assert (found.best.settings["model"], found.best_seeds) == ("b", 4)
    assert of("a", found).lead == pytest.approx(0.0310 / 3)
    assert of("c", found).lead == pytest.approx(-0.005), "which is of one seed"
    assert of("c", found).in_words == "too few seeds in common"
    assert "unequal seeds" in found.notes[1]
    assert "c0: it has 1 seed" in found.notes[2], "the first row of the table"


def test_a_best_that_another_leads_on_the_seeds_of_both_says_so() -> None:
    runs = runs_of(a=[0.90, 0.9201], b=[0.80, 0.8202, 0.99, 0.99, 0.99, 0.99])
    found = verdict.verdicts(runs)
    assert found.best.settings["model"] == "b"
    assert found.others[0].lead == pytest.approx(-0.09995)
    assert found.others[0].in_words == "a difference, and not in favour of the best"


def test_differences_without_spread_say_nothing_but_that() -> None:
    (same,) = verdict.verdicts(runs_of(a=A, b=A)).others
    assert (same.in_words, same.lead) == ("equal in each seed", 0)
    (shifted,) = verdict.verdicts(runs_of(a=[0.75, 0.5], b=[0.5, 0.25])).others
    assert (shifted.in_words, shifted.lead) == ("the same lead in each seed", 0.25)
    (swapped,) = verdict.verdicts(runs_of(a=[0.1 + 0.2, 0.4], b=[0.4, 0.3])).others
    assert swapped.lead == 0, "but for rounding"


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
    assert of("b", found).in_words == "the same lead in each seed"
    assert of("c", found).p < 1
    assert "2 comparisons" in found.notes[0]


def test_a_row_of_which_a_run_came_to_nothing_is_not_the_best_by_the_others() -> None:
    found = verdict.verdicts(runs_of(a=A, b=[*(value + 0.03 for value in A[:4]), math.nan]))
    assert found.best.settings["model"] == "a"
    assert found.others[0].lead == pytest.approx(-0.03)
    assert found.notes[-1].startswith("not counted: 1 ")


def test_a_setting_that_never_measured_the_metric_is_named_once() -> None:
    runs = [*runs_of("loss/test", a=A, b=B), *runs_of(c=C), *runs_of("loss/test", d=[math.nan] * 2)]
    for run in runs[10:15]:
        del run.record["metrics"]["loss/test"]
    (note,) = verdict.verdicts(runs, "loss/test").notes[1:]
    assert note.startswith("not compared: model=c (5 of 5 repetitions), model=d (2 of 2 ")
    del runs[0].record["objective"], runs[0].record["metrics"]["loss/test"]
    assert verdict.verdicts(runs, "loss/test").notes[-1].startswith("not counted: 1 completed, ")


def test_a_run_with_the_seed_of_one_before_it_does_not_take_its_place() -> None:
    runs = runs_of(a=A, b=B)
    more = (FoundRun("again" / run.folder, run.record) for run in runs_of(b=[0.5] * 5))
    found = verdict.verdicts([*runs, *more])
    assert found.others[0].lead == pytest.approx(0.014)
    assert found.others[0].seeds == 5
    assert found.notes[-1].startswith("not counted: 5 ")
    assert len(verdict.verdicts(runs).notes) == 1


def test_another_metric_is_that_of_the_epoch_whose_checkpoint_a_run_keeps(tmp_path: Path) -> None:
    made = [*runs_of(a=A), *runs_of("loss/val", b=B)]
    runs = [FoundRun(tmp_path / run.folder, run.record) for run in made]
    for run, kept in zip(runs, [*A, *B], strict=True):
        value = run.record["objective"]["value"] or 0.0
        run.record["best"] = {"metric": run.objective, "value": value, "epoch": 1}
        run.metrics["accuracy/val"] = 1 - kept
        run.folder.mkdir()
        points = ((1, 1, {"accuracy/val": kept}), (2, 2, {"accuracy/val": 1 - kept}))
        record_points(run.paths, *points)
    found = verdict.verdicts(runs, "accuracy/val")
    assert found.best.settings["model"] == "a"
    assert found.others[0].lead == pytest.approx(0.014)


def test_the_table_has_a_row_for_each_setting() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    rows = {"a": A, "b": A, "c": [value + 2e-5 for value in A]}
    console.print(verdict.verdict_table(verdict.verdicts(runs_of("loss/val", **rows))))
    best, same, more = console.export_text().splitlines()[1:]
    assert best.split()[0] == "a"
    assert "0" in [cell.strip() for cell in same.split("  ")]
    assert "+2.0e-05" in [cell.strip() for cell in more.split("  ")]


@pytest.mark.parametrize("rows", [{"a": A}, {"a": A[:1], "b": B[:1]}, {}])
def test_without_seeds_there_is_nothing_to_compare(rows: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--verdict: "):
        verdict.verdicts(runs_of("accuracy/val", **rows))


def test_a_report_compares_the_runs_of_a_folder(tmp_path: Path, capsys: Capture) -> None:
    for run in runs_of(a=A, b=B):
        paths = RunPaths(tmp_path / run.folder)
        paths.folder.mkdir()
        paths.result.write_text(json.dumps(run.record))
    asked = [str(tmp_path), "--verdict"]
    assert report.main([*asked, "--metric", "loss/test"]) == 0
    assert "lead of the best" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--metric loss/tests: .* 'loss/test'"):
        report.main([*asked, "--metric", "loss/tests"])
    with pytest.raises(ConfigError, match="--metric"):
        report.main([asked[0], "--metric", "loss/test"])
