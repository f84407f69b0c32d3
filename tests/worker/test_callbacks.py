"""Code of a person's own that is told of a run: when, of what, and that no number depends on it."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from expt.config.constraints import Target
from expt.dashboards.tensorboard import Dashboard
from expt.errors import ConfigError, RunFailed
from expt.runs import tags
from expt.training.learner import Position
from expt.worker.callbacks import Callbacks, as_bytes
from tests.facade import Capture, Patch, as_typed
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, stopped_and_resumed
from tests.worker.looking_on import Busy, Noting
from tests.worker.test_run import TURNING, measured

OWN = "tests.worker.looking_on"


def words(*classes: str) -> str:
    return "callbacks=[" + ",".join(f"{{_target_: {OWN}.{name}}}" for name in classes) + "]"


NOISY = (*TURNING, "model=convnet", "model.dropout=0.2", "epochs=2", "ema=0.9")


@pytest.mark.slow
def test_called_every_few_steps(train_alone: TrainAlone, train_together: TrainTogether) -> None:
    """The same when resumed after a step that it was called at, and on two workers."""
    two = train_together(2, *TURNING, "epochs=1", "log_every=1", words("Stepping"), name="two")
    assert len(two.curve("mine/calls")) == 3
    noisy = (*NOISY, "log_every=1", words("Stepping", "Busy"))
    done = train_alone(*noisy, name="done")
    assert [step for step, _ in done.curve("mine/calls")] == [3, 6, 9, 12, 15, 18]
    plain = train_alone(*NOISY, "log_every=1", name="plain")
    others = [point for point in done.points if '"mine/' not in point]
    assert others == plain.points, "no number depends on it"
    assert "callbacks" not in plain.state()
    assert done.run.callbacks.beyond(3) == done.run.callbacks.beyond(4) == {}
    assert done.run.callbacks.beyond(2) == {"callbacks.0.every_steps": ("steps", 3)}
    assert stopped_and_resumed(train_alone, *noisy, step=12).points == done.points


@pytest.mark.parametrize("every", ["0", "true", "null", "2.5"])
def test_a_callback_of_steps_says_how_often(every: str, train_alone: TrainAlone) -> None:
    with pytest.raises(ConfigError, match=r"^callbacks\.0: Stepping\.every_steps="):
        train_alone(f"callbacks=[{{_target_: {OWN}.Stepping, every: {every}}}]")


def test_a_class_may_come_and_go_between_two_parts_of_a_run(train_alone: TrainAlone) -> None:
    first = train_alone(*TURNING, "epochs=1", words("Busy", "Noting", "Busy"))
    state = first.state()["callbacks"]
    assert [one["target"].rpartition(".")[2] for one in state] == ["Busy", "Noting", "Busy"]
    state[0]["state"]["drawn"] = [7.0]
    resumed = train_alone(
        *TURNING, "epochs=1", words("Noting", "Busy"), name="another"
    ).run.callbacks
    resumed.load_state_dict(state)
    assert cast(Busy, resumed.built[1]).drawn == [7.0]


def test_what_it_is_told_and_when(train_alone: TrainAlone, monkeypatch: Patch) -> None:
    drawn: list[tuple[str, torch.Tensor]] = []
    monkeypatch.setattr(Dashboard, "picture", lambda self, tag, image: drawn.append((tag, image)))
    done = train_alone(*TURNING, words("Noting", "Busy"))
    noting = cast(Noting, done.run.callbacks.built[0])
    assert [moment for moment, _ in noting.seen] == [*["val", "epoch"] * 5, "test"]
    assert [view.epoch for _, view in noting.seen] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert [(step, view.metrics["loss/val"]) for moment, view in noting.seen if moment == "val"
            for step in [view.step]] == done.curve("loss/val")  # fmt: skip
    best = dict(done.curve("best/loss/val"))
    assert [
        view.metrics["best/loss/val"] for moment, view in noting.seen if moment == "epoch"
    ] == list(best.values())
    for moment, split in ((0, "val"), (-1, "test")):
        view = noting.seen[moment][1]
        assert measured(view.model, done.run, split)[0] == pytest.approx(
            view.metrics[f"loss/{split}"], abs=1e-6
        )
    with pytest.raises(TypeError):
        noting.seen[0][1].metrics["loss/val"] = 0.0  # type: ignore[index]
    assert [tag for tag, _ in drawn] == ["mine/square"] * 5
    assert drawn[0][1].tolist() == [[[255] * 3] * 4] * 4


def test_the_tags_of_expt_are_its_own(train_alone: TrainAlone) -> None:
    done = train_alone(*TURNING, "on_nan=skip", "epochs=1", "log_every=5")
    begin = {tag.partition("/")[0] for tag, _ in done.values}
    metrics = {"loss", "accuracy"}
    assert metrics < begin <= metrics | tags.OF_EXPT
    callbacks = train_alone(*TURNING, "epochs=1", words("Noting"), name="own").run.callbacks
    for tag in ("loss/val", "accuracy/mine", "lr", "best/mine"):
        with pytest.raises(
            ValueError, match=f"^the tag '{tag}' is reserved; use another, such as 'mine/"
        ):
            callbacks._checked(tag)
    assert callbacks._checked("mine/loss") == "mine/loss"


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        (
            "Raising",
            RunFailed,
            (
                r"Raising\.on_evaluation_end raised ValueError: the tag 'loss/val' is"
                r" .*looking_on\.py, line "
            ),
        ),
        ("Unkept", ConfigError, r"^callbacks\.1\.mean\.0: .* collections\.deque;"),
        ("Missing", ConfigError, r"has no Missing"),
        ("Mapping", ConfigError, r"is not a subclass of expt\.training\.callback\.Callback"),
    ],
)
def test_callback_errors(train_alone: TrainAlone, name: str, error: Any, told: str) -> None:
    with pytest.raises(error, match=told) as caught:
        train_alone(*TURNING, "epochs=1", words("Noting", name))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(("callbacks.1", "_target_="))


def test_a_method_that_is_never_called_is_told(capfd: Capture) -> None:
    targets = [Target(target=f"{OWN}.{name}", kwargs={}) for name in ("Mistyped", "Noting")]
    Callbacks(targets, ALONE, Position(1, 1), {})
    told = (
        "warning: callbacks.0: Mistyped.on_epoch_ends is never called. Did you mean 'on_epoch_end'?"
    )
    assert [line for line in capfd.readouterr().err.splitlines() if "never called" in line] == [
        told
    ]


def test_a_picture_is_made_of_what_looks_like_one() -> None:
    grey = as_bytes(torch.tensor([[[0.0, 0.5], [1.0, 3.0]]], dtype=torch.float16))
    assert grey.tolist() == [[[0], [128]], [[255], [255]]]
    assert as_bytes(torch.tensor([[[7]], [[8]], [[9]]], dtype=torch.uint8)).tolist() == [
        [[7, 8, 9]]
    ]
    for wrong in (
        torch.ones(2, 3),
        torch.ones(2, 4, 4),
        torch.ones(1, 4, 4).long(),
        np.ones((3, 4, 4)),
    ):
        with pytest.raises(ValueError, match=r"^a picture is "):
            as_bytes(cast(torch.Tensor, wrong))


def test_two_workers_have_one(train_together: TrainTogether) -> None:
    """The copy of a model whose batch norms look at all workers can be trained alone."""
    small = as_typed(
        "dataset.train_limit=128 epochs=2 model=convnet model.dropout=0 batch_norm=sync"
    )
    two, one = (
        train_together(2, *small, words("Lonely"), name="two"),
        train_together(1, *small, name="one"),
    )
    assert dict(two.curve("loss/val")) == pytest.approx(dict(one.curve("loss/val")), abs=1e-5)
    assert len(two.curve("mine/sum")) == 2
