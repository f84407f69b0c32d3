"""One run's workers as the pool looks at them, with processes that have already ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.errors import Interrupted, RunFailed
from expt.launch.processes import FINISHED
from expt.launch.workers import Workers
from expt.runs.paths import RunPaths
from expt.runs.result import create_result


def workers(folder: Path, *codes: int | None) -> Workers:
    """Workers with these exit codes; None is alive."""
    processes: list[Any] = [
        SimpleNamespace(exitcode=code, pid=None, sentinel=0, kill=lambda: None, join=lambda: None) for code in codes
    ]
    return Workers(RunPaths(folder), 0, 60.0, processes)


def test_it_goes_on_while_one_lives(tmp_path: Path) -> None:
    assert workers(tmp_path, FINISHED, None).poll() is False


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
def test_an_end_with_another_code_is_a_failure_whatever_the_record_says(tmp_path: Path, code: int) -> None:
    create_result(RunPaths(tmp_path), status="completed")
    with pytest.raises(RunFailed, match=f"rank 1 of 2 exited with code {code}"):
        workers(tmp_path, FINISHED, code).poll()
