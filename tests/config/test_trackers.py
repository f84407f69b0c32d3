"""Where copies of runs may go."""

from __future__ import annotations

import pytest

from expt.config.identity import hyperparameters, shown
from expt.config.trackers import refuse_unusable
from expt.errors import ConfigError
from tests.conftest import Configured


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["send=mlflo"], "send=['mlflo']: input should be 'mlflow' or 'wandb'"),
        (["send=[wandb,wandb]"], "send=[wandb,wandb]: names a dashboard twice"),
        (["mlflow.tracking_uri='localhost:5000'"], "has no scheme; use http://localhost:5000"),
        (["mlflow.tracking_uri='htp://a'"], "MLflow knows no htp://. Did you mean 'http'?"),
        (["mlflow.tracking_uri='http:/a'"], "is no address"),
        (["mlflow.tracking_uri='http://'"], "names no host"),
        (["mlflow.tracking_uri='http://a:99999'"], "is no address (Port out of range 0-65535)"),
        (["mlflow.tracking_uri=''"], "is no address"),
        (
            ["mlflow.tracking_uri='https://me:word@host/'"],
            "=https://host/: a password would be written into the run",
        ),
        (["wandb.mode=onlin"], "wandb.mode='onlin': input should be 'online' or 'offline'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    configured: Configured, words: list[str], line: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(*words)
    assert line in str(raised.value)
    assert "word" not in str(raised.value).replace("password", "")


@pytest.mark.parametrize(
    "uri", ["http://host:5000/a", "sqlite:///m.db", "mysql+pymysql://h/d", "databricks", "./mlruns"]
)
def test_what_mlflow_takes_is_taken(configured: Configured, uri: str) -> None:
    assert configured("send=mlflow", f"mlflow.tracking_uri='{uri}'").mlflow.tracking_uri == uri


def test_one_name_is_a_list_of_one(configured: Configured) -> None:
    assert configured("send=mlflow").send == configured("send=[mlflow]").send == ("mlflow",)
    assert configured("send=null").send == ()


def test_a_password_of_the_environment_is_used_and_not_written(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_MLFLOW", "https://me:word@host")
    config = configured("mlflow.tracking_uri=${oc.env:OUR_MLFLOW}", "mlflow.tags={team: vision}")
    assert config.mlflow.tracking_uri == "https://me:word@host"
    assert shown(config)["mlflow"]["tracking_uri"] == "${oc.env:OUR_MLFLOW}"
    assert not {
        key for key in hyperparameters(shown(config)) if key.startswith(("send", "mlflow", "wandb"))
    }


def test_an_impossible_address_of_the_environment_is_told_before_the_run(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expt.config.trackers.is_installed", lambda name: True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "localhost:5000")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI=localhost:5000: has no scheme"):
        refuse_unusable(configured("send=mlflow"))
    refuse_unusable(configured("send=mlflow", "mlflow.tracking_uri=mlruns"))
