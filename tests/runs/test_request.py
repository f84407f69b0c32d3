"""A request: whether it resumes, its next attempt, sending it, and quoting overrides."""

import dataclasses
import json
import pickle
import shlex
from pathlib import Path

import pytest
from hydra._internal.grammar.utils import escape_special_characters
from hydra.core.override_parser.overrides_parser import OverridesParser

from expt.config.constraints import quoted
from expt.errors import ConfigError
from expt.machine import Machine
from expt.runs.overrides import joined, setting_word, unquoted
from expt.runs.request import received
from tests.facade import Patch, request


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


def test_a_request_travels_as_json(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = request(Path("here"), may_have_run=True, content={"data": "own"})
    asked = dataclasses.replace(asked, until_epoch=3)
    there = received(json.loads(json.dumps(asked.to_send())), Machine(cpus=8), typed_at=3.0)
    assert there.paths.folder == tmp_path / "here"
    assert there.about == asked.about
    assert there.env == asked.env
    assert there.may_have_run
    assert there.identity == asked.identity
    assert there.typed_at == 3.0
    assert (there.config.model, there.until_epoch) == (asked.config.model, 3)


def test_a_worker_gets_it_whole_and_it_is_small(tmp_path: Path) -> None:
    asked = request(tmp_path, typed_at=3.0, content={"code": "own"})
    pickled = pickle.dumps(asked)
    assert pickle.loads(pickled) == asked
    assert len(pickled) < 8_000


def test_what_cannot_run_there_is_refused(tmp_path: Path) -> None:
    sent = request(tmp_path).to_send()
    sent["settings"] = {**sent["settings"], "gpus": 4}
    with pytest.raises(ConfigError, match="gpus"):
        received(sent, Machine(cpus=8), typed_at=3.0)


VALUES = [
    "a/b.c", "a b", "it's", "a,b=c", "a\\'b", "№ {7}", "lr=0.1", "[x]", "1e3", "null", "Nan",
    "ünï", "end\\", "end\\\n", "\\'\n", '"', "~",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back(value: str) -> None:
    (word,) = shlex.split(setting_word("key", value))
    assert OverridesParser.create().parse_override(word).value() == value
    assert unquoted(quoted(value)) == value
    assert unquoted(escape_special_characters(value)) == value, "as Hydra gives each of several"


def test_a_shell_gets_back_what_is_joined() -> None:
    words = [f"key={quoted(value)}" for value in VALUES]
    assert shlex.split(joined(words)) == words
    assert joined(["a='b=1,c=2'", "a=$b'"]) == """"a='b=1,c=2'" 'a=$b'"'"\'\'"""


def test_what_needs_no_quotes_has_none() -> None:
    assert (
        setting_word("hydra.run.dir", "outputs/2026-11-21/10-00-00")
        == "hydra.run.dir=outputs/2026-11-21/10-00-00"
    )
    assert unquoted('"a b"') == "a b"
    assert unquoted("a'b") == "a'b"
