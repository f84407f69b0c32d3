"""A worker raises, dies, leaves or hangs, or its driver dies: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from expt.worker.fault import VARIABLE
from tests.conftest import RunFolder, alive, run, start_cold
from tests.faults.conftest import Failing
from tests.faults.running import LONG, listening, ranks, training, wait_until


def test_the_failing_ranks_traceback_is_the_error(tmp_path: Path) -> None:
    done = run(*LONG, cwd=tmp_path, **{VARIABLE: "1:70:raise"})
    assert done.returncode == 1
    assert done.stderr.endswith("to go on from its last checkpoint: python -m expt hydra.run.dir=here resume=auto\n")
    assert "rank 1 of 2 raised" in done.stderr
    assert done.stderr.count("RuntimeError: a fault on purpose") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "Connection closed" not in done.stderr
    assert "RuntimeError: a fault on purpose" in (tmp_path / "here/logs/0/1/stderr.log").read_text()
    assert RunFolder(tmp_path / "here").result["status"] == "failed"


def test_a_killed_worker_ends_the_run_with_its_rank_and_signal(tmp_path: Path) -> None:
    process, children = training(tmp_path)
    os.kill(ranks(children)[1], signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - killed < 3
    assert process.returncode == 1
    assert "rank 1 of 2 was killed by SIGKILL (out of memory?)" in err
    assert f"log: {tmp_path / 'here'}/logs/0/1/stderr.log" in err
    wait_until(lambda: not alive(children), timeout_s=2)
    result = json.loads((tmp_path / "here" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "SIGKILL" in result["error"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("0:30:kill", "rank 0 of 2 was killed by SIGKILL (out of memory?)"),
        ("1:30:term", "rank 1 of 2 was killed by SIGTERM"),
        ("1:30:exit0", "rank 1 of 2 exited with code 0 before it had completed"),
        ("0:30:exit0", "rank 0 of 2 exited with code 0 before it had completed"),
    ],
)
def test_however_a_worker_ends_the_run_says_which_and_how(
    what: str, text: str, tmp_path: Path, failing: Failing
) -> None:
    error = failing(what, "log_every=5")
    assert error.exit_code == 1
    assert text in str(error)
    left = RunFolder(tmp_path / "here")
    assert left.result["status"] == "failed"
    assert text in left.result["error"]
    assert [step for step, _ in left.curve("running/loss")] == [5, 10, 15, 20, 25], "what was logged before is kept"


def test_a_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    process, children = training(tmp_path, begin=start_cold)
    assert len(ranks(children)) == 2
    listeners = listening({process.pid, *children})
    assert listeners, "the store listens"
    assert {address for address, _ in listeners} <= {"127.0.0.1", "::1"}, "for this machine alone"
    process.kill()
    process.communicate()
    wait_until(lambda: not alive(children), timeout_s=2)
