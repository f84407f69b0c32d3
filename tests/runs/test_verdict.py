"""Whether settings differ, by their seeds."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import expt
from expt.command import report
from expt.errors import ConfigError
from expt.runs.result import COMPLETED, FAILED, FoundRecord
from expt.runs.view import verdict

A = [0.90, 0.91, 0.93, 0.92, 0.94]
B = [0.89, 0.91, 0.90, 0.90, 0.93]
C = [0.50, 0.52, 0.51, 0.53, 0.50]


def runs_of(objective: str = "accuracy/val", **rows: Sequence[float]) -> list[FoundRecord]:
    """A run for each row and seed."""
    found: list[Any] = []
    for name, values in rows.items():
        for seed, value in enumerate(values):
            config = {"seed": seed, "model": name, "task": {"name": "classification"}}
            run = {"folder": Path(f"{name}{seed}"), "status": COMPLETED, "config": config, "seedless_identity": name}
            run["overrides"] = {"model": name, "seed": seed}
            metrics = {objective: value, "loss/test": 1 - value}
            found.append(
                {**run, "objective": {"name": objective, "value": value}, "metrics": metrics, "epoch_s": [1.0]}
            )
    return found


def of(name: str, found: Sequence[verdict.Verdict]) -> verdict.Verdict:
    return next(one for one in found if one.other.settings["model"] == name)


def test_the_best_is_compared_by_paired_seeds_and_corrected_for_all_pairs() -> None:
    best, found = verdict.verdicts(runs_of(b=B, a=A, c=C))
    assert best.settings["model"] == "a"
    b, c = of("b", found), of("c", found)
    differences = [0.01, 0.0, 0.03, 0.02, 0.01]  # mean 0.014, deviation sqrt(0.00052 / 4), t = 2.746 of 4 degrees
    assert b.lead == pytest.approx(0.014)
    half = 2.7764 * math.sqrt(0.00052 / 4) / math.sqrt(5)
    assert b.low == pytest.approx(0.014 - half, abs=1e-5)
    assert b.high == pytest.approx(0.014 + half, abs=1e-5)
    assert b.pairs == len(differences)
    assert b.p == pytest.approx(0.0516, abs=1e-3), "the largest of three p is corrected by 1"
    assert c.p < 1e-3
    assert (b.in_words.partition(";")[0], c.in_words) == ("none shown", "a difference")


def test_a_loss_leads_where_it_is_lower() -> None:
    best, found = verdict.verdicts(runs_of("loss/val", low=C, high=A))
    assert best.settings["model"] == "low"
    assert found[0].lead == pytest.approx(0.92 - 0.512)
    best, _ = verdict.verdicts(runs_of(b=B, a=A), "loss/test")
    assert best.settings["model"] == "a"


def test_only_seeds_that_both_have_completed_are_compared() -> None:
    runs = runs_of(a=A, b=B)
    runs[0]["status"] = FAILED
    runs[-1]["objective"] = {"name": "accuracy/val", "value": math.nan}
    (only,) = verdict.verdicts(runs)[1]
    assert only.pairs == 3
    assert only.lead == pytest.approx((0.0 + 0.03 + 0.02) / 3)


def test_the_number_of_seeds_is_what_the_power_needs() -> None:
    (only,) = verdict.verdicts(runs_of(a=A, b=B), difference=0.005)[1]
    # By a normal distribution ((1.960 + 0.842) * 0.01140 / 0.005)^2 = 40.8; a t-test needs about two more.
    assert only.seeds in (42, 43, 44)
    (lead,) = verdict.verdicts(runs_of(a=A, b=B))[1]
    assert lead.seeds in (7, 8)
    assert lead.in_words == f"none shown; {lead.seeds} seeds would"


def test_differences_without_spread_say_nothing_but_that() -> None:
    (same,) = verdict.verdicts(runs_of(a=A, b=A))[1]
    assert same.in_words == "equal in each seed"
    (shifted,) = verdict.verdicts(runs_of(a=[0.75, 0.5], b=[0.5, 0.25]))[1]
    assert shifted.in_words == "the same lead in each, no spread to judge it by"


@pytest.mark.parametrize("rows", [{"a": A}, {"a": A[:1], "b": B[:1]}, {}])
def test_without_seeds_there_is_nothing_to_compare(rows: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--verdict: compares settings by their seeds; make them an axis"):
        verdict.verdicts(runs_of(**rows))


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
    with pytest.raises(ConfigError, match=r"^--metric accuracy/tests: no run has such a column"):
        report.main([str(sweep_of_seeds), "--verdict", "--metric", "accuracy/tests"])
    with pytest.raises(ConfigError, match=r"^--metric, --difference: say what --verdict compares"):
        report.main([str(sweep_of_seeds), "--metric", "accuracy/test"])


def test_the_table_says_what_would_show_it() -> None:
    best, found = verdict.verdicts(runs_of(a=A, b=B), difference=0.005)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(verdict.table(best, found, 0.005))
    line = console.export_text().splitlines()[2]
    assert "+0.0140" in line
    assert "seeds would 0.005" not in line
    assert f"{found[0].seeds} seeds would show one of 0.005" in line
