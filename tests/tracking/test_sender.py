"""Each point of a run is sent once, whatever happens to the run, the dashboard or the sender."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from expt.runs.paths import RunPaths
from expt.tracking import sender as module
from expt.tracking.sender import Sender, runs_in
from tests.tracking.folders import Ledger, measure, record, sweep

Make = Callable[..., Sender]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> Make:
    monkeypatch.setattr(module, "_tracker", lambda _: ledger)
    return lambda *, live=True: Sender("mlflow", live=live)


def once(ledger: Ledger, paths: RunPaths, steps: set[int]) -> bool:
    """Whether exactly these steps of the run are there, of all tags, each once."""
    key = json.loads((paths.sent / "mlflow.json").read_text())["key"]
    wanted = {
        (key, tag, step): 1 for tag in ("epoch", "loss/train", "speed/epoch_s") for step in steps
    }
    return dict(ledger.points) == wanted


def test_half_live_and_half_later(tmp_path: Path, sender: Make, ledger: Ledger) -> None:
    paths = record(tmp_path / "run")
    live = sender()
    measure(paths, 1, 2)
    assert live.send([paths])
    measure(paths, 3)
    assert live.send([paths])
    live.end()
    measure(paths, 4, 5)
    record(paths.folder, status="completed")
    later = sender(live=False)
    assert later.send([paths], last=True)
    assert later.num_sent == 1
    again = sender(live=False)
    assert again.send([paths], last=True)
    assert again.num_sent == 0, "nothing is new"
    assert once(ledger, paths, {1, 2, 3, 4, 5})
    assert set(ledger.statuses.values()) == {"completed"}


@pytest.mark.parametrize("fails_after", range(6))
def test_a_dashboard_that_is_lost_in_between_gets_the_rest(
    tmp_path: Path, sender: Make, ledger: Ledger, fails_after: int
) -> None:
    paths = record(tmp_path / "run")
    measure(paths, 1, 2)
    live, ledger.fails_after = sender(), fails_after
    assert not live.send([paths])
    assert isinstance(live.error, ConnectionError)
    measure(paths, 3)
    ledger.fails_after = None
    assert live.send([paths])
    assert once(ledger, paths, {1, 2, 3})


def test_a_run_that_goes_on_from_an_older_checkpoint(
    tmp_path: Path, sender: Make, ledger: Ledger
) -> None:
    paths = record(tmp_path / "run")
    measure(paths, 1)
    size = paths.metrics.stat().st_size
    measure(paths, 2, 3, 4)
    live = sender()
    assert live.send([paths])
    record(paths.folder, status="interrupted")
    assert live.send([paths])
    record(paths.folder, started=2000.0)
    paths.metrics.write_bytes(paths.metrics.read_bytes()[:size])
    measure(
        paths, 2, 3, 4, 5, speed=2.75
    )  # longer lines than those that were read, before anybody looks
    assert live.send([paths])
    assert set(ledger.statuses.values()) == {"running"}, "the same copy goes on"
    assert once(ledger, paths, {1, 2, 3, 4, 5})


def test_what_may_still_be_refused_is_left_alone_until_the_end(
    tmp_path: Path, sender: Make, ledger: Ledger
) -> None:
    folder = sweep(tmp_path / "grid")
    refused = record(folder / "a", status="failed")
    live = sender()
    assert live.send(runs_in(folder))
    assert {*refused.folder.iterdir()} == {refused.result}
    assert not ledger.statuses
    assert live.send(runs_in(folder), last=True)
    assert list(ledger.statuses.values()) == ["failed"]


def test_a_dashboard_out_of_reach_is_told_of_before_the_first_number(
    tmp_path: Path, sender: Make, ledger: Ledger
) -> None:
    ledger.fails_after = 0
    live = sender()
    assert not live.send([record(tmp_path / "run")])
    assert str(live.error) == "gone"


def test_two_senders_do_not_send_the_same(
    tmp_path: Path, sender: Make, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = record(tmp_path / "run")
    measure(paths, 1)
    live, other = sender(), sender(live=False)
    assert live.send([paths])
    measure(paths, 2)
    assert other.send([paths], last=True)
    assert "another command is sending it to mlflow" in capsys.readouterr().err
    assert live.send([paths])
    live.end()
    assert once(ledger, paths, {1, 2})


def test_a_copy_of_afterwards_has_the_times_of_then(
    tmp_path: Path, sender: Make, ledger: Ledger
) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    paths = record(tmp_path / "run", status="completed")
    measure(paths, 1, 2)
    events = EventFileWriter(str(paths.folder))
    for step, at in {1: 5000.0, 2: 5001.5}.items():
        events.add_event(Event(wall_time=at, step=step, summary=Summary()))
    events.close()
    assert sender(live=False).send([paths], last=True)
    assert set(ledger.times) == {5000.0, 5001.5}
