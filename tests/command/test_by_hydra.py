"""Runs that Hydra asks for: what a launcher in another process gets, and how a run's end is
told."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from expt.command.by_hydra import HydraTask, _value
from expt.command.run import Command
from expt.command.terminal import console
from expt.launch.job import QUEUED, Job
from expt.launch.launcher import launcher
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, Objective
from tests.facade import run


def test_a_launcher_in_another_process_gets_a_task_of_its_own() -> None:
    known = Command(launcher(), 0.0, console(quiet=True))
    task: Any = pickle.loads(pickle.dumps(HydraTask(known)))
    assert task._command is None


def test_a_run_that_came_to_nothing_is_nan_to_a_sweeper() -> None:
    objective = Objective(name="accuracy/val", value=0.5)
    for status, value in ((FAILED, None), (INTERRUPTED, None), (QUEUED, None), (COMPLETED, 0.5)):
        found = _value(Job(RunPaths(Path("a")), None, status, None, objective if value else None))
        assert found == value or (value is None and found is not None and math.isnan(found))


def test_a_single_run_has_callbacks_too(tmp_path: Path) -> None:
    (tmp_path / "recorder.py").write_text(
        "from hydra.experimental.callback import Callback\n"
        "class Recorder(Callback):\n"
        "    def on_run_start(self, config, **kwargs): print('callback', config.seed)\n"
    )
    (tmp_path / "conf/hydra/callbacks").mkdir(parents=True)
    (tmp_path / "conf/hydra/callbacks/mine.yaml").write_text("it:\n  _target_: recorder.Recorder\n")
    words = ("hydra/callbacks=mine", "seed=3", "epochs=1", "world_size=1", "hydra.run.dir=run")
    done = run("--config-dir", "conf", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("callback 3\n")
    assert (tmp_path / "run/.hydra/overrides.yaml").exists()
    assert (tmp_path / "run/result.json").exists()


@pytest.mark.parametrize("words", ["epocs=3", "model=mpl", "-m seed=1,2", "seed=1,2", "--resolve"])
def test_what_cannot_be_printed_is_refused_in_a_line(words: str, tmp_path: Path) -> None:
    printing = () if words == "--resolve" else ("--cfg", "job")
    done = run(*words.split(), *printing, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
