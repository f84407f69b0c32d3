"""What became of a command's runs, and how that is told."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from expt.command.run import Outcome
from expt.errors import Diverged, SweepFailed
from expt.launch.job import Job
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PRUNED


def test_what_had_paused_and_went_on_counts_once() -> None:
    outcome, paths = Outcome(), RunPaths(Path("a"))
    for status in (PRUNED, PRUNED, COMPLETED):
        outcome.add(paths, status)
    assert outcome.ended == {paths: COMPLETED}


@pytest.mark.parametrize(
    ("others", "before", "failed"),
    [([PRUNED], [], 0), ([COMPLETED], [], 0), ([], [PRUNED], 0), ([], [], 1)],
)
def test_diverged_point_is_no_failure(others: list[str], before: list[str], failed: int) -> None:
    """Also in an earlier command."""
    outcome = Outcome()
    for status in before:
        outcome.add(RunPaths(Path("before")), status)
    diverged = Job(RunPaths(Path("bad")), None, FAILED, Diverged("the loss was nan"))
    outcome.add_jobs(
        [diverged, *(Job(RunPaths(Path(status)), None, status) for status in others)], (Diverged,)
    )
    assert list(outcome.ended.values()).count(FAILED) == failed


@pytest.mark.parametrize(
    ("statuses", "unseen", "said"),
    [
        ([COMPLETED, COMPLETED], 0, None),
        ([COMPLETED, INTERRUPTED], 4, None),
        ([COMPLETED, PRUNED], 0, None),
        ([COMPLETED, FAILED], 0, "1 of 2 runs failed"),
        ([PRUNED, FAILED, COMPLETED], 0, "1 of 3 runs failed"),
        ([FAILED, FAILED, COMPLETED, INTERRUPTED, "queued"], 6, "2 of 9 runs failed, 6 were"),
    ],
)
def test_a_command_fails_if_a_run_has(statuses: list[str], unseen: int, said: str | None) -> None:
    outcome = Outcome(num_unfinished=unseen)
    for number, status in enumerate(statuses):
        outcome.add(RunPaths(Path(str(number))), status)
    assert [*outcome.ended.values()] == [
        status for status in statuses if status in (COMPLETED, PRUNED, FAILED)
    ]
    if said is None:
        outcome.raise_if_failed()
        return
    with pytest.raises(SweepFailed) as raised:
        outcome.raise_if_failed()
    assert str(raised.value).startswith(said)
    assert vars(pickle.loads(pickle.dumps(raised.value))) == vars(raised.value), (
        "it may come from another process"
    )
    assert len(raised.value.completed) == statuses.count(COMPLETED)
