"""Sweeps in which something goes wrong: one run, the command, or the person's mind."""

import contextlib
import json
import math
import os
import random
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[attr-defined]

import expt
from expt.errors import ConfigError, Interrupted, RunFailed
from scripts.stress import carried
from tests.facade import (
    Capture,
    Patch,
    Process,
    RunFolder,
    alive,
    as_typed,
    children_of,
    descendants,
    run,
    start,
)
from tests.faults.running import wait_until
from tests.integration.test_resume import assert_equal
from tests.integration.test_sweep import SMALL, results, spans

# scripts/stress_sweep asks for more, and other seeds
SWEEP_RUNS = int(os.environ.get("EXPT_SWEEP_RUNS", "3"))
SEED = int(os.environ.get("EXPT_SEED", "0"))

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
    """Words for a model that fails, dies or waits, as `model.how` says; its code is in tmp_path."""
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
    assert done.stderr.splitlines()[-1] == "error: 5 of 6 runs failed"
    good = "batch_size=64,how=good"
    assert statuses(tmp_path / "sweep") == {
        f"batch_size={size},how={how}": "completed" if (size, how) == (64, "good") else "failed"
        for size in (63, 64)
        for how in ("good", "raise", "kill")
    }
    table = done.stdout.partition("5 failed\n")[2].splitlines()
    causes = dict(line.strip().split(": ", 1) for line in table if line.startswith("  batch_size"))
    log = "(log: sweep/batch_size=64,how={}/logs/0/1/stderr.log)"
    assert causes.pop(
        "batch_size=64,how=raise"
    ) == "rank 1 of 2 raised: ValueError: this is the cause  " + log.format("raise")
    killed = "rank 1 of 2 was killed by SIGKILL (out of memory?)  "
    assert causes.pop("batch_size=64,how=kill") == killed + log.format("kill")
    assert set(causes.values()) == {
        "batch_size=63: the global batch must be a multiple of 2, for 2 workers; use 62 or 64"
    }
    # Each was reported when it happened, and each cause once more with a command for its first run.
    assert [name for name in causes if name.endswith(" and 2 more")] == [*causes]
    assert done.stdout.count("a multiple of 2, for 2 workers") == 2
    assert done.stdout.count("  as batch_size=63,how=good did\n") == 2
    assert all(done.stdout.count(f"{name}: {cause}") == 1 for name, cause in causes.items())
    assert sum("] failed " in line for line in done.stdout.splitlines()) == 5
    commands = [line.strip().removeprefix("again: ") for line in table if "again: " in line]
    (sweep,) = (shlex.split(command) for command in commands)
    assert sweep == ["python", "-m", "expt", "-m", *faulty, *words]
    commands = [line.partition("that run alone: ")[2] for line in table if " alone: " in line]
    assert len(commands) == 2, "what was refused would be refused again"
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
        keys = {key.rpartition(".")[2] for key in begun.session_start_info.hparams}
        assert {"model", "how", "batch_size"} <= keys
        assert ended.session_end_info.status == (1 if name == good else 2)


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    alone = (*SMALL, "world_size=1")
    process = start("-m", "seed=range(4)", *alone, cwd=tmp_path)

    def completed() -> list[Path]:
        found = (tmp_path / "outputs" / "sweeps").glob("*/*/result.json")
        return [path.parent for path in found if '"completed"' in path.read_text()]

    wait_until(completed, process)
    children = descendants(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not alive(children), timeout_s=2)  # one may complete as it dies
    left = completed()
    assert 1 <= len(left) < 4
    files = {path: path.stat().st_mtime_ns for folder in left for path in folder.rglob("*")}
    again = run("-m", "seed=range(5)", *alone, "hydra.sweep.dir=latest", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert files == {path: path.stat().st_mtime_ns for folder in left for path in folder.rglob("*")}
    (folder,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert statuses(folder) == {f"seed={seed}": "completed" for seed in range(5)}
    assert again.stdout.count("] done before ") == len(left)
    assert again.stdout.count("] done ") == 5, "each once"
    for name, result in results(folder).items():
        files_of_events = list((folder / name).glob("events.out.tfevents.*"))
        assert len(files_of_events) == 1 + ("resumed_from" in result), "killed after a checkpoint"
        steps = [
            json.loads(line)["step"]
            for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps == sorted(steps), f"{name} holds one attempt"


def test_ctrl_c_stops_a_sweep_and_says_how(tmp_path: Path, faulty: tuple[str, ...]) -> None:
    one_by_one = "hydra.launcher.max_concurrent=1"
    words = ("model.how=hold", "seed=0,1", "epochs=2", one_by_one, "hydra.sweep.dir='my sweep'")
    process = start("-m", *faulty, *words, cwd=tmp_path)
    wait_until((tmp_path / "my sweep" / "seed=0" / "metrics.jsonl").exists, process)
    children = descendants(process.pid)
    with pytest.raises(
        ConfigError, match=r"hydra\.sweep\.dir=.*my sweep: another command is at work there"
    ):
        expt.sweep(*faulty, *words[:-1], f"hydra.sweep.dir='{tmp_path / 'my sweep'}'")
    second = run(*faulty[:2], "resume=auto", "hydra.run.dir='my sweep/seed=0'", cwd=tmp_path)
    assert second.returncode == 2
    assert second.stderr.endswith(
        "my sweep/seed=0: another command is at work there; wait for it\n"
    )
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert statuses(tmp_path / "my sweep") == {"seed=0": "interrupted"}
    assert "Traceback" not in err
    assert "] interrupted " in out
    wait_until(lambda: not alive(children), timeout_s=2)
    (command,) = (
        line.partition("to continue: ")[2] for line in err.splitlines() if "to continue: " in line
    )
    (tmp_path / "flag").touch()
    again = run(*shlex.split(command)[3:], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert statuses(tmp_path / "my sweep") == {f"seed={seed}": "completed" for seed in range(2)}
    assert len(list((tmp_path / "my sweep" / "seed=0" / "logs").iterdir())) == 2, "its logs stay"


@pytest.mark.slow
def test_ctrl_c_stops_hydras_own_launcher_too(tmp_path: Path, faulty: tuple[str, ...]) -> None:
    words = (
        *as_typed("model.how=hold seed=0,1 epochs=2 hydra/launcher=basic hydra.sweep.dir=sweep"),
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
def sweep(
    tmp_path: Path, faulty: tuple[str, ...], monkeypatch: Patch
) -> Callable[..., expt.SweepResult]:
    """expt.sweep of the faulty model, into tmp_path/sweep."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *words: expt.sweep(*faulty, *words, f"hydra.sweep.dir='{tmp_path / 'sweep'}'")


def test_a_failed_run_is_tried_again_and_the_others_are_returned(
    tmp_path: Path, sweep: Callable[..., expt.SweepResult], capsys: Capture
) -> None:
    found = sweep("model.how=raise,once", "hydra.launcher.retries=1")
    assert capsys.readouterr().err.endswith(
        "warning: 1 of 2 runs failed: how=raise; `failed` of the result has their errors\n"
    )
    assert [run.folder.name for run in found] == ["how=raise", "how=once"], "in grid order"
    (failed,), (result,) = found.failed, found.completed
    assert found.best.folder == result.folder
    assert "ValueError" in str(failed.error)
    with pytest.raises(
        expt.RunFailed, match=r"^how=raise failed, and has no metrics: .*ValueError"
    ):
        _ = failed.metrics
    assert failed.objective == -math.inf, "the worst"
    assert "how=raise" in repr(found)
    assert "2 runs, 1 failed" in repr(found)
    assert list(found.to_pandas()["status"]) == ["failed", "completed"]
    assert result.folder == tmp_path / "sweep/how=once"
    assert result.objective == result.metrics["best/accuracy/val"]
    assert statuses(tmp_path / "sweep") == {"how=once": "completed", "how=raise": "failed"}
    assert {result["attempts"] for result in results(tmp_path / "sweep").values()} == {2}
    assert len(list((tmp_path / "sweep" / "how=once").glob("events.out.tfevents.*"))) == 1


def test_fail_fast_starts_no_more(tmp_path: Path, sweep: Callable[..., expt.SweepResult]) -> None:
    one_by_one = "hydra.launcher.max_concurrent=1"
    with pytest.raises(RunFailed, match="1 of 4 runs failed, 3 were stopped or not started"):
        sweep("model.how=raise,good", "seed=0,1", "hydra.launcher.fail_fast=true", one_by_one)
    assert statuses(tmp_path / "sweep") == {"how=raise,seed=0": "failed"}


@pytest.mark.slow
def test_fail_fast_counts_complete(sweep: Callable[..., expt.SweepResult], capsys: Capture) -> None:
    sweep("batch_size=64", "seed=0,1")
    found = sweep("batch_size=63,64", "seed=0,1", "hydra.launcher.fail_fast=true")
    assert "1 of 4 runs failed, 1 were stopped or not started" in capsys.readouterr().err
    assert [run.status for run in found][-2:] == ["completed"] * 2


@pytest.mark.cpu("the GPUs are simulated")
@pytest.mark.slow
def test_what_was_refused_is_run_once_it_can(
    tmp_path: Path, sweep: Callable[..., expt.SweepResult], monkeypatch: Patch
) -> None:
    """Run the refused point once the machine has GPUs, and leave nothing of its refusal."""
    monkeypatch.setenv("EXPT_LOCKS", str(tmp_path / "locks"))
    for _ in range(2):
        assert [run.status for run in sweep("gpus=0,2")] == ["completed", "failed"]
        assert statuses(tmp_path / "sweep") == {"gpus=0": "completed", "gpus=2": "failed"}
    monkeypatch.setenv("EXPT_SIMULATED_GPUS", "2")
    assert len(sweep("gpus=0,2")) == 2
    assert statuses(tmp_path / "sweep") == {"gpus=0": "completed", "gpus=2": "completed"}


def test_refused_sweep_leaves_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        expt.sweep("batch_size=63,65")
    assert len(refused.value.problems) == 2
    assert not any(tmp_path.iterdir())
    mine = tmp_path / "mine/batch_size=63/notes.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    with pytest.raises((ConfigError, RunFailed)):
        expt.sweep("batch_size=63,65", "hydra.sweep.dir=mine")
    assert mine.exists()
    with pytest.raises(ConfigError, match="Did you mean 'seed'"):
        expt.sweep("seeds=0,1")
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=abc: input should be a valid number$"):
        expt.sweep("optimizer.lr=0.1,abc")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(ConfigError, match="there is no sweep"):
        expt.sweep("seed=0,1", "hydra.sweep.dir=latest")


@pytest.mark.parametrize(
    "during", ["expt.command.command_line.check_repeated", "expt.command.sweep.wrong_values"]
)
def test_ctrl_c_before_the_first_run(during: str, tmp_path: Path, monkeypatch: Patch) -> None:
    def press(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(during, press)
    with pytest.raises(
        Interrupted, match=r"^interrupted before a run began; type the command again$"
    ):
        expt.sweep("seed=0,1")
    assert not any(tmp_path.iterdir())


READER = """
import os, signal, torch
from pathlib import Path
from torch.utils.data import Dataset, get_worker_info
class Samples(Dataset):
    def __init__(self, train):
        self.flag = Path(__file__).with_name("flag")
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 33 and get_worker_info() and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((1, 8, 8), index / 64), index % 2
"""


@pytest.mark.slow
def test_a_trial_whose_reading_process_was_killed_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READER)
    dataset = "dataset={_target_: reader.Samples, num_classes: 2, num_workers: 1}"
    words = "search=random search.runs=2 optimizer.lr=interval(0.01,0.1) epochs=1 batch_size=16"
    done = run("-m", dataset, *as_typed(words), "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "sweep").values()
    expected = [("completed", 1), ("completed", 2)]
    assert sorted((each["status"], each["attempts"]) for each in found) == expected


def _workers_of(process: Process, folder: Path) -> Iterator[tuple[str, int, int]]:
    """Run, rank and pid of each worker, without its readers, in its run's first attempt."""
    logs = dict[int, Path]()
    for pid in descendants(process.pid):
        with contextlib.suppress(OSError):
            logs[pid] = Path(os.readlink(f"/proc/{pid}/fd/1"))
    named = {pid: log for pid, log in logs.items() if log.name == "stdout.log"}
    readers = {reader for worker in named for reader in children_of(worker)}
    for pid in named.keys() - readers:
        log = named[pid]
        if log.is_relative_to(folder) and log.parts[-3] == "0":
            yield log.parts[-5], int(log.parts[-2]), pid


def _kill_some(process: Process, folder: Path, wanted: int, longest_s: float) -> set[str]:
    """Kill a worker of `wanted` runs at random moments of first attempts; return the runs."""
    dice, due = random.Random(SEED), dict[str, tuple[float, int]]()
    spared, killed = set[str](), set[str]()
    while process.poll() is None and len(killed) < wanted:
        now = time.monotonic()
        for run_name, rank, pid in _workers_of(process, folder):
            if run_name not in due and run_name not in spared:
                left = SWEEP_RUNS - len(due) - len(spared)
                if dice.random() < 0.4 or left <= wanted - len(killed):
                    due[run_name] = now + dice.uniform(0, longest_s), dice.randrange(2)
                else:
                    spared.add(run_name)
            at, victim = due.get(run_name, (math.inf, 0))
            if rank == victim and now >= at and run_name not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(run_name)
        time.sleep(0.002)
    return killed


GRID_OR_SEARCH = {
    "a grid": f"seed=range({SEED},{SEED + SWEEP_RUNS})",
    # One by one, else trials depend on what ends first
    "a search": f"search=tpe search.runs={SWEEP_RUNS} search.seed={SEED} "
    "optimizer.lr=tag(log,interval(0.001,0.3)) hydra.launcher.max_concurrent=1",
}
CARRIED = "task=warmed_up dataset=open_file dataset.folder=. dataset.num_workers=2"
"""A task with state, and samples that two processes read from an open file."""


@pytest.mark.slow
@pytest.mark.parametrize("words", GRID_OR_SEARCH.values(), ids=GRID_OR_SEARCH)
def test_sweep_survives_random_kills(words: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    carried.write(tmp_path)
    more = "model.dropout=0.3 epochs=3 threads=1 checkpoint.every_steps=7"
    given = as_typed(f"{words} {CARRIED} {more}")
    whole = expt.sweep(*given, f"hydra.sweep.dir='{tmp_path / 'whole'}'")
    lasted = sorted(end - begin for begin, end, _ in spans(tmp_path / "whole"))
    process = start("-m", *given, "max_restarts=2", "hydra.sweep.dir=sweep", cwd=tmp_path)
    wanted = max(1, SWEEP_RUNS // 5)
    killed = _kill_some(process, tmp_path / "sweep", wanted, longest_s=lasted[len(lasted) // 2])
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert killed
    found = results(tmp_path / "sweep")
    assert found.keys() == {run_folder.folder.name for run_folder in whole}
    for name, result in found.items():
        assert (result["status"], result["attempts"]) == ("completed", 2 if name in killed else 1)
    resumed = sum("resumed_from" in result for result in found.values())
    print(f"{SWEEP_RUNS} runs, {len(killed)} of them killed: {resumed} continued")
    for run_folder in whole:
        assert_equal(
            RunFolder(tmp_path / "sweep" / run_folder.folder.name), RunFolder(run_folder.folder)
        )
