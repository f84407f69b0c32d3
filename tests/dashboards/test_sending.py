"""A command waits for nothing but at its end, and there no longer than it says."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from expt.dashboards import sender
from expt.dashboards.sender import Sending
from expt.errors import ConfigError
from tests.conftest import Configured
from tests.dashboards.folders import measure, record


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a package `mlflow`, which the process that sends imports."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "mlflow.py"


def follow(folder: Path, configured: Configured) -> Sending:
    """Begin to send a run that has completed."""
    measure(record(folder, status="completed"), 1)
    sending = Sending()
    sending.follow(configured("send=mlflow"), folder)
    return sending


def test_a_dashboard_that_does_not_answer_holds_up_the_end_alone_and_not_for_long(
    package: Path,
    tmp_path: Path,
    configured: Configured,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    began = tmp_path / "began"
    package.write_text(
        f"import os, time; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    )
    each = follow(tmp_path / "run", configured)
    while not began.exists() or not began.read_text():
        time.sleep(0.01)
    monkeypatch.setattr(sender, "PATIENCE_S", 0.5)
    each.close()
    each.wait()
    assert not Path(f"/proc/{began.read_text()}").exists()
    said = capfd.readouterr()
    assert re.search(
        r"warning: mlflow: not all could be sent \(.*\); the rest, once: .*expt send .*run",
        said.err,
    )


def test_a_client_that_fails_is_told_of_in_a_line(
    package: Path, tmp_path: Path, configured: Configured, capfd: pytest.CaptureFixture[str]
) -> None:
    package.write_text("print('noise of a library')\n")
    each = follow(tmp_path / "run", configured)
    each.close()
    each.wait()
    said = capfd.readouterr()
    assert "noise" not in said.out + said.err
    assert said.err.count("\n") == 1
    assert "warning: mlflow: not all could be sent (cannot import name 'MlflowClient'" in said.err


def test_nothing_is_started_where_nothing_is_sent(tmp_path: Path, configured: Configured) -> None:
    each = Sending()
    each.follow(configured(), tmp_path)
    assert not each._processes


def test_a_missing_package_is_told_before_anything_starts(
    tmp_path: Path, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("send=[wandb]")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)  # another test may have imported it
    (tmp_path / "wandb").mkdir()  # as W&B leaves it behind
    with pytest.raises(
        ConfigError, match=re.escape("send=wandb: needs wandb; pip install 'expt[wandb]'")
    ):
        Sending().follow(config, tmp_path)
