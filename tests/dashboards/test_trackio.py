"""trackio, as it stores runs on this machine."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.facade import Patch, RunFolder, python, run

pytest.importorskip("trackio", exc_type=ImportError)

QUICK = ("model=mlp", "hydra.run.dir=run", "trackio.project=tests", "tensorboard.norms=false")
LOOK = """
import json, trackio
runs = [*trackio.Api().runs("tests")]
print(json.dumps([[each.name, each.config, each.alerts()] for each in runs]))
"""


@pytest.fixture(autouse=True)
def _stored_here(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def runs(folder: Path) -> Any:
    return json.loads(python(LOOK, cwd=folder, TRACKIO_DIR=os.environ["TRACKIO_DIR"]).stdout)


def rows(folder: Path) -> list[tuple[int, dict[str, float]]]:
    with sqlite3.connect(folder / "trackio/tests.db") as database:
        found = database.execute("select step, metrics from metrics order by step, id").fetchall()
    return [(step, json.loads(metrics)) for step, metrics in found]


@pytest.mark.slow
def test_a_run_that_fails_and_is_resumed_has_each_point_once(tmp_path: Path) -> None:
    here = {"TRACKIO_DIR": os.environ["TRACKIO_DIR"]}
    words = (*QUICK, "send=trackio", "epochs=3")
    failed = run(*words, cwd=tmp_path, EXPT_FAULT="0:45:raise", **here)
    assert failed.returncode == 1
    ((name, config, alerts),) = runs(tmp_path)
    assert name.startswith("run-")
    assert (config["optimizer.lr"], config["expt.status"]) == (0.05, "failed")
    assert [each["level"] for each in alerts] == ["error"]
    done = run("hydra.run.dir=run", "resume=auto", cwd=tmp_path, **here)
    assert "trackio show --project tests" in done.stdout, done.stderr
    again = run("send", "run", cwd=tmp_path, **here)
    assert again.stdout.split()[1:2] == ["0"]
    ((_, config, _),) = runs(tmp_path)
    assert config["expt.status"] == "completed"
    for tag in ("loss/train", "accuracy/val", "lr"):
        sent = [(step, row[tag]) for step, row in rows(tmp_path) if tag in row]
        assert sent == RunFolder(tmp_path / "run").curve(tag)


@pytest.mark.slow
def test_runs_of_a_sweep_lie_side_by_side_in_a_group(tmp_path: Path) -> None:
    words = ("-m", "model=mlp", "seed=0,1,2", "epochs=2", "hydra.sweep.dir=grid")
    assert run(*words, cwd=tmp_path).returncode == 0
    here = {"TRACKIO_DIR": os.environ["TRACKIO_DIR"]}
    sent = run("send", "grid", "--to", "trackio", "--project", "tests", cwd=tmp_path, **here)
    assert (sent.stdout.count("\n"), sent.returncode) == (2, 0), sent.stdout + sent.stderr
    assert {(config["seed"], config["_Group"]) for _, config, _ in runs(tmp_path)} == {
        (0, "grid"), (1, "grid"), (2, "grid"),
    }  # fmt: skip
    last = [row["objective"] for _, row in rows(tmp_path) if "objective" in row]
    records = [RunFolder(path).result for path in sorted(tmp_path.glob("grid/seed=*"))]
    assert sorted(last) == sorted(record["objective"]["value"] for record in records)
