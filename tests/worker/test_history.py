"""What a run remembers: the best value, how long it took over all attempts, and what is due."""

import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expt.config.kinds import Better
from expt.config.schema import EarlyStop as Settings
from expt.runs.paths import RunPaths
from expt.runs.result import create_result, read_result, update_result
from expt.training.learner import Position
from expt.worker.history import EarlyStop, History
from expt.worker.record import Record
from expt.worker.steps import Times
from tests.conftest import Configured
from tests.facade import Patch, RunFolder, as_typed, run
from tests.worker.sharded import Observer


def test_what_was_finite_once_has_a_best() -> None:
    history = History("acc/val", "max")
    assert history.why_no_best(1) is None, "nothing was evaluated"
    for epoch, (value, is_best) in enumerate(((math.inf, False), (0.5, True), (math.inf, False))):
        history.last["acc/val"] = value
        assert history.note_evaluation(epoch, 10 * epoch) == is_best
    assert history.why_no_best(2) is None, "epoch 1 is the best"
    never = History("acc/val", "max")
    never.last["acc/val"] = math.inf
    assert "acc/val is inf after epoch 1: no epoch" in (never.why_no_best(1) or "")
    assert never.why_no_best(2) is None, "it is told once"


def test_a_best_whose_weights_are_gone_is_no_best() -> None:
    before, history = History("loss/val", "min"), History("loss/val", "min")
    before.last = {"loss/val": 0.5}
    assert before.note_evaluation(1, 10)
    history.load_state_dict(before.state_dict(), has_best=False)
    history.last = {"loss/val": 0.9}
    assert history.note_evaluation(2, 20)
    assert history.reached["objective"]["value"] == 0.9


def test_by_the_clocks_since_the_last(configured: Configured) -> None:
    now = trained = 0.0
    history = History("loss/val", "min", clock=lambda: trained)
    words = as_typed(
        "checkpoint.every_minutes=2 eval_every_minutes=3 max_minutes=4 checkpoint.every_epochs=null"
    )
    times = Times(configured(*words), clock=lambda: now)
    history.begin_epoch()
    now = 120.0
    assert times.by_clock(history) == set()
    now, trained = 121.0, 180.0
    assert times.by_clock(history) == {"save", "evaluate"}
    assert times.by_clock(None) == {"save"}, "of another rank"
    times.saved()
    history.note_evaluation(1, 5)
    assert times.by_clock(history) == set()
    trained = 240.0
    assert times.by_clock(history) == {"end"}


def test_the_time_of_an_epoch_counts_both_attempts() -> None:
    now = 100.0
    first = History("loss/val", "min", clock=lambda: now)
    first.begin_epoch()
    now = 103.0
    assert first.end_epoch() == 3.0
    first.begin_epoch()
    now = 105.0
    first.last, first.eval_s = {"loss/val": 1.0}, 0.5
    state = first.state_dict()
    assert state["elapsed_s"] == 2.0
    second = History("loss/val", "min", clock=lambda: now)
    second.load_state_dict(state)
    now = 1000.0
    second.begin_epoch()
    now = 1004.0
    assert second.end_epoch() == 6.0
    assert (second.epoch_s, second.eval_s, second.last) == ([3.0, 6.0], 0.5, {"loss/val": 1.0})
    second.begin_epoch()
    now = 1005.0
    assert second.end_epoch() == 1.0, "the epoch after counts from zero"
    assert second.state_dict()["elapsed_s"] == 0.0
    assert first.epoch_s == [3.0], "the second has a list of its own"


NAN, INF = float("nan"), float("inf")

BETTER: dict[str, Better] = {"loss": "min", "accuracy": "max"}


def due_after(
    values: list[float], metric: str = "loss/val", patience: int | None = 2, **more: float
) -> int | None:
    """The epoch after which it is due; state travels through a checkpoint in each."""
    settings = Settings(metric=metric, patience=patience, **more)
    state = EarlyStop(settings, BETTER).state_dict()
    for epoch, value in enumerate(values, 1):
        subject = EarlyStop(settings, BETTER)
        subject.load_state_dict(state)
        subject.look({metric: value, "other": 0.0}, 7 * epoch)
        state = subject.state_dict()
        if subject.ended_by:
            return epoch
    return None


@pytest.mark.parametrize(
    ("values", "options", "epoch"),
    [
        ([3.0, 2.0, 2.0, 1.9, 1.9, 1.8], {}, None),
        ([3.0, 2.0, 2.0, 2.5, 1.0], {}, 4),
        ([3.0, 2.0, 2.5], {"patience": 1}, 3),
        (
            [3.0, 2.9, 2.8, 2.7],
            {"min_delta": 0.15},
            None,
        ),  # by 0.2 in two epochs, from the best that counted
        ([3.0, 2.9, 2.8, 2.7], {"min_delta": 0.25}, 3),
        ([0.5, 0.6, 0.6, 0.55], {"metric": "accuracy/val"}, 4),
        ([0.5, 0.6, 0.7, 0.8], {"metric": "accuracy/val", "min_delta": 0.15}, None),
        ([0.5, 0.6, 0.7, 0.8], {"metric": "accuracy/val", "min_delta": 0.25}, 3),
        ([NAN, NAN, 1.0], {}, 2),
        ([2.0, NAN, 1.0, 1.5], {}, None),
        ([1.0, -INF, -INF], {}, 3),
        ([1.0, INF, INF], {"metric": "accuracy/val"}, 3),
        ([0.3, 0.1, NAN, 0.0, -0.1], {"patience": None, "threshold": 0.0}, 4),
        ([0.5, 0.89, 0.9], {"metric": "accuracy/val", "patience": None, "threshold": 0.9}, 3),
        ([0.5, 0.4, 0.3, 0.95], {"metric": "accuracy/val", "threshold": 0.9}, 3),
    ],
)
def test_it_is_due_after_so_many_epochs_without_an_improvement(
    values: list[float], options: dict[str, float], epoch: int | None
) -> None:
    assert due_after(values, **options) == epoch  # type: ignore[arg-type]


def test_another_metric_is_counted_anew() -> None:
    subject = EarlyStop(Settings(metric="accuracy/val", patience=1), BETTER)
    loss = EarlyStop(Settings(metric="loss/val", patience=1), BETTER)
    loss.look({"loss/val": 0.1}, 40)
    subject.load_state_dict(loss.state_dict())
    subject.look({"accuracy/val": 0.05}, 50)
    assert subject.ended_by is None


def test_all_workers_end_after_the_same_epoch_and_the_summary_says_why(tmp_path: Path) -> None:
    stop = "early_stop={metric: accuracy/train, patience: 1, min_delta: 0.9}"
    done = run("hydra.run.dir=run", "world_size=2", "dataset.train_limit=128", stop, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = "in epoch 2: accuracy/train has not improved by more than 0.9 in 1 evaluation; its"
    assert f"\nstopped      {told}" in done.stdout
    folder = RunFolder(tmp_path / "run")
    assert folder.result["status"] == "completed"
    assert folder.result["stopped_early"]["reason"].startswith(
        "accuracy/train has not improved by more than 0.9"
    )
    again = run("hydra.run.dir=run", "resume=auto", cwd=tmp_path)
    assert "nothing was left to train" in again.stdout
    assert folder.result["ended_by"] == "early_stop.patience"
    for stdout in (done.stdout, again.stdout):
        assert "hydra.run.dir=run resume=auto early_stop.patience=...\n" in stdout


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    create_result(RunPaths(tmp_path))
    position = Position(steps_per_epoch=2, total_steps=2)
    record = Record(
        RunPaths(tmp_path), position, History("loss/val", "min"), Observer(), writes=True
    )
    yield record
    with contextlib.suppress(OSError):
        record.end("interrupted", {})


def test_first_record_is_written_aside(record: Record, tmp_path: Path, monkeypatch: Patch) -> None:
    disk_is_free = threading.Event()

    def slowly(paths: RunPaths, **fields: Any) -> None:
        assert disk_is_free.wait(60)
        update_result(paths, **fields)

    monkeypatch.setattr("expt.worker.record.update_result", slowly)
    record.begin(total_steps=2)
    assert "total_steps" not in read_result(RunPaths(tmp_path)), "nobody has waited for the disk"
    threading.Timer(0.05, disk_is_free.set).start()
    record.log({"loss/train": 0.5})
    assert read_result(RunPaths(tmp_path))["total_steps"] == 2


def test_full_disk_is_told_when_measuring(record: Record, monkeypatch: Patch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("expt.worker.record.update_result", full)
    record.begin(total_steps=2)
    with pytest.raises(OSError, match="No space left"):
        record.log({"loss/train": 0.5})
