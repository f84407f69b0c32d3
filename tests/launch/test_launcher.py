"""Who starts the workers, by what this process finds in its environment."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import expt
from expt.errors import ConfigError, RunFailed
from expt.launch import torchrun
from expt.launch.launcher import adopt, first_host, launcher, refuse_in_torchrun, tasks_per_node
from tests.facade import Patch, environment, run

TORCHRUN = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def set_all(monkeypatch: Patch, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_worker_of_torchrun_starts_none(monkeypatch: Patch) -> None:
    set_all(monkeypatch, RANK="1", WORLD_SIZE="2", **TORCHRUN)
    with pytest.raises(ConfigError, match="an evaluation cannot run inside torchrun"):
        expt.evaluate("any")
    monkeypatch.setenv("RANK", "0")
    how = launcher()
    assert isinstance(how, torchrun.ExternalWorker)
    assert how.follow(0.0) is None  # rank 0 decides
    with pytest.raises(ConfigError, match="-m: a sweep cannot run inside torchrun"):
        refuse_in_torchrun("-m: a sweep")


@pytest.mark.parametrize(("count", "begun", "again"), [
    (None, False, False), ("0", False, False), ("1", False, True), (None, True, True), ("0", True,
        True),
])  # fmt: skip
def test_restart_noticed(count: str | None, begun: bool, again: bool, monkeypatch: Patch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    meeting: Any = SimpleNamespace(earlier=lambda: {"folder": "run"} if begun else None)
    assert torchrun._started_again(meeting) is again


def test_a_worker_without_an_address_is_told_in_a_line(tmp_path: Path) -> None:
    done = run(cwd=tmp_path, RANK="0", WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (2, "")
    missing = "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    assert f"{missing} must be set too; " in done.stderr
    assert done.stderr.endswith("env -u RANK python -m expt ...\n")


def test_the_environment_is_read_without_slow_imports(tmp_path: Path) -> None:
    """The forkserver starts after it, and everything waits for the forkserver."""
    code = (
        "import os, sys, expt.__main__; from expt.launch.launcher import adopt; adopt(os.environ)\n"
        "print({'torch', 'pydantic', 'omegaconf', 'hydra', 'rich', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "set()\n", done.stderr


SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}  # fmt: skip


def test_a_task_of_srun_is_a_worker() -> None:
    environment = dict(SRUN)
    adopt(environment)
    own = {key: value for key, value in environment.items() if key not in SRUN}
    assert own == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20_000 + (131 * 4711 + 2) % 10_000),
    }
    torchrun.check(environment)


def test_the_last_node_has_fewer_tasks_and_a_job_that_was_requeued_says_so() -> None:
    environment = {**SRUN, "SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "3"}
    adopt(environment)
    assert environment["LOCAL_WORLD_SIZE"] == "1"
    assert environment["TORCHELASTIC_RESTART_COUNT"] == "3"


def test_a_task_of_submitit_on_this_machine_is_a_worker() -> None:
    environment = {
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
        "SUBMITIT_LOCAL_JOB_ID": "88",
    }
    adopt(environment)
    assert {
        key: environment[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    } == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["MASTER_PORT"] == str(20_000 + 131 * 88 % 10_000)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "RANK": "0", "WORLD_SIZE": "2"},
        {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"},
    ],
    ids=["nothing", "one task", "torchrun within srun", "one task of submitit"],
)
def test_single_task_or_torchrun_environment_stays(environment: dict[str, str]) -> None:
    before = dict(environment)
    adopt(environment)
    assert environment == before


def test_where_rank_0_is_may_be_set_by_hand() -> None:
    environment = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    adopt(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("4,2(x2)", [4, 2, 2])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],login1", "gpu07"), ("a1,a2", "a1"), ("n[3,5]-ib", "n3-ib"), ("solo", "solo")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "left",
    [
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "four", "SLURM_PROCID": "0"},
        {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "0"},
        {**TORCHRUN, "RANK": "", "WORLD_SIZE": "4"},
        {**TORCHRUN, "RANK": "4", "WORLD_SIZE": "4"},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "x"},
    ],
)
def test_leftovers_of_a_cluster_are_refused_with_the_way_out(left: dict[str, str]) -> None:
    def take(variables: dict[str, str]) -> None:
        adopt(variables)
        torchrun.check(variables)

    with pytest.raises(ConfigError, match=r"env -u RANK .*python -m expt") as caught:
        take(left)
    for name in re.findall(r"-u (\w+)", str(caught.value)):
        left.pop(name, None)
    adopt(left)
    assert "RANK" not in left, "as it was typed"


def test_lonely_rank_0_names_the_missing_after_its_timeout(monkeypatch: Patch) -> None:
    left = {**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}
    adopt(left)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        left["MASTER_PORT"] = str(free.getsockname()[1])
    set_all(monkeypatch, **left)
    meeting = torchrun.of_environment.__wrapped__()
    named = r"1, 2, 3, 4, 5, 6 of 7 did not arrive within 0\.02 s; .*-u SLURM_STEP_NUM_TASKS"
    with pytest.raises(RunFailed, match=named):
        meeting.gather(0.02)
