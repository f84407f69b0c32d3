"""A run that is asked to stop saves and says so; one whose worker dies starts again by itself."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from expt.runs import checkpoint_file
from expt.signals import ASK_WORKER, GRACE_S, IMPATIENT_S
from expt.worker.fault import VARIABLE
from tests.conftest import Trained
from tests.facade import Process, RunFolder, alive, run, start, start_cold, state
from tests.faults.running import ranks, training, wait_until, waits_for
from tests.integration.test_resume import assert_equal


@pytest.mark.parametrize(
    "whole_group",
    [
        pytest.param(True, id="as the terminal sends it"),
        pytest.param(False, id="to the driver alone", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("begin", [start, pytest.param(start_cold, marks=pytest.mark.slow)])
def test_ctrl_c_stops_everything(
    tmp_path: Path, begin: Callable[..., Process], whole_group: bool
) -> None:
    process, children = training(tmp_path, begin=begin)
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err
    wait_until(lambda: not alive(children), timeout_s=2)
    assert RunFolder(tmp_path / "here").result["status"] == "interrupted"
    checkpoint_file.check(tmp_path / "here" / "checkpoints" / "last.safetensors")


@pytest.mark.parametrize(
    ("asked", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    asked: signal.Signals, code: int, tmp_path: Path, trained: Trained
) -> None:
    process, children = training(tmp_path)
    if asked == signal.SIGHUP:
        os.killpg(process.pid, asked)  # as the terminal sends it
    else:
        process.send_signal(asked)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    assert "resume=auto" in err
    wait_until(lambda: not alive(children), timeout_s=2)
    stopped = RunFolder(tmp_path / "here")
    assert (stopped.result["status"], stopped.result["resumable"]) == ("interrupted", True)
    last = max(step for step, _ in stopped.curve("running/loss"))
    trained("resume=auto", f"epochs={last // 20 + 2}", name="here")
    assert stopped.result["resumed_from"]["step"] >= last
    steps = [step for step, _ in stopped.curve("running/loss")]
    assert steps == sorted(set(steps))


def _stuck(tmp_path: Path) -> tuple[Process, set[int]]:
    """A run of which rank 0 waits in a collective, and rank 1 will not come."""
    process, children = training(tmp_path)
    stopped = ranks(children)[1]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(
        lambda: state(stopped) == "T", process
    )  # before that it may take a signal that comes later
    return process, children


@pytest.mark.slow
def test_one_that_is_stuck_in_a_collective_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    process, children = _stuck(tmp_path)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=IMPATIENT_S + 5)
    assert time.monotonic() - began > IMPATIENT_S - 1
    assert process.returncode == 130
    assert "Traceback" not in err
    wait_until(lambda: not alive(children), timeout_s=2)
    assert RunFolder(tmp_path / "here").result["status"] == "interrupted"


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    process, children = _stuck(tmp_path)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: waits_for(ranks(children)[1], ASK_WORKER), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=GRACE_S - 5)
    assert process.returncode == 143
    wait_until(lambda: not alive(children), timeout_s=2)


def test_a_run_whose_worker_dies_starts_again_by_itself(tmp_path: Path, trained: Trained) -> None:
    settings = ("model.dropout=0.3", "epochs=3", "threads=1", "checkpoint.every_steps=7")
    words = (*settings, "max_restarts=1", "hydra.run.dir=here")
    done = run(*words, cwd=tmp_path, **{VARIABLE: "1:50:kill:once"})
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr
    restarted = RunFolder(tmp_path / "here")
    assert restarted.result["attempts"] == 2
    assert restarted.result["resumed_from"]["step"] in (35, 40, 42, 49)
    assert {"0", "1"} == set(os.listdir(tmp_path / "here" / "logs"))
    assert_equal(restarted, trained(*settings, name="whole"))
