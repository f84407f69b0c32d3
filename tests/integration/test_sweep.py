"""Sweeps that go well: what they leave, how they share a machine, and who may look on."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command.hydra_part import is_sweep, named_axes
from expt.command.rerun import NOT_REPEATED
from expt.command.sweep import Grid
from expt.config import conf_dir
from expt.config.parse import parse
from expt.errors import ConfigError
from expt.machine import Machine
from tests.composing import composer
from tests.facade import Capture, Patch, run, start
from tests.faults.running import wait_until

SMALL = ("epochs=1", "dataset.train_limit=320")
GRID = ("model=mlp,convnet", "optimizer.lr=0.1,0.01", "world_size=1", *SMALL)
NAMES = {f"lr={lr},model={model}" for lr in ("0.1", "0.01") for model in ("mlp", "convnet")}

SWEEP = "sweep[1]"
"""A folder whose name would be a pattern of others."""

RECORDER = """
from pathlib import Path
from hydra.experimental.callback import Callback
class Recorder(Callback):
    def write(self, *words):
        with Path("seen.txt").open("a") as file:
            print(*words, file=file)
    def on_multirun_start(self, config, **kwargs):
        self.write("multirun start")
    def on_multirun_end(self, config, **kwargs):
        self.write("multirun end")
    def on_job_start(self, config, *, task_function, **kwargs):
        self.write("start", config.hydra.sweep.subdir)
    def on_job_end(self, config, job_return, **kwargs):
        self.write("end", config.hydra.sweep.subdir, job_return.status.name)
"""


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """result.json of each run of a sweep, by the name of its folder."""
    return {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(folder.glob("*/result.json"))
    }


def spans(folder: Path) -> list[tuple[float, float, list[str]]]:
    """When each run of a sweep started and ended, and on which devices."""
    ended = {name: (folder / name / "result.json").stat().st_mtime for name in results(folder)}
    found = results(folder).items()
    return [(each["started"], ended[name], each["devices"]) for name, each in found]


def most_at_once(times: Sequence[tuple[float, float, list[str]]], device: str | None = None) -> int:
    """The largest number of runs at any moment; of those on `device`."""
    own = [(start, end) for start, end, devices in times if device in (None, *devices)]
    return max((sum(start <= moment < end for start, end in own) for moment, _ in own), default=0)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a complete sweep of two models and two learning rates, with a callback."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "recorder.py").write_text(RECORDER)
    (folder / "my_conf" / "hydra" / "callbacks").mkdir(parents=True)
    (folder / "my_conf" / "hydra" / "callbacks" / "mine.yaml").write_text(
        "mine:\n  _target_: recorder.Recorder\n"
    )
    own = ("--config-dir", "my_conf", "hydra/callbacks=mine", f"hydra.sweep.dir='{SWEEP}'")
    done = run("-m", *own, *GRID, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout)
    return folder


def test_folders_say_what_differs_and_the_summary_holds_every_run(grid: Path) -> None:
    found = results(grid / SWEEP)
    assert found.keys() == NAMES
    assert {result["status"] for result in found.values()} == {"completed"}
    with (grid / SWEEP / "summary.csv").open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert rows.keys() == NAMES
    for name, row in rows.items():
        assert f"lr={row['optimizer.lr']},model={row['model']}" == name
        assert float(row["objective"]) == pytest.approx(found[name]["objective"]["value"], rel=1e-5)
        assert (grid / SWEEP / name / ".hydra" / "overrides.yaml").exists()
    markdown = (grid / SWEEP / "summary.md").read_text().splitlines()
    values = [float(line.split("|")[3]) for line in markdown[2:]]
    assert values == sorted(values, reverse=True)
    lines = (grid / "stdout.txt").read_text().splitlines()
    assert [line.split()[1] for line in lines[1:5]] == ["done"] * 4


def test_hydras_callbacks_see_every_run(grid: Path) -> None:
    seen = (grid / "seen.txt").read_text().splitlines()
    assert (seen[0], seen[-1]) == ("multirun start", "multirun end")
    assert sorted(seen[1:-1]) == sorted(
        [*(f"start {name}" for name in NAMES), *(f"end {name} COMPLETED" for name in NAMES)]
    )
    assert all(seen.index(f"start {name}") < seen.index(f"end {name} COMPLETED") for name in NAMES)


@pytest.mark.slow
def test_hydras_own_launcher_gives_the_same_numbers(grid: Path, tmp_path: Path) -> None:
    done = run("-m", *GRID, "hydra/launcher=basic", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {(result["overrides"]["model"], result["overrides"]["optimizer.lr"]): result
             for result in results(tmp_path / "sweep").values()}  # fmt: skip
    for result in results(grid / SWEEP).values():
        other = found[result["overrides"]["model"], result["overrides"]["optimizer.lr"]]
        assert other["identity"] == result["identity"]
        assert other["objective"] == result["objective"]
        for tag, value in result["metrics"].items():
            assert tag.startswith(NOT_REPEATED) or other["metrics"][tag] == value, tag


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_gpus(tmp_path: Path) -> None:
    """Each would start on GPU 0 by itself."""
    machine = {"EXPT_SIMULATED_GPUS": "3", "EXPT_LOCKS": str(tmp_path / "locks")}
    words = ("-m", "gpus=1,2", "seed=0,1", "batch_size=60", "dataset.train_limit=320")
    first = start(*words, "epochs=10", "hydra.sweep.dir=a", cwd=tmp_path, **machine)
    wait_until(lambda: [*tmp_path.glob("a/*/metrics.jsonl")])
    both = [first, start(*words, "epochs=1", "hydra.sweep.dir=b", cwd=tmp_path, **machine)]
    said = ""
    for process in both:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        said += out
    assert "in use by another expt command" in said
    a, b = spans(tmp_path / "a"), spans(tmp_path / "b")
    assert sorted(len(devices) for _, _, devices in a) == [1, 1, 2, 2]
    for device in "012":
        assert most_at_once([*a, *b], device) == 1
    assert most_at_once([*a, *b]) > 1


def test_a_dry_run_starts_nothing(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert expt.sweep("seed=0,1", "batch_size=64,63", "hydra.launcher.dry_run=true") == []
    shown = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    names = [f"batch_size={size},seed={seed}" for seed in (0, 1) for size in (64, 63)]
    assert [words[1] for words in shown[:4]] == names
    able = [words for words in shown if "64" in words[1]]
    assert all(len(words[2]) == 12 and words[3].split()[-1] == "start" for words in able)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", sorted((conf_dir() / "sweep").glob("*.yaml")), ids=lambda path: path.stem
)
def test_each_grid_that_is_shipped_can_run(path: Path) -> None:
    assert path.read_text().splitlines()[1] == f"# python -m expt sweep={path.stem}"
    named = f"sweep={path.stem}"
    composed = composer().compose([named])
    assert is_sweep(composed)
    grid = Grid([named, *named_axes(composed)], composer())
    assert len(grid) > 1
    for words in grid:
        parse(composer().settings(words, sweep=True), Machine(gpus=tuple("01234567"), cpus=8))


@pytest.mark.parametrize("folder", ["sweep", "sweep/more"])
def test_run_in_a_sweep_folder_and_reverse_are_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "multirun.yaml").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir"):
        expt.run(f"hydra.run.dir='{tmp_path / folder}'")
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir"):
        expt.sweep("seed=1,2", f"hydra.sweep.dir='{tmp_path / folder.replace('sweep', 'run')}'")
    assert {path.name for path in tmp_path.rglob("*")} <= {
        *("sweep", "multirun.yaml", "run", "result.json", "more", ".lock")
    }
