"""Images that have classes, under a task of a person's own."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.worker.conftest import TrainAlone

OWN = "tests.worker.own_pictures"
WORDS = (
    *(
        "~dataset",
        "~model",
        f"+dataset._target_={OWN}.Pictures",
        "+dataset.num_classes=10",
        "+dataset.num_workers=0",
    ),
    *(f"+model._target_={OWN}.Net", "epochs=1", "batch_size=20", "tensorboard.images=true"),
)


def test_what_is_no_score_of_a_class_makes_no_confusion_matrix(train_alone: TrainAlone) -> None:
    done = train_alone(*WORDS, "~task", f"+task._target_={OWN}.Embedded", "objective=loss/val")
    assert done.status == "completed"
    assert EventAccumulator(str(done.folder)).Reload().Tags()["images"] == []


def test_what_is_one_does(train_alone: TrainAlone) -> None:
    done = train_alone(*WORDS)
    assert "confusion/test" in EventAccumulator(str(done.folder)).Reload().Tags()["images"]
