"""`expt send`: what is wrong is told before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.command import send
from expt.errors import ConfigError, ExptError
from tests.dashboards.folders import measure, record


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "--to", "mlflo"], "--to mlflo: not one of mlflow, wandb. Did you mean 'mlflow'?"),
        (
            ["run", "--to", "mlflow", "--tracking-uri", "localhost:1"],
            "--tracking-uri=localhost:1: has no scheme",
        ),
        (["other"], "these 1 runs name no dashboard; say which, as in --to mlflow"),
        (["empty", "--to", "wandb"], "empty: holds no run to send"),
        (
            ["other", "--to", "wandb", "--checkpoints"],
            "--checkpoints: sends single files, and other has a checkpoint in",
        ),
        ([], "the following arguments are required: FOLDER; see python -m expt send --help"),
    ],
)
def test_what_cannot_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.setattr(send, "is_installed", lambda name: True)
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run")
    record(tmp_path / "other", config={"model": {"name": "mlp"}})
    (tmp_path / "other" / "checkpoints" / "step-2.parts").mkdir(parents=True)
    with pytest.raises(ConfigError) as raised:
        send.main(words)
    assert line in str(raised.value)


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "is_installed", lambda name: False)
    record(tmp_path / "run")
    with pytest.raises(ConfigError, match="needs the package mlflow; pip install"):
        send.main([str(tmp_path)])


def test_a_dashboard_that_is_not_reached_is_an_error_after_a_few_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: object) -> None:
        tries.append(1)
        raise ConnectionRefusedError(111, "Connection refused")

    tries: list[int] = []
    monkeypatch.setattr(send, "is_installed", lambda name: True)
    monkeypatch.setattr(send, "PAUSE_S", 0.0)
    monkeypatch.setattr("expt.dashboards.sender._tracker", gone)
    measure(record(tmp_path / "run", status="completed"), 1)
    with pytest.raises(
        ExptError, match="mlflow: Connection refused; type it again later, nothing is sent twice"
    ) as raised:
        send.main([str(tmp_path)])
    assert raised.value.exit_code == 1
    assert len(tries) == send.TRIES
