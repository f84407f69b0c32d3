"""A request: whether it resumes, which attempt comes next, and that it travels whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from expt.errors import ConfigError
from expt.machine import Machine
from expt.runs.request import received
from tests.requests import request


@pytest.mark.parametrize(
    ("may_have_run", "resume", "expected"),
    [(False, None, 0), (False, "elsewhere", 0), (False, "auto", 2), (True, None, 2)],
)
def test_the_next_attempt_follows_those_that_left_logs(
    tmp_path: Path, may_have_run: bool, resume: str | None, expected: int
) -> None:
    asked = request(tmp_path, may_have_run=may_have_run, resume=resume)
    assert asked.next_attempt() == 0
    for attempt in (0, 1):
        asked.paths.logs(attempt).mkdir(parents=True)
    assert asked.next_attempt() == expected


def test_a_request_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        request(tmp_path).may_have_run = True  # type: ignore[misc]


def test_a_request_travels_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = dataclasses.replace(request(Path("here"), may_have_run=True), until_epoch=3)
    there = received(json.loads(json.dumps(asked.to_send())), Machine(cpus=8), typed_at=3.0)
    assert there.paths.folder == tmp_path / "here"
    assert (there.about, there.env, there.may_have_run, there.typed_at) == (
        asked.about,
        asked.env,
        True,
        3.0,
    )
    assert (there.config.model, there.until_epoch) == (asked.config.model, 3)


def test_what_cannot_run_there_is_refused(tmp_path: Path) -> None:
    sent = request(tmp_path).to_send()
    sent["settings"] = {**sent["settings"], "gpus": 4}
    with pytest.raises(ConfigError, match="gpus"):
        received(sent, Machine(cpus=8), typed_at=3.0)
