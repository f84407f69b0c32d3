"""The words of a fork, before its parent's are asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expt.command.parents import with_parent
from expt.errors import ConfigError


def test_each_of_several_values_may_be_of_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="fork=latest: there is no run in outputs yet"):
        with_parent(["fork=latest,latest@40"], sweep=True)
    known = {
        "config": {},
        "identity": "1",
        "seedless_identity": "2",
        "content": {"data": "3", "code": "4"},
    }
    record = {"status": "completed", "started": 1.0, "arguments": list[str](), **known}
    for folder in ("outputs/a/b", "outputs/sweeps/c/lr=1,seed=1", "p:q"):
        Path(folder).mkdir(parents=True)
        Path(folder, "result.json").write_text(json.dumps(record))
    words = ["fork=latest@epoch:1,p:q@best,'latest/lr=1,seed=1'"]
    assert (
        with_parent(words, sweep=True)[0][-1]
        == "fork='outputs/a/b@epoch:1','p:q@best','outputs/sweeps/c/lr=1,seed=1'"
    )
    with pytest.raises(ConfigError, match="fork=p:q@epoch:x: @epoch:x names no checkpoint"):
        with_parent(["fork=p:q@40,p:q@epoch:x"], sweep=True)
