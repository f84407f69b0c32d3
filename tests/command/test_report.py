"""`expt report`: runs listed, filtered, sorted and compared, and the table of a sweep."""

import csv
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expt.command import report as report_command
from expt.command.report import Found, main, parse
from expt.errors import ConfigError
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, update_result
from expt.runs.view import curves
from expt.runs.view.text import Console
from tests.dashboards.folders import record
from tests.facade import Capture, Patch, environment, record_points
from tests.runs.test_leaderboard import leave_run

Told = Callable[..., list[str]]


def leave(
    folder: Path, started: float, accuracy: float | None, model: str = "mlp", **more: Any
) -> None:
    """A run as it stands in its result.json; completed if it has an accuracy."""
    config = {
        "task": {"name": "classification"},
        "model": {"name": model},
        "dataset": {"name": "digits"},
        "optimizer": {"lr": more.pop("lr", 0.1)},
        "objective": "accuracy/val",
    }
    if accuracy is not None:
        kept = {"val": accuracy - 0.01, "test": accuracy - 0.02}
        metrics = {f"accuracy/{split}": value for split, value in kept.items()}
        more |= {"status": COMPLETED, "metrics": {**metrics, "loss/val": 1 - accuracy}}
        more["best"] = {"metric": "accuracy/val", "value": accuracy, "epoch": 1}
        more["objective"] = {"name": "accuracy/val", "value": accuracy}
        more["epoch_s"] = [30.0, 40.0]
    record(folder, started=started, world_size=2, config=config, identity=str(folder), **more)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Four runs, two of them in a sweep, in the current folder's outputs."""
    leave(tmp_path / "outputs/day/a", 100, 0.9)
    leave(tmp_path / "outputs/day/b", 300, 0.8, "convnet", lr=0.05)
    leave(tmp_path / "outputs/sweeps/s/lr=1", 400, None, status="failed", lr=1)
    leave(tmp_path / "outputs/sweeps/s/lr=2", 200, 0.95, lr=2)
    return tmp_path / "outputs"


@pytest.fixture
def told(capsys: Capture) -> Told:
    """The lines that `python -m expt report WORDS` prints."""

    def tell(*words: str) -> list[str]:
        capsys.readouterr()
        assert main(words) == 0
        return capsys.readouterr().out.splitlines()

    return tell


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["lr=1", "b", "lr=2", "a"]),
        (["--sort", "optimizer.lr"], ["b", "a", "lr=1", "lr=2"]),
        (["--filter", "model=mlp", "--filter", "optimizer.lr>=1"], ["lr=1", "lr=2"]),
        (["--filter", "run=*sweeps*"], ["lr=1", "lr=2"]),
        (["--filter", "accuracy/test<0.9", "--filter", "status!=failed"], ["b", "a"]),
    ],
)
def test_runs_are_chosen_and_sorted(
    outputs: Path, words: list[str], expected: list[str], told: Told
) -> None:
    head, *lines = told(*words)
    assert head.split()[:6] == ["run", "status", "model", "dataset", "workers", "best"]
    assert head.split()[6:] == ["accuracy/val", "accuracy/test", "train", "time"]
    reasons = [line for line in lines if line.startswith("failed ")]
    assert len(reasons) == ("lr=2" in expected)
    table = lines[: len(lines) - len(reasons)]
    assert [line.split()[0].rpartition("/")[2] for line in table] == expected


def test_a_line_says_what_a_person_looks_for(outputs: Path, told: Told) -> None:
    lines = [line.split() for line in told()]
    assert lines[1] == ["outputs/sweeps/s/lr=1", "failed", "mlp", "digits", "2"]
    assert lines[2] == "outputs/day/b completed convnet digits 2 0.8000 0.7800 01:10".split()


def test_lines_are_whole_in_a_narrow_terminal(outputs: Path) -> None:
    wide, narrow = io.StringIO(), io.StringIO()
    found = Found.below(parse([]))
    report_command.report(Console(file=wide, width=1000), parse([]), found)
    report_command.report(Console(file=narrow, width=40), parse([]), found)
    assert narrow.getvalue() == wide.getvalue()


@pytest.mark.slow
def test_a_pipe_that_has_closed_is_no_traceback(outputs: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "expt", "report"]
    done = subprocess.run(
        command, cwd=outputs.parent, env=environment(), stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_csv_holds_every_setting_and_metric(outputs: Path, told: Told) -> None:
    told("--csv", "all.csv")
    text = Path("all.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["run"].rpartition("/")[2] for row in rows] == ["lr=1", "b", "lr=2", "a"]
    assert rows[1]["model"] == "convnet"
    assert rows[1]["optimizer.lr"] == "0.05"
    assert rows[1]["accuracy/test"] == "0.78"
    assert rows[0]["accuracy/test"] == ""
    assert told("--csv", "-") == text.splitlines()


def test_null_setting_is_an_empty_cell_and_can_be_filtered(outputs: Path, told: Told) -> None:
    for name, value in (("c", None), ("d", 5)):
        leave(outputs / "day" / name, 500, 0.5)
        update_result(
            RunPaths(outputs / "day" / name), config={"max_steps": value, "model": {"name": "None"}}
        )
    (row,) = csv.DictReader(
        told("--csv", "-", "--filter", "max_steps=null", "--filter", "model=None")
    )
    assert (row["run"], row["max_steps"], row["model"]) == ("outputs/day/c", "", "None")
    assert ["max_steps", "null", "5"] in [
        line.split() for line in told("outputs/day/c", "outputs/day/d")
    ]


def test_two_runs_side_by_side(outputs: Path, told: Told) -> None:
    lines = [line.split() for line in told("outputs/day/a", "outputs/day/b")]
    assert lines[:3] == [
        ["outputs/day/a", "outputs/day/b", "difference"],
        ["model", "mlp", "convnet"],
        ["optimizer.lr", "0.1", "0.05"],
    ]
    assert ["accuracy/test", "0.8800", "0.7800", "-0.1"] in lines
    assert ["status", "completed", "completed"] in lines
    assert not any(line[:1] == ["dataset"] for line in lines), "what is the same is left out"
    for name, diff in {"a": "", "b": "+width = 2"}.items():
        git: Any = {"commit": name * 40, "diff": diff}
        update_result(RunPaths(outputs / "day" / name), git=git, versions={"torch": name})
    lines = [line.split() for line in told("outputs/day/a", "outputs/day/b")]
    assert ["commit", "a" * 12, "b" * 12, "with", "changes"] in lines
    assert ["versions", "torch", "a", "torch", "b"] in lines


def test_what_is_wrong_is_said_in_one_line(outputs: Path) -> None:
    for words, message in {
        ("--sort", "optimizer.rl"): "Did you mean 'optimizer.lr'",
        ("--filter", "model=vgg"): "none of 4 runs has model=vgg",
        ("--plot", "curves.doc"): "curves.doc",
        ("--csv", "nowhere/runs.csv"): r"^--csv nowhere/runs\.csv: \S*/nowhere is not a folder",
    }.items():
        with pytest.raises(ConfigError, match=message):
            main(words)
    with pytest.raises(ConfigError, match="no such folder"):
        main(["nowhere"])


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--verdict --csv runs.csv", "--csv"),
        ("--verdict --plot curves.png", "--plot"),
        ("--verdict --sort lr", "--sort"),
        ("--verdict --importance", "--importance"),
        ("--importance --csv runs.csv", "--csv"),
        ("--importance --plot curves.png", "--plot"),
        ("--importance --sort lr", "--sort"),
        ("--html page.html --csv -", "--csv"),
        ("--html page.html --verdict", "--html"),
    ],
)
def test_no_option_is_dropped_without_a_word(outputs: Path, words: str, option: str) -> None:
    (outputs / "sweeps/s/multirun.yaml").touch()
    with pytest.raises(ConfigError, match=f"^{option}: "):
        main(["outputs/sweeps/s", *words.split()])


def test_curves_and_a_study_do_not_mix_with_the_table(
    outputs: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(curves, "learning_curves", lambda _, file: file.touch())
    monkeypatch.setattr(report_command, "study_of", lambda *given: given[-1].touch())
    assert main(["--csv", "-", "--plot", "curves.png", "--optuna", "study.log"]) == 0
    told = capsys.readouterr()
    assert len([*csv.DictReader(io.StringIO(told.out))]) == 4
    assert ("curves.png" in told.err, Path("curves.png").exists()) == (True, True)
    assert ("study.log" in told.err, Path("study.log").exists()) == (True, True)


def test_a_legend_names_each_run_once(outputs: Path, told: Told) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        writer = MetricsWriter(RunPaths(outputs / "day" / name))
        for step in (1, 2):
            writer.write(
                step,
                step,
                {f"{metric}/{split}": 0.5 for metric in ("loss", "accuracy") for split in SPLITS},
            )
        writer.close()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        told("outputs/day", "--plot", "curves.svg")
    text = Path("curves.svg").read_text()
    assert [text.count(f">outputs/day/{name}<") for name in ("a", "b")] == [1, 1]
    assert text.count("stroke-dasharray: 4.44,1.92") == 2 * 2 + 2, "of train: 2 runs, 2 panels"


def test_a_legend_names_settings_of_a_sweep(tmp_path: Path, told: Told) -> None:
    """Also of many runs, and of those that are evaluated only."""
    matplotlib = pytest.importorskip("matplotlib")
    for lr, seed in itertools.product(range(30), range(2)):
        leave_run(tmp_path, f"lr={lr},seed={seed}", 0.25, seedless_identity=f"{lr}")
        points = ((step, step, {"accuracy/val": 0.5}) for step in (1, 2))
        record_points(RunPaths(tmp_path / f"lr={lr},seed={seed}"), *points)
    (tmp_path / "multirun.yaml").touch()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        told(str(tmp_path), "--plot", "curves.svg")
    text = Path("curves.svg").read_text()
    assert text.count(">lr=") == 24
    assert text.count(">and 6 more<") == text.count(">lr=3<") == 1
    in_legend = {*re.findall(r"stroke: (#\w+); stroke-width: 1.2", text)}
    assert len(in_legend) == 30, "a colour for each setting, which its seeds share"


SPLITS = ("train", "val", "test")


def test_missing_matplotlib_is_told(outputs: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'expt\[plot\]'"):
        main(["--plot", "x.png"])
    assert capsys.readouterr().out == "", "before anything else is printed"


def test_a_sweep_that_is_running_has_a_leaderboard_already(tmp_path: Path, told: Told) -> None:
    leave_run(tmp_path, "lr=1", 0.25)
    leave_run(tmp_path, "lr=2")
    (tmp_path / "multirun.yaml").touch()  # Hydra's
    (tmp_path / "lr=3").mkdir()
    (tmp_path / "lr=3" / "result.json").touch()  # just created
    expected = [["1", "0.2500", "completed", "3.0", "s"], ["2", "running", "0.0", "s"]]
    assert [line.split() for line in told(str(tmp_path))[1:3]] == expected
    assert (tmp_path / "summary.csv").exists()
    update_result(RunPaths(tmp_path / "lr=2"), metrics={"accuracy/test": 0.75})
    for words, first in ((["--sort", "lr"], "1"), (["--sort", "accuracy/test"], "2")):
        lines = told(str(tmp_path), *words)
        assert [line.split()[0] for line in lines[:2]] == ["lr", first], "it stays a leaderboard"
    with pytest.raises(ConfigError, match=r"--sort accuracy/vla: .* Did you mean 'accuracy/val'"):
        main([str(tmp_path), "--sort", "accuracy/vla"])


def test_a_folder_without_runs_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run; start one with python -m expt"):
        main([str(tmp_path)])
    (tmp_path / "multirun.yaml").touch()
    with pytest.raises(ConfigError, match="this sweep holds no run yet"):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    "malformed",
    [
        {"status": "completed", "metrics": [1]},
        {"status": "completed", "objective": "accuracy"},
        {"status": "completed", "objective": {"name": "accuracy/val"}},
        {"status": "completed", "best": {"value": "high"}},
        {"status": "completed", "epoch_s": ["long"]},
        {"status": "failed", "overrides": ["lr=1"]},
        {"status": "failed", "config": "mlp", "error": 3},
        {"status": "running", "started": "yesterday"},
    ],
)
def test_malformed_record_is_damaged(malformed: dict[str, Any], outputs: Path, told: Told) -> None:
    (outputs / "sweeps/s/lr=1/result.json").write_text(json.dumps(malformed))
    lines = [line.split() for line in told()]
    assert [line[1] for line in lines if line[0].endswith("lr=1")] == ["damaged"]
    (outputs / "sweeps/s/multirun.yaml").touch()
    named = "damaged      outputs/sweeps/s/lr=1/result.json cannot be read, and is not counted"
    assert named in told("outputs/sweeps/s")
    assert len(told("--csv", "-")) == 1 + 4


def test_whose_weights_a_run_began_with_is_said(outputs: Path, told: Told) -> None:
    here = outputs.name
    run = str(outputs / "day" / "a")
    begun: Any = {"file": f"{run}/checkpoints/best", "run": run, "identity": "a", "epoch": 3}
    leave(outputs / "e", 20.0, 0.5, weights_from={"file": "resnet.pt", "identity": None})
    assert f"weights      {here}/e: from resnet.pt" in told(here)
    for at, name in ((21.0, "f"), (22.0, "g")):
        leave(outputs / name, at, 0.5, weights_from={**begun, "which": "best", "average": True})
    about = "(best, epoch 3, moving average)"
    assert f"weights      {here}/g: from {here}/day/a {about}" in told(f"{here}/g")
    assert f"weights      2 runs: from {here}/day/a {about}" in told(here)
