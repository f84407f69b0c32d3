"""Sweeps in which something goes wrong: one run, the command, or the person's mind."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[attr-defined]

import expt
from expt.errors import ConfigError, RunFailed
from tests.conftest import alive, descendants, run, start
from tests.faults.running import wait_until
from tests.integration.test_sweep import SMALL, results

FAULTY = """
import os, signal, time, torch
from pathlib import Path
from expt import signals
class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes, how, flag=""):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
        self.how, self.flag, self.steps = how, Path(flag), 0
    def forward(self, images):
        self.steps += 1
        if self.steps == 3 and os.environ["RANK"] == "1":
            if self.how == "once" and not self.flag.exists():
                self.flag.touch()
                raise ValueError("only the first time")
            if self.how == "raise":
                raise ValueError("this is the cause")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while self.how == "hold" and not self.flag.exists() and not signals.asked():
                time.sleep(0.01)
        return super().forward(images)
"""


@pytest.fixture
def faulty(tmp_path: Path) -> tuple[str, ...]:
    """What to type for a model that fails, dies or waits, as `model.how` says; its code is in tmp_path."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    content = f"_target_: faulty.Net\nhow: good\nflag: {tmp_path / 'flag'}\n"
    (tmp_path / "my_conf" / "model" / "faulty.yaml").write_text(content)
    return ("--config-dir", str(tmp_path / "my_conf"), "model=faulty", *SMALL)


def statuses(folder: Path) -> dict[str, str]:
    return {name: result["status"] for name, result in results(folder).items()}


def test_failures_stay_where_they_are(tmp_path: Path, faulty: tuple[str, ...]) -> None:
    words = ("model.how=good,raise,kill", "batch_size=64,63", "hydra.sweep.dir=sweep")
    done = run("-m", *faulty, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: 5 of 6 runs failed\n"
    good = "batch_size=64,how=good"
    assert statuses(tmp_path / "sweep") == {
        f"batch_size={size},how={how}": "completed" if (size, how) == (64, "good") else "failed"
        for size in (63, 64)
        for how in ("good", "raise", "kill")
    }
    table = done.stdout.partition("5 failed\n")[2].splitlines()
    causes = dict(line.strip().split(": ", 1) for line in table if line.startswith("  batch_size"))
    log = "(log: sweep/batch_size=64,how={}/logs/0/1/stderr.log)"
    assert causes.pop("batch_size=64,how=raise") == "rank 1 of 2 raised: ValueError: this is the cause  " + log.format(
        "raise"
    )
    killed = "rank 1 of 2 was killed by SIGKILL (out of memory?)  "
    assert causes.pop("batch_size=64,how=kill") == killed + log.format("kill")
    assert set(causes.values()) == {"batch_size=63: is the global batch and must divide by 2 workers; use 62 or 64"}
    # Each was reported when it happened, and again at the end with the command that runs it alone.
    assert all(done.stdout.count(f"{name}: {cause}") == 1 for name, cause in causes.items())
    assert sum("] failed " in line for line in done.stdout.splitlines()) == 5
    commands = [line.strip().removeprefix("again: ") for line in table if "again: " in line]
    assert len(commands) == 5
    (raising,) = (command for command in commands if "model.how=raise batch_size=64" in command)
    again = run(*shlex.split(raising)[3:], cwd=tmp_path)
    assert again.returncode == 1
    assert "ValueError: this is the cause" in again.stderr

    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "sweep")).Reload()
    assert events.Runs().keys() == statuses(tmp_path / "sweep").keys()
    for name in events.Runs():
        assert len(list((tmp_path / "sweep" / name).glob("events.out.tfevents.*"))) == 1
        content = events.GetAccumulator(name).SummaryMetadata
        begun = HParamsPluginData.FromString(content(SESSION_START_INFO_TAG).plugin_data.content)
        ended = HParamsPluginData.FromString(content(SESSION_END_INFO_TAG).plugin_data.content)
        assert {"model", "model.how", "batch_size"} <= {
            key.replace("model.kwargs.how", "model.how") for key in begun.session_start_info.hparams
        }
        assert ended.session_end_info.status == (1 if name == good else 2)


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    process = start("-m", "seed=range(12)", *SMALL, cwd=tmp_path)

    def completed() -> list[Path]:
        found = (tmp_path / "outputs" / "sweeps").glob("*/*/result.json")
        return [path.parent for path in found if '"completed"' in path.read_text()]

    wait_until(lambda: len(completed()) >= 5, process)
    children = descendants(process.pid)
    process.kill()
    process.communicate()
    left = completed()
    assert 5 <= len(left) < 12
    files = {path: path.stat().st_mtime_ns for folder in left for path in folder.rglob("*")}
    again = run("-m", "seed=range(14)", *SMALL, "hydra.sweep.dir=latest", cwd=tmp_path)
    assert not alive(children), "no worker of the first command outlives it"
    assert again.returncode == 0, again.stderr
    assert files == {path: path.stat().st_mtime_ns for folder in left for path in folder.rglob("*")}
    (folder,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert statuses(folder) == {f"seed={seed}": "completed" for seed in range(14)}
    assert again.stdout.count("] done before ") == len(left)
    assert all(len(list(path.glob("events.out.tfevents.*"))) == 1 for path in folder.glob("seed=*"))
    for name in statuses(folder):
        steps = [json.loads(line)["step"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps), f"{name} holds one attempt"


def test_ctrl_c_stops_the_sweep_and_says_how_to_go_on(tmp_path: Path, faulty: tuple[str, ...]) -> None:
    words = ("model.how=hold", "seed=0,1,2", "epochs=2", "hydra.sweep.dir='my sweep'")
    process = start("-m", *faulty, *words, cwd=tmp_path)
    wait_until((tmp_path / "my sweep" / "seed=0" / "metrics.jsonl").exists, process)
    children = descendants(process.pid)
    second = run("-m", *faulty, *words, cwd=tmp_path)
    assert second.returncode == 2
    assert second.stderr.startswith("error: hydra.sweep.dir=my sweep: another command is at work there")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert statuses(tmp_path / "my sweep") == {"seed=0": "interrupted"}
    assert "Traceback" not in err
    assert "] interrupted " in out
    wait_until(lambda: not alive(children), timeout_s=2)
    (command,) = (line.partition("to go on: ")[2] for line in err.splitlines() if "to go on: " in line)
    (tmp_path / "flag").touch()
    again = run(*shlex.split(command)[3:], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert statuses(tmp_path / "my sweep") == {f"seed={seed}": "completed" for seed in range(3)}
    assert len(list((tmp_path / "my sweep" / "seed=0" / "logs").iterdir())) == 2, "the first attempt's logs are kept"


def test_ctrl_c_stops_hydras_own_launcher_too(tmp_path: Path, faulty: tuple[str, ...]) -> None:
    words = (
        "model.how=hold",
        "seed=0,1",
        "hydra/launcher=basic",
        "hydra.sweep.dir=sweep",
        "hydra.sweep.subdir=${seed}",
    )
    process = start("-m", *faulty, *words, cwd=tmp_path)
    wait_until((tmp_path / "sweep" / "0" / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert statuses(tmp_path / "sweep") == {"0": "interrupted"}, "no further run has started"


@pytest.fixture
def sweep(tmp_path: Path, faulty: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[expt.Result]]:
    """expt.sweep of the faulty model, into tmp_path/sweep."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *words: expt.sweep(*faulty, *words, f"hydra.sweep.dir='{tmp_path / 'sweep'}'")


def test_a_failed_run_is_tried_again(tmp_path: Path, sweep: Callable[..., list[expt.Result]]) -> None:
    with pytest.raises(RunFailed, match="1 of 2 runs failed"):
        sweep("model.how=once,raise", "hydra.launcher.retries=1")
    assert statuses(tmp_path / "sweep") == {"how=once": "completed", "how=raise": "failed"}
    assert {result["attempts"] for result in results(tmp_path / "sweep").values()} == {2}
    assert len(list((tmp_path / "sweep" / "how=once").glob("events.out.tfevents.*"))) == 1


def test_fail_fast_starts_no_further_run(tmp_path: Path, sweep: Callable[..., list[expt.Result]]) -> None:
    with pytest.raises(RunFailed, match="1 of 4 runs failed, 3 were stopped or not started"):
        sweep("model.how=raise,good", "seed=0,1", "hydra.launcher.fail_fast=true")
    assert statuses(tmp_path / "sweep") == {"how=raise,seed=0": "failed"}


def test_what_was_refused_is_run_once_it_can(
    tmp_path: Path, sweep: Callable[..., list[expt.Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that has got its GPUs back; the refused point neither stands in the way nor stays behind."""
    monkeypatch.setenv("EXPT_LOCKS", str(tmp_path / "locks"))
    for _ in range(2):
        with pytest.raises(RunFailed, match="1 of 2 runs failed"):
            sweep("gpus=0,2")
        assert statuses(tmp_path / "sweep") == {"gpus=0": "completed", "gpus=2": "failed"}
    monkeypatch.setenv("EXPT_SIMULATED_GPUS", "2")
    assert len(sweep("gpus=0,2")) == 2
    assert statuses(tmp_path / "sweep") == {"gpus=0": "completed", "gpus=2": "completed"}


def test_a_sweep_that_is_refused_as_a_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        expt.sweep("batch_size=63,65")
    assert len(refused.value.problems) == 2
    assert list((tmp_path / "outputs" / "sweeps").iterdir()) == []
    with pytest.raises(ConfigError, match="Did you mean 'seed'"):
        expt.sweep("sed=0,1")
    with pytest.raises(ConfigError, match="there is no sweep"):
        expt.sweep("seed=0,1", "hydra.sweep.dir=latest")
