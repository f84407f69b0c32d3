"""A job from queued to its one end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from expt.errors import ConfigError, ExptError, Interrupted, OutOfMemory, RunFailed
from expt.launch.job import Job, check_options, request_of
from expt.runs.paths import RunPaths
from tests.requests import request


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "completed"),
        (RunFailed("x"), "failed"),
        (ConfigError("x"), "failed"),
        (Interrupted("x"), "interrupted"),
    ],
)
def test_a_job_ends_one_way(tmp_path: Path, error: ExptError | None, status: str) -> None:
    job = Job(RunPaths(tmp_path), request(tmp_path), started_at=1.0)
    assert job.status == "queued"
    job.end(error, 3.0)
    assert (job.status, job.error, job.ended_at, job.refused) == (status, error, 3.0, False)


def test_a_job_that_never_started_was_refused(tmp_path: Path) -> None:
    job = Job(RunPaths(tmp_path / "lr=x"), None)
    assert not job.refused
    job.end(ConfigError("lr=x"), 3.0)
    assert (job.refused, job.name) == (True, "lr=x")
    with pytest.raises(AssertionError):
        request_of(job)


@pytest.mark.parametrize(
    ("key", "value", "least"),
    [
        ("max_concurrent", 0, 1),
        ("runs_per_gpu", 0, 1),
        ("retries", -1, 0),
        ("stagger_s", math.nan, 0),
        ("nodes", "a", 1),
    ],
)
def test_a_launcher_by_which_nothing_would_start_is_refused(
    key: str, value: object, least: int
) -> None:
    with pytest.raises(
        ConfigError, match=f"^hydra.launcher.{key}={value}: .* a number of at least {least}$"
    ):
        check_options({"fail_fast": False, key: value})
    check_options({"max_concurrent": None, "gpus_per_node": None, "executor": "slurm", key: least})


def test_a_trial_without_memory_is_tried_once_more(tmp_path: Path) -> None:
    error = OutOfMemory("out of memory")
    assert not Job(RunPaths(tmp_path), request(tmp_path)).may_retry(error, 0)
    trial = Job(RunPaths(tmp_path), request(tmp_path), is_trial=True)
    assert trial.may_retry(error, 0)
    trial.try_again()
    assert not trial.may_retry(error, 0)


def test_a_mistake_in_code_is_not_tried_a_third_time(tmp_path: Path) -> None:
    for kind, again in (("KeyError", [True, False]), ("ConnectionError", [True, True])):
        job = Job(RunPaths(tmp_path), request(tmp_path))
        errors = [RunFailed(f"rank 0 raised\n\nx\n{kind}: a\n\nlog: {n}") for n in range(2)]
        assert [job.may_retry(error, 5) for error in errors] == again
