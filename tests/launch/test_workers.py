"""One run's workers as the pool looks at them, with processes that have already ended."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.errors import ConfigError, Interrupted, RunFailed
from expt.launch import processes
from expt.launch.processes import FINISHED
from expt.launch.workers import LATE_S, Workers, check_loopback
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from tests.launch.test_failure import leave_error


def workers(folder: Path, *codes: int | None) -> Workers:
    """Workers with these exit codes; None is alive."""
    processes: list[Any] = [
        SimpleNamespace(
            exitcode=code,
            pid=0,
            sentinel=rank,
            is_gone=True,
            send_signal=lambda number: None,
            close=lambda: None,
        )
        for rank, code in enumerate(codes)
    ]
    return Workers(RunPaths(folder), 0, 60.0, processes)


def test_it_goes_on_while_one_lives(tmp_path: Path) -> None:
    assert workers(tmp_path, FINISHED, None).poll() is False


def test_the_driver_is_woken_by_those_alone_that_it_has_not_seen_ended(tmp_path: Path) -> None:
    found = workers(tmp_path, None, FINISHED)
    assert found.sentinels == [0, 1], "one that has ended since must wake it"
    found.poll()
    assert found.sentinels == [0]


def test_all_have_completed(tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path), status="completed")
    assert workers(tmp_path, FINISHED, FINISHED).poll() is True


def test_all_were_interrupted_and_have_saved(tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path), status="interrupted")
    with pytest.raises(Interrupted):
        workers(tmp_path, FINISHED).poll()


def test_an_end_without_a_result_is_a_failure(tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path))
    with pytest.raises(RunFailed, match="the workers ended without a result; see"):
        workers(tmp_path, FINISHED).poll()


@pytest.mark.parametrize("code", [0, 1])
def test_an_end_with_another_code_is_a_failure_whatever_the_record_says(
    tmp_path: Path, code: int
) -> None:
    create_result(RunPaths(tmp_path), status="completed")
    with pytest.raises(RunFailed, match=f"rank 1 of 2 exited with code {code}"):
        workers(tmp_path, FINISHED, code).poll()


class Ending(SimpleNamespace):
    """A process that fails as soon as it was seen alive."""

    ended = False

    @property
    def exitcode(self) -> int | None:
        self.ended, before = True, self.ended
        return 1 if before else None


def test_who_fails_while_it_is_looked_at_has_failed(tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path))
    process: Any = Ending(pid=0, sentinel=0, is_gone=True, send_signal=lambda number: None)
    found = Workers(RunPaths(tmp_path), 0, 60.0, [process])
    assert found.poll() is False
    with pytest.raises(RunFailed, match="rank 0 of 1 exited with code 1"):
        found.poll()


def test_who_knows_why_others_were_lost_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_result(RunPaths(tmp_path))
    found = workers(tmp_path, None, 1)
    leave_error(found.paths, 1, RuntimeError("Connection closed by peer"), 10)

    def wait_for_all(_: object, timeout_s: float, **__: object) -> None:
        if (
            timeout_s == LATE_S
        ):  # and not where all are ended, nor in the moment that each failure is given
            leave_error(found.paths, 0, ConfigError("a=1: is none"), 11, 2)
            found.processes[0].exitcode = 2  # type: ignore[misc]

    monkeypatch.setattr(processes, "wait_for_all", wait_for_all)
    with pytest.raises(ConfigError, match=r"^a=1: is none$"):
        found.poll()


CLONE_NEWNET = 0x40000000
"""A network of its own, in which nothing is up."""


def test_workers_that_cannot_meet_are_not_started() -> None:
    check_loopback()

    def told_without_network() -> str:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):  # of this thread alone
            return ""
        with pytest.raises(RunFailed) as raised:
            check_loopback()
        return str(raised.value)

    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(told_without_network).result()
    if not told:
        pytest.skip("may not take the network away, as root may")
    assert told.startswith(
        "127.0.0.1: Network is unreachable; the workers meet at the loopback interface: bring it up"
    )
