"""How many outputs a model has where neither a dataset nor a task of a person's own says a number
of classes, and what is drawn of them."""

from __future__ import annotations

from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.inference import load
from expt.worker import build
from tests.conftest import Configured
from tests.worker.conftest import ALONE, TrainAlone

OWN = "tests.worker.own_pictures"
WORDS = (
    *(
        "~dataset",
        f"+dataset._target_={OWN}.Pictures",
        "+dataset.num_workers=0",
        "epochs=1",
        "batch_size=20",
    ),
    *("~task", f"+task._target_={OWN}.Embedded", "objective=loss/val"),
)
NET = ("~model", f"+model._target_={OWN}.Net")
FLOATS = "+dataset.dtype=float32"


def built(config: RunConfig) -> tuple[Any, Any]:
    """The run's model, and the same again from what its record has of the data."""
    data = build.build_data(config, ALONE)
    record: Any = {"data": data.info.told}
    return build.build_learner(config, data, ALONE).module, load._built(config, record)


@pytest.mark.parametrize(
    ("words", "outputs"),
    [
        ((), 10),
        (("+model.num_classes=12",), 12),
        ((FLOATS,), 1),
        ((FLOATS, "+model.num_classes=12"), 12),
        (("+dataset.num_classes=11",), 11),
    ],
)
def test_own_output_number(words: tuple[str, ...], outputs: int, configured: Configured) -> None:
    """Of a target that is a number there is one output, unless the model says otherwise."""
    for model in built(configured(*WORDS, *NET, *words)):
        assert model.layer.out_features == outputs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("model=mlp",),
            "model=mlp: needs num_classes, and the dataset has not; give dataset.num_classes=N, or",
        ),
        (("~model", f"+model._target_={OWN}.Named"), "'num_classes'"),
        (
            (*NET, "+model.num_classes=9", "+dataset.num_classes=10"),
            "model.num_classes: expt passes this from the dataset;",
        ),
    ],
)
def test_number_of_outputs_wrong(words: tuple[str, ...], told: str, configured: Configured) -> None:
    with pytest.raises(ConfigError) as caught:
        built(configured(*WORDS, *words))
    assert told in str(caught.value)


def test_only_what_is_a_score_of_a_class_makes_a_confusion_matrix(train_alone: TrainAlone) -> None:
    more = (*NET, "+dataset.num_classes=10", "tensorboard.images=true")
    for name, words in (("embedded", WORDS), ("scores", WORDS[:-3])):
        done = train_alone(*words, *more, name=name)
        pictures = EventAccumulator(str(done.folder)).Reload().Tags()["images"]
        assert ("confusion/test" in pictures, bool(pictures)) == (name == "scores",) * 2
