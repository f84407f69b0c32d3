"""Text wants a task, a model and parts that fit it."""

import pytest

from expt.errors import ConfigError
from tests.conftest import Configured
from tests.facade import as_typed

TEXT = ("dataset=text", "dataset.root=text.txt", "model=transformer", "task=language_model")


@pytest.mark.parametrize(
    "words",
    [
        *as_typed("model=mlp model=convnet task=classification task=regression model.width=30"),
        *as_typed("model.width=2"),
        "dataset.test_fraction=0.5 dataset.val_fraction=0.5",
        "dataset.test_fraction=0 eval_split=test",
        "dataset.test_fraction=0 objective=loss/test",
        "dataset.tokens=words",
    ],
)
def test_what_does_not_fit_a_text_is_one_line(configured: Configured, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        configured(*TEXT, *words.split())
    (problem,) = error.value.problems
    assert problem.startswith(words.split()[-1])


def test_images_want_other_models_and_tasks(configured: Configured) -> None:
    with pytest.raises(ConfigError) as error:
        configured("model=transformer", "task=language_model")
    assert list(error.value.problems) == [
        "task=language_model: dataset=digits is for task=classification, or for a custom task"
    ]


def test_what_each_task_is_chosen_by(configured: Configured) -> None:
    own = "task={_target_: mine.Own, metrics: {mae: min}}"
    assert configured(own).objective == "mae/val"
    assert configured(*TEXT).objective == "loss/val"
    assert (
        configured(*TEXT, "eval_split=test", "objective=perplexity/test").objective
        == "perplexity/test"
    )
