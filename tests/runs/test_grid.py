"""The newest grid of a sweep's folder: the repetitions of a setting, and runs that it corrects."""

import contextlib
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command import report, terminal
from expt.errors import ConfigError
from expt.python.results import Runs
from expt.runs.found import read_grid
from expt.runs.paths import GRID_RECORD, RunPaths
from expt.runs.result import COMPLETED, FAILED, create_result, update_result
from expt.runs.view import leaderboard, settings
from expt.search.conclusion import best_of
from tests.facade import Capture, Patch, as_typed
from tests.runs.test_leaderboard import leave_run


def sweep(folder: Path, *words: str) -> expt.SweepResult:
    small = "model=mlp model.hidden=[4] dataset.train_limit=64 epochs=1 world_size=1 max_steps=1"
    return expt.sweep(*as_typed(small), *words, folder=folder, quiet=True)


def leave_seeds(folder: Path, lr: float, *values: float | None, first: int = 0) -> None:
    """Runs of one setting; those without a value have failed."""
    for seed, value in enumerate(values, first):
        fields = {} if value else {"status": FAILED, "error": "gone"}
        about: Any = {"seedless_identity": f"lr={lr}", "config": {"seed": seed}, **fields}
        leave_run(folder, f"lr={lr},seed={seed}", value, **about)
    (folder / "multirun.yaml").write_text("")


def table(folder: Path) -> list[tuple[str, str]]:
    found = settings.rows(settings.read_runs(folder))
    return [(row.settings["lr"], row.status) for row in found]


def test_a_setting_without_all_repetitions_comes_after_whole_ones(tmp_path: Path) -> None:
    leave_seeds(tmp_path, 1, 0.9, None, 0.9)
    leave_seeds(tmp_path, 2, 0.5, 0.6, 0.7)
    leave_seeds(tmp_path, 3, 0.8)  # its other two have not begun
    expected = [("2", COMPLETED), ("1", "2 of 3 completed"), ("3", "1 of 3 completed")]
    assert table(tmp_path) == expected
    best = best_of(tmp_path, settings.read_runs(tmp_path))
    assert best is not None
    assert best.first.folder.name == "lr=2,seed=0", "not the luckiest"
    assert (best.as_record["mean"], best.as_record["repetitions"]) == (pytest.approx(0.6), 3)
    assert best.name == "lr=2 (3 of 3 repetitions)"
    (tmp_path / GRID_RECORD).write_text('{"repetitions": 4}')  # and none has its fourth yet
    assert [status for _, status in table(tmp_path)] == [f"{n} of 4 completed" for n in (2, 1, 3)]


def test_a_refused_repetition_belongs_to_its_setting(tmp_path: Path) -> None:
    leave_seeds(tmp_path, 1, 0.9, 0.8)
    leave_run(tmp_path, "lr=1,seed=7", status=FAILED, error="refused")
    assert table(tmp_path) == [("1", "2 of 3 completed")]


def test_a_repetition_whose_model_could_not_be_made_belongs_to_its_setting(tmp_path: Path) -> None:
    leave_seeds(tmp_path, 1, 0.9, 0.8, None)
    for seed in range(2):  # the third has failed before it has recorded its source
        ran: Any = {"net": {"file": "net.py", "hash": "a"}}
        update_result(RunPaths(tmp_path / f"lr=1,seed={seed}"), imported=ran)
    assert table(tmp_path) == [("1", "2 of 3 completed")]


def test_a_damaged_record_of_the_grid_hides_nothing(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"left_out": 3, "repetitions": "x"}'):
        (tmp_path / GRID_RECORD).write_text(text)
        assert read_grid(tmp_path).get("left_out", []) == []


def test_runs_that_a_corrected_grid_does_not_name_are_hidden(
    tmp_path: Path, capfd: Capture
) -> None:
    sweep(tmp_path, "optimizer.lr=0.1,100", "seed=0,1")
    assert read_grid(tmp_path) == {"repetitions": 2, "left_out": []}
    sweep(tmp_path, "optimizer.lr=0.01,0.02", "seed=0")  # which adds values, and repeats them
    sweep(tmp_path, "optimizer.lr=0.01,0.02", "seed=1")
    sweep(tmp_path, "optimizer.lr=0.1", "seed=0")  # which is no grid
    assert read_grid(tmp_path)["left_out"] == []
    sweep(tmp_path, "optimizer.lr=0.1,0.2", "seed=0,1")
    assert len(read_grid(tmp_path)["left_out"]) == 6
    best = expt.list_runs(tmp_path).best
    assert len(best.repetitions) == 2
    assert "the first of 2 repetitions: accuracy/val" in repr(best)
    capfd.readouterr()
    report.main([str(tmp_path)])
    shown = capfd.readouterr().out
    assert "hidden       6 runs" in shown
    assert "100" not in shown.split("hidden")[0].split()
    report.main([str(tmp_path), "--all"])
    assert "100 " in (shown := capfd.readouterr().out)
    assert "hidden" not in shown
    sweep(tmp_path, "optimizer.lr=0.1,0.2", "seed=0,1", "epochs=2")  # other settings throughout
    assert len(read_grid(tmp_path)["left_out"]) == 10
    sweep(tmp_path, "optimizer.lr=0.1,100", "seed=0,1")
    assert not {"lr=0.1,seed=0", "lr=100,seed=1"} & {*read_grid(tmp_path)["left_out"]}


def leave_corrected(folder: Path) -> None:
    """A sweep whose newest grid has lr=1 and lr=3 with two seeds each, and no longer lr=2."""
    for lr, value in ((1, 0.9), (2, 0.95), (3, 0.5)):
        leave_seeds(folder, lr, value, value - 0.02, value - 0.03)
    left_out = ["lr=1,seed=2", *(f"lr=2,seed={seed}" for seed in range(3)), "lr=3,seed=2"]
    (folder / GRID_RECORD).write_text(json.dumps({"repetitions": 2, "left_out": left_out}))


@pytest.mark.parametrize(
    ("folder", "words", "number"),
    [
        *((folder, (), 4) for folder in "s."),
        *((folder, ("--csv", "-"), 4) for folder in "s."),
        ("s", ("--csv", "x.csv"), 4),
        ("s", ("--plot", "x.svg"), 4),
        (".", ("--filter", "lr>1"), 2),
        ("s", ("--filter", "lr>1", "--csv", "-"), 2),
        (".", ("--filter", "lr>1", "--csv", "x.csv"), 2),
        ("s", ("--verdict",), None),
        (".", ("--optuna", "x.log", "--verdict"), None),
        ("s", ("--sort", "lr"), 4),
    ],
)
def test_no_form_of_a_report_has_hidden_runs(
    folder: str, words: tuple[str, ...], number: int | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    for extra in ("matplotlib",) if "--plot" in words else ():
        pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    leave_corrected(tmp_path / "s")
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        report.main([folder, *words])
    told, printed = (error if words[-2:] == ("--csv", "-") else out).getvalue(), out.getvalue()
    assert "hidden       5 runs" in told
    assert told.count("to see them: python -m expt report s --all") == 1
    table = Path("x.csv").read_text() if "x.csv" in words else printed
    if "-" in words or "x.csv" in words:
        runs = [row["run"] for row in csv.DictReader(io.StringIO(table))]
        assert len(runs) == number
        assert not any("lr=2" in run for run in runs)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        for file in ("x.csv", "x.svg", "x.log"):
            Path(file).unlink(missing_ok=True)
        told = out.getvalue() + error.getvalue()
        report.main([folder, *words, "--all"])
    assert (out.getvalue() + error.getvalue()).count("hidden ") == told.count("hidden "), "--all"


@pytest.mark.usefixtures("own_handlers")  # which `--json` takes
def test_a_hidden_run_is_found_by_its_name_and_named_where_it_could_be_meant(
    tmp_path: Path, capfd: Capture
) -> None:
    leave_corrected(tmp_path)
    with pytest.raises(ConfigError, match=r"none of 4 runs has lr=2; 5 more are hidden.* --all"):
        report.main([str(tmp_path), "--filter", "lr=2"])
    assert report.main([str(tmp_path), "--filter", "lr=2", "--all"]) == 0
    report.main([str(tmp_path / "lr=2,seed=0")])
    shown = capfd.readouterr().out
    assert "lr=2,seed=0" in shown
    with terminal.document(wanted=True):
        report.main([str(tmp_path), "--filter", "lr=3", "--csv", str(tmp_path / "x.csv")])
    document = json.loads(capfd.readouterr().out)
    assert [len(document[name]) for name in ("runs", "hidden")] == [2, 5]


@pytest.mark.parametrize(("tag", "choose"), [("accuracy/val", max), ("loss/val", min)])
def test_a_failed_run_is_never_the_best(tmp_path: Path, tag: str, choose: Any) -> None:
    leave_run(tmp_path, "lr=0", status=FAILED, error="refused", config={}, objective=tag)
    for lr, value in enumerate((0.5, float("nan"), 0.5), 1):
        leave_run(tmp_path, f"lr={lr}", value, objective=tag)
    update_result(RunPaths(tmp_path / "lr=3"), status=FAILED)  # after its best epoch
    for name in ("lr=0", "lr=4"):
        create_result(RunPaths(tmp_path / name), may_exist=True, error="refused")
        update_result(RunPaths(tmp_path / name), status=FAILED)
    (tmp_path / "multirun.yaml").touch()
    runs = expt.list_runs(tmp_path)
    assert len(runs) == 5
    for ordered in (runs, runs[::-1]):
        assert choose(ordered, key=lambda run: run.objective).folder.name == "lr=1"
    assert runs.best.folder.name == "lr=1"
    assert runs.best.repetitions[0].folder.name == "lr=1"


def test_of_equal_settings_the_first_row_is_the_best(tmp_path: Path) -> None:
    for lr in (1, 2):
        leave_run(tmp_path, f"lr={lr}", 0.5)
    (tmp_path / "multirun.yaml").touch()
    runs = expt.list_runs(tmp_path)
    for ordered in (runs, Runs(runs[::-1])):
        assert ordered.best.folder.name == "lr=1"


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("repetitions", [1, 3, 4])
def test_of_seeds_that_a_filter_chooses_no_other_is_missing(
    tmp_path: Path, repetitions: int, capfd: Capture
) -> None:
    leave_seeds(tmp_path, 1, 0.9, 0.3, 0.3)
    leave_seeds(tmp_path, 2, 0.5, None, 0.5)
    (tmp_path / GRID_RECORD).write_text(json.dumps({"repetitions": repetitions}))

    def statuses(*filters: str) -> list[str]:
        words = [word for each in filters for word in ("--filter", each)]
        report.main([str(tmp_path), *words])
        lines = capfd.readouterr().out.splitlines()[1:3]
        return [re.split(r"\s{2,}", line)[2] for line in lines]

    assert statuses("seed=0") == [COMPLETED, COMPLETED]
    assert statuses("seed!=2") == [COMPLETED, "1 of 2 completed"], "one has failed"
    of = max(repetitions, 3)
    expected = [COMPLETED if of == 3 else "3 of 4 completed", f"2 of {of} completed"]
    assert statuses("accuracy/val>0") == expected, "which chooses whole settings"
    with terminal.document(wanted=True):
        report.main([str(tmp_path), "--filter", "seed=0"])
    best = json.loads(capfd.readouterr().out)["best"]
    assert (best["mean"], best["counted"], best["repetitions"]) == (0.9, 1, 1)


def test_a_filter_keeps_columns_means_and_order(tmp_path: Path, capfd: Capture) -> None:
    leave_seeds(tmp_path, 1, 0.9, 0.3)
    leave_seeds(tmp_path, 2, 0.5, 0.5)
    leave_seeds(tmp_path, 3, 0.7, 0.7)

    def rows(*filters: str) -> list[list[str]]:
        report.main([str(tmp_path), *(word for each in filters for word in ("--filter", each))])
        lines = capfd.readouterr().out.splitlines()
        end = next(at for at, line in enumerate(lines) if line.startswith("shown"))
        found, notes = lines[1:end], [line for line in lines if line.strip() == leaderboard.SPREAD]
        assert len(notes) == (filters != ("seed=0",)), "where a row has several runs"
        return [line.split()[:2] for line in found if line not in notes]

    assert rows("lr!=3") == [["1", "0.6000"], ["2", "0.5000"]]
    assert rows("lr=2") == [["2", "0.5000"]], "with its column"
    assert rows("accuracy/val>0.6") == [["3", "0.7000"], ["1", "0.6000"]], "with its worse seed"
    assert rows("seed=0") == [["1", "0.9000"], ["3", "0.7000"], ["2", "0.5000"]]
