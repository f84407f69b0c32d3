"""A worker raises, dies, leaves or hangs, or its driver dies: real processes, real signals."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from expt.runs.paths import RunPaths, is_held
from expt.worker.fault import VARIABLE
from tests.facade import Process, RunFolder, alive, as_typed, children_of, run, start, start_cold
from tests.faults.conftest import Failing
from tests.faults.running import LONG, listening, ranks, training, wait_until


def test_the_failing_ranks_traceback_is_the_error(tmp_path: Path) -> None:
    done = run(*LONG, cwd=tmp_path, **{VARIABLE: "1:70:raise"})
    assert done.returncode == 1
    assert done.stderr.endswith(
        "to continue from its last checkpoint: python -m expt hydra.run.dir=here resume=auto\n"
    )
    assert "rank 1 of 2 raised" in done.stderr
    assert done.stderr.count("RuntimeError: a fault on purpose") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "Connection closed" not in done.stderr
    assert "RuntimeError: a fault on purpose" in (tmp_path / "here/logs/0/1/stderr.log").read_text()
    assert RunFolder(tmp_path / "here").result["status"] == "failed"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("1:30:kill", "rank 1 of 2 was killed by SIGKILL (out of memory?)"),
        ("0:30:exit0", "rank 0 of 2 exited with code 0 before it had completed"),
    ],
)
def test_worker_end_is_reported(what: str, text: str, tmp_path: Path, failing: Failing) -> None:
    error = failing(what, "log_every=5")
    assert error.exit_code == 1
    assert text in str(error)
    left = RunFolder(tmp_path / "here")
    assert left.result["status"] == "failed"
    assert text in left.result["error"]
    assert [step for step, _ in left.curve("running/loss")] == [5, 10, 15, 20, 25], "logged is kept"


@pytest.mark.parametrize("begin", [start, pytest.param(start_cold, marks=pytest.mark.slow)])
def test_a_killed_driver_leaves_no_process(tmp_path: Path, begin: Callable[..., Process]) -> None:
    process, children = training(tmp_path, begin=begin)
    assert len(ranks(children)) == 2
    listeners = listening({process.pid, *children})
    assert listeners, "the store listens"
    assert {address for address, _ in listeners} <= {"127.0.0.1", "::1"}, "for this machine alone"
    pids = ",".join(map(str, children))
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", pids], capture_output=True, text=True)
    titles = sorted(line.strip() for line in shown.stdout.splitlines())
    assert titles[-2:] == ["expt rank 0/2 here", "expt rank 1/2 here"]
    assert f"expt forkserver of {process.pid}" in titles
    process.kill()
    process.communicate()
    wait_until(lambda: not alive(children), timeout_s=2)
    wait_until(lambda: not is_held(RunPaths(tmp_path / "here")))  # their threads end a moment later
    assert RunFolder(tmp_path / "here").result["status"] == "running", "it could not say more"
    report = run("report", "here", cwd=tmp_path)
    assert " lost " in report.stdout
    assert "to continue: python -m expt hydra.run.dir=here resume=auto\n" in report.stdout


def test_stopped_worker_ends_with_its_driver_and_frees_the_folder(tmp_path: Path) -> None:
    process, children = training(tmp_path)
    workers, paths = ranks(children), RunPaths(tmp_path / "here")
    os.kill(workers[0], signal.SIGSTOP)
    process.kill()
    process.communicate()
    wait_until(lambda: not alive({*workers.values()}))
    wait_until(lambda: not is_held(paths))


def _forkserver(driver: int) -> int:
    """The child of the driver that has the workers as children."""
    (pid,) = (pid for pid in children_of(driver) if children_of(pid))
    return pid


def test_killed_forkserver_ends_all_workers_and_is_reported(tmp_path: Path) -> None:
    process, children = training(tmp_path)
    os.kill(_forkserver(process.pid), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert (
        "the process that all workers are forked from was killed (out of memory?), and all workers"
        " with it" in err
    )
    assert not alive(set(ranks(children).values()))
    assert RunFolder(tmp_path / "here").result["status"] == "failed"


@pytest.mark.slow
def test_that_process_is_started_again_for_the_runs_that_follow(tmp_path: Path) -> None:
    words = (
        "-m",
        *as_typed("seed=0,1,2 epochs=2 world_size=1 hydra.sweep.dir=sweep"),
        *as_typed("hydra.launcher.retries=1"),
    )
    process = start(*words, cwd=tmp_path)
    wait_until((tmp_path / "sweep" / "seed=0" / "metrics.jsonl").exists, process)
    os.kill(_forkserver(process.pid), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    expected = {"seed=0", "seed=1", "seed=2"}
    assert {path.parent.name for path in tmp_path.glob("sweep/*/result.json")} == expected
