"""A run ends where its metric has stopped improving, says so, and counts on after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.config.kinds import Better
from expt.config.schema import EarlyStop as Settings
from expt.runs import checkpoint
from expt.worker.record import EarlyStop
from tests.facade import RunFolder, run
from tests.worker.conftest import TrainAlone
from tests.worker.test_run import TURNING

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


EARLY = (*TURNING, "epochs=9", "checkpoint.every_epochs=null")


def test_a_run_ends_early_and_goes_on_with_more_patience(train_alone: TrainAlone) -> None:
    long = [loss for _, loss in train_alone(*EARLY, name="long").curve("loss/val")]
    end = due_after(long, patience=1)
    assert end
    assert end < 8

    def patient(epochs: int) -> str:
        return f"early_stop={{metric: loss/val, patience: {epochs}}}"

    done = train_alone(*EARLY, patient(1))
    assert (done.status, len(done.curve("loss/val")), len(done.curve("loss/test"))) == (
        "completed",
        end,
        1,
    )
    assert done.result["stopped_early"]["epoch"] == end
    assert f"its best was {long[end - 2]:.4f} at step" in done.result["stopped_early"]["reason"]
    last = done.paths.last
    assert checkpoint.load(last)["position"]["epoch"] == end, (
        "though no epoch's checkpoint was asked for"
    )
    again = train_alone(*EARLY, patient(1), source=last, name="again")
    assert (again.status, again.curve("loss/val")) == ("completed", [])
    more = train_alone(*EARLY, patient(9), source=last, name="more")
    assert [loss for _, loss in more.curve("loss/val")] == long[end:]
    assert more.result["stopped_early"] is None


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
