"""Where copies of runs may go."""

import pytest

from expt.config.identity import hyperparameters, shown
from expt.config.schema import TRACKERS
from expt.errors import ConfigError
from tests.conftest import Configured
from tests.facade import Patch


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["send=mlflo"], "send=[mlflo]: input should be 'mlflow', "),
        (["mlflow.tracking_uri='https://me:word@host/'"], "=https://host/: a password would"),
        (["wandb.mode=onlin"], "wandb.mode=onlin: input should be 'online' or 'offline'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    configured: Configured, words: list[str], line: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(*words)
    assert line in str(raised.value)
    assert "word" not in str(raised.value).replace("password", "")


def test_one_name_is_a_list_of_one(configured: Configured) -> None:
    assert configured("send=mlflow").send == configured("send=[mlflow]").send == ("mlflow",)
    assert configured("send=null").send == ()


def test_a_password_of_the_environment_is_used_and_not_written(
    configured: Configured, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("OUR_MLFLOW", "https://me:word@host")
    config = configured("mlflow.tracking_uri=${oc.env:OUR_MLFLOW}", "mlflow.tags={team: vision}")
    assert config.mlflow.tracking_uri == "https://me:word@host"
    assert shown(config)["mlflow"]["tracking_uri"] == "${oc.env:OUR_MLFLOW}"
    assert not {
        key for key in hyperparameters(shown(config)) if key.startswith(("send", *TRACKERS))
    }
