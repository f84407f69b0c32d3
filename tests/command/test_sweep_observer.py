"""What is recorded of a sweep's run at its end."""

from __future__ import annotations

from pathlib import Path

from expt.command.sweep_observer import _record_end
from expt.errors import RunFailed
from expt.launch.job import Job
from expt.runs.result import FAILED, create_result
from tests.requests import request


def test_a_run_that_could_record_nothing_leaves_nothing_that_would_keep_it_from_another_try(
    tmp_path: Path,
) -> None:
    """On a full disk: its folder is there, and no result.json."""
    asked = request(tmp_path / "run")
    asked.paths.folder.mkdir()
    job = Job(asked.paths, asked, FAILED, RunFailed("No space left on device"), started_at=1.0)
    _record_end(job, asked.about)
    assert asked.paths.event_files() == []
    create_result(asked.paths, status=FAILED)
    _record_end(job, asked.about)
    assert len(asked.paths.event_files()) == 1
