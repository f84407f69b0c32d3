"""Who starts the workers, by what this process finds in its environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.errors import ConfigError
from expt.launch import torchrun
from expt.launch.launcher import ExternalWorker, Launcher, launcher
from tests.conftest import environment

TORCHRUN = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def set_all(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_alone_expt_starts_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch)
    how = launcher()
    assert type(how) is Launcher
    assert (how.starts_workers, how.follow(0.0), how.earlier_folder()) == (True, None, None)
    how.refuse_sweep("-m")
    with how.deciding():
        pass


def test_a_worker_of_torchrun_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK="0", WORLD_SIZE="2", **TORCHRUN)
    how = launcher()
    assert isinstance(how, ExternalWorker)
    assert (how.starts_workers, how.follow(0.0)) == (False, None)  # rank 0 decides
    with pytest.raises(ConfigError, match="-m: a sweep cannot run inside torchrun"):
        how.refuse_sweep("-m")


@pytest.mark.parametrize(("count", "begun", "again"), [
    (None, False, False), ("0", False, False), ("1", False, True), (None, True, True), ("0", True,
        True),
])  # fmt: skip
def test_whether_the_workers_were_started_again(
    count: str | None, begun: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    meeting: Any = SimpleNamespace(earlier=lambda: {"folder": "run"} if begun else None)
    assert torchrun._started_again(meeting) is again


def test_only_rank_0_says_that_a_sweep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK="1", WORLD_SIZE="2", **TORCHRUN)
    with pytest.raises(SystemExit) as exited:
        launcher().refuse_sweep("-m")
    assert exited.value.code == 2


def test_a_worker_without_an_address_is_told_in_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "expt"],
        env=environment(RANK="0", WORLD_SIZE="2"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    missing = "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    assert (
        done.stderr
        == f"error: RANK and WORLD_SIZE are set, so this is a worker; {missing} must be set too\n"
    )


def test_the_choice_needs_nothing_that_takes_long_to_import(tmp_path: Path) -> None:
    """The forkserver starts after it, and everything waits for the forkserver."""
    code = (
        "import sys, expt.__main__; from expt.launch.launcher import launcher; launcher()\n"
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
