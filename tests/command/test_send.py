"""`expt send`: what is wrong is told before anything is sent."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from expt.command import send
from expt.errors import ConfigError, ExptError
from tests.dashboards.folders import measure, record
from tests.facade import Patch


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "--to", "mlflo"], "--to: invalid choice: 'mlflo'"),
        (["other"], "these 1 runs name no dashboard"),
        (["empty", "--to", "wandb"], "empty: holds no run to send"),
        (["other", "--to", "wandb", "--checkpoints"], "--checkpoints: other has a sharded"),
        ([], "the following arguments are required: FOLDER; see python -m expt send --help"),
    ],
)
def test_send_is_refused(tmp_path: Path, monkeypatch: Patch, words: list[str], line: str) -> None:
    monkeypatch.setattr("expt.errors.find_spec", lambda name: SimpleNamespace(origin=name))
    record(tmp_path / "run")
    record(tmp_path / "other", config={"model": {"name": "mlp"}})
    (tmp_path / "other" / "checkpoints" / "step-2.parts").mkdir(parents=True)
    with pytest.raises(ConfigError) as raised:
        send.main(words)
    assert line in str(raised.value)


def test_a_missing_package(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("expt.errors.find_spec", lambda name: None)
    record(tmp_path / "run")
    with pytest.raises(ConfigError, match="needs mlflow; pip install"):
        send.main([str(tmp_path)])


@pytest.mark.slow
def test_a_dashboard_that_is_not_reached_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", exc_type=ImportError)
    measure(record(tmp_path / "run", status="completed"), 1)
    with pytest.raises(ExptError, match=r"mlflow: .*refused") as raised:
        send.main([str(tmp_path), "--to", "mlflow", "--tracking-uri", "http://127.0.0.1:9"])
    assert raised.value.exit_code == 1
