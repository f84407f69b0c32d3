"""A command waits for nothing but at its end, and there no longer than it says."""

import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.dashboards import sending
from expt.dashboards.sending import Sending
from expt.dashboards.trackers import mlflow, trackio
from expt.dashboards.trackers.trackio import TrackioCopy
from expt.dashboards.trackers.wandb import WandbCopy
from expt.errors import ConfigError
from expt.runs.metrics_file import Point
from tests.conftest import Configured
from tests.dashboards.folders import measure, record
from tests.facade import Capture, Patch


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The file of a package `mlflow`, which the process that sends imports from here."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "mlflow.py"


def follow(folder: Path, configured: Configured) -> Sending:
    """Begin to send a run that has completed."""
    measure(record(folder, status="completed"), 1)
    sending = Sending()
    sending.follow(configured("send=mlflow"), folder)
    return sending


def test_a_dashboard_that_does_not_answer_holds_up_the_end_alone_and_not_for_long(
    package: Path, tmp_path: Path, configured: Configured, monkeypatch: Patch, capfd: Capture
) -> None:
    began = tmp_path / "began"
    package.write_text(
        f"import os, time; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    )
    each = follow(tmp_path / "run", configured)
    while not began.exists() or not began.read_text():
        time.sleep(0.01)
    monkeypatch.setattr(sending, "PATIENCE_S", 0.5)
    each.close()
    each.wait()
    assert not Path(f"/proc/{began.read_text()}").exists()
    said = capfd.readouterr()
    assert re.search(
        r"warning: mlflow: not all could be sent \(.*\); the rest, once: .*expt send .*run",
        said.err,
    )


def test_the_processes_of_its_client_are_ended_before_its_pid_may_be_anothers(
    package: Path, tmp_path: Path, configured: Configured, monkeypatch: Patch
) -> None:
    package.write_text("import os; os._exit(0)")
    each, kill = follow(tmp_path / "run", configured), os.killpg
    each._processes["mlflow"]._reader.join()

    def look(group: int, number: int) -> None:
        assert Path(f"/proc/{group}").exists()
        kill(group, number)

    monkeypatch.setattr(os, "killpg", look)
    each.close()
    each.wait()


def test_a_client_that_fails_is_told_of_in_a_line(
    package: Path, tmp_path: Path, configured: Configured, capfd: Capture
) -> None:
    package.write_text("print('noise of a library')\n")
    each = follow(tmp_path / "run", configured)
    each.close()
    each.wait()
    said = capfd.readouterr()
    assert "noise" not in said.out + said.err
    assert said.err.count("\n") == 1
    assert "warning: mlflow: not all could be sent (cannot import name 'MlflowClient'" in said.err


def test_a_process_that_dies_is_reported_at_once(
    package: Path, tmp_path: Path, configured: Configured, capfd: Capture
) -> None:
    package.write_text("import os; os.kill(os.getpid(), 9)")
    each = follow(tmp_path / "run", configured)
    each._processes["mlflow"]._reader.join()
    assert capfd.readouterr().err.startswith("warning: mlflow: the process that sends runs has")
    each.close()
    each.wait()
    assert "(its process has died)" in capfd.readouterr().err


@pytest.mark.parametrize("store", ["folder", "text", "missing/file", "file"])
def test_a_file_of_sqlite_that_cannot_be_used_is_named_at_once(store: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no database, but a text that somebody wrote\n" * 20)
    uri = f"sqlite:///{tmp_path / store}"
    assert mlflow._unusable(uri).startswith(f"{uri}: ") is (store != "file")
    assert not any(map(mlflow._unusable, ("http://127.0.0.1:5000", "sqlite://", "./mlruns")))


def test_nothing_is_started_where_nothing_is_sent(tmp_path: Path, configured: Configured) -> None:
    each = Sending()
    each.follow(configured(), tmp_path)
    assert not each._processes


def test_missing_package(tmp_path: Path, configured: Configured, monkeypatch: Patch) -> None:
    config = configured("send=[wandb]")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)  # another test may have imported it
    (tmp_path / "wandb").mkdir()  # as W&B leaves it behind
    with pytest.raises(
        ConfigError, match=re.escape("send=wandb: needs wandb; pip install 'expt[wandb]'")
    ):
        Sending().follow(config, tmp_path)


@pytest.mark.parametrize(
    ("space", "server", "address"),
    [
        (None, None, "trackio show --project expt"),
        ("me/space", "http://here", "me/space: project expt"),
        (None, "http://here?write_token=1", "http://here: project expt"),
    ],
)
def test_runs_in_trackio_are_looked_for_where_they_are(
    space: str | None, server: str | None, address: str, monkeypatch: Patch
) -> None:
    monkeypatch.delenv("TRACKIO_SERVER_URL", raising=False)
    if server:
        monkeypatch.setenv("TRACKIO_SERVER_URL", server)
    run: Any = None
    assert TrackioCopy(run, {}, trackio.Config(space_id=space)).address == address


@pytest.mark.parametrize(("kind", "at"), [(TrackioCopy, 10), (WandbCopy, 11)])
def test_an_evaluation_adds_to_a_row_that_was_sent(kind: type[Any], at: int) -> None:
    sent, state = list[tuple[int, set[str]]](), dict[str, Any]()

    def copy() -> Any:
        copied: Any = object.__new__(kind)
        copied._state, copied._next = state, state.get("next_step", 0)
        copied._run = SimpleNamespace(log=lambda row, step: sent.append((step, {*row})))
        return copied

    def points(step: int, *tags: str) -> list[Point]:
        return [Point(step, 1, tag, 0.5) for tag in tags]

    live, first = copy(), [*points(5, "lr"), *points(10, "lr", "loss/train")]
    live.add(first, 0.0)
    live.add(first + points(10, "loss/val"), 0.0)
    assert sent == [(5, {"lr"}), (10, {"lr", "loss/train"}), (10, {"loss/val"})]
    state, later = json.loads(json.dumps(state)), points(10, "loss/val", "loss/test")
    copy().add([*first, *later, *points(15, "lr")], 0.0)
    assert sent[3:] == [(at, {"loss/test"}), (15, {"lr"})]
