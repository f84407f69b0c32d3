"""What result.json says of a run under torchrun whose rank 0 could say nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expt.errors import DeviceLost
from expt.launch import last_word
from expt.runs.paths import RunPaths, at_work
from expt.runs.result import COMPLETED, create_result, read_result
from expt.worker.fault import VARIABLE
from tests.facade import environment
from tests.faults.running import wait_until
from tests.launch.test_workers import leave_error

NCCL = (
    "[rank0]:[E] ProcessGroupNCCL.cpp: ... we are taking the entire process down.\nFatal Python"
    " error: Aborted\n"
)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    create_result(found, world_size=2)
    for rank in (0, 1):
        found.stderr(0, rank).parent.mkdir(parents=True)
        found.stderr(0, rank).write_text("")
    return found


def test_the_error_of_another_comes_before_an_abort_by_nccl(paths: RunPaths) -> None:
    paths.stderr(0, 0).write_text(NCCL)
    leave_error(paths, 1, ValueError("its own"), 10)
    last_word.write_end(paths.folder, 0)
    assert "rank 1 of 2 raised" in read_result(paths)["error"]


def test_a_rank_that_aborted_is_named_before_one_that_was_killed_for_it(paths: RunPaths) -> None:
    paths.stderr(0, 1).write_text("Fatal Python error: Segmentation fault\n")
    last_word.write_end(paths.folder, 0)
    assert read_result(paths)["error"].startswith("rank 1 of 2 was killed by SIGSEGV\n")


def test_an_error_of_its_own_comes_before_an_end_without_a_trace(paths: RunPaths) -> None:
    """Torchrun kills the others of a rank that has failed, if they wait for it too long."""
    lost = DeviceLost(gpus={"1": "GPU 1 (uuid): busy"})
    leave_error(paths, 1, lost, 10)
    last_word.write_end(paths.folder, 0)
    found = read_result(paths)
    assert found["error"].startswith("rank 1 of 2: GPU 1 (uuid): busy\nlog: ")
    assert found["error_kind"] == "DeviceLost"


def test_of_an_end_without_a_trace_only_that_is_said(paths: RunPaths) -> None:
    leave_error(paths, 1, RuntimeError("Connection closed by peer"), 10)
    last_word.write_end(paths.folder, 0)
    assert (
        read_result(paths)["error"]
        == "rank 0 of 2 has ended without a word, as a process does that is killed; rank 1:"
        f" Connection closed by peer\nlog: {paths.stderr(0, 0)}"
    )


def test_what_has_an_end_keeps_it_and_so_does_what_goes_on(paths: RunPaths) -> None:
    with at_work(paths):  # the next attempt
        last_word.write_end(paths.folder, 0)
        assert read_result(paths)["status"] == "running"
    create_result(paths, may_exist=True, status=COMPLETED)
    last_word.write_end(paths.folder, 0)
    assert read_result(paths)["status"] == "completed"


def test_who_ends_in_order_has_no_need_of_it(paths: RunPaths) -> None:
    with last_word.kept(paths.folder, 0):
        pass
    assert read_result(paths)["status"] == "running"


ABORTS = """
import faulthandler, os, sys
from pathlib import Path
from expt.errors import DeviceLost
from expt.launch import last_word
faulthandler.enable(open(sys.argv[2], "w"))
with last_word.kept(Path(sys.argv[1]), 0):
    os.abort()
"""


def test_whoever_aborts_is_outlived_by_its_last_word(paths: RunPaths) -> None:
    words = (str(paths.folder), str(paths.stderr(0, 0)))
    done = subprocess.run([sys.executable, "-c", ABORTS, *words], env=environment(), check=False)
    assert done.returncode == -signal.SIGABRT
    wait_until(lambda: read_result(paths)["status"] != "running", timeout_s=30)
    assert read_result(paths)["error"].startswith("rank 0 of 2 was killed by SIGABRT\n")


TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "expt",
]


def test_a_refusal_is_printed_before_torchrun_hears_of_it(tmp_path: Path) -> None:
    """It ends all ranks once one has ended; only rank 0 has something to say."""
    done = subprocess.run(
        [*TORCHRUN, "-m", "seed=0,1"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert done.stderr.count("error: -m: a sweep cannot run inside torchrun") == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_aborts_under_torchrun_leaves_a_true_record(
    victim: int, tmp_path: Path
) -> None:
    """As NCCL's watchdog has it abort, in C: here by a fault on purpose, on a CPU."""
    words = ("epochs=1000", "hydra.run.dir=here", "threads=1", "max_restarts=0")
    env = environment(**{VARIABLE: f"{victim}:5:abort"})
    done = subprocess.run(
        [*TORCHRUN, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    paths = RunPaths(tmp_path / "here")
    wait_until(lambda: json.loads(paths.result.read_text())["status"] != "running", timeout_s=20)
    record = read_result(paths)
    assert record["status"] == "failed"
    assert f"rank {victim} of 2 was killed by SIGABRT" in record["error"] or (
        victim
        and "has lost the other workers"
        in record["error"]  # where rank 0 has noticed before torchrun ended it
    )
