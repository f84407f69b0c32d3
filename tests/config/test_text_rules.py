"""Text wants a task, a model and parts that fit it."""

from __future__ import annotations

import re

import pytest

from expt.errors import ConfigError
from tests.conftest import Configured

TEXT = ("dataset=text", "dataset.root=text.txt", "model=transformer", "task=language_model")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["model=mlp"],
            "model=mlp: takes images, and dataset=text has tokens; use model=transformer",
        ),
        (
            ["model=convnet"],
            "model=convnet: takes images, and dataset=text has tokens; use model=transformer",
        ),
        (["task=classification"], "task=classification: dataset=text is of task=language_model"),
        (["task=regression"], "task=regression: dataset=text is of task=language_model"),
        (["model.width=30"], "model.width=30: must divide by model.heads=4; use 28 or 32"),
        (["model.width=2"], "model.width=2: must divide by model.heads=4; use 4"),
        (
            ["dataset.val_fraction=0.5", "dataset.test_fraction=0.5"],
            "it leaves nothing to train on; use less",
        ),
        (
            ["dataset.test_fraction=0", "eval_split=test"],
            "eval_split=test: dataset.test_fraction=0.0 ",
        ),
        (
            ["dataset.test_fraction=0", "objective=loss/test"],
            "objective=loss/test: dataset.test_fraction=0.0 ",
        ),
        (["dataset.context=0"], "dataset.context=0: input should be greater than or equal to 1"),
        (
            ["dataset.tokens=words"],
            "dataset.tokens=words: is neither bytes nor a tokenizer's .json; use",
        ),
        (["objective=f1/val"], "objective=f1/val: not one of loss/train, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_a_text_is_one_line(
    configured: Configured, words: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        configured(*TEXT, *words)
    assert len(error.value.problems) == 1


def test_images_want_other_models_and_tasks(configured: Configured) -> None:
    with pytest.raises(ConfigError) as error:
        configured("model=transformer", "task=language_model")
    assert list(error.value.problems) == [
        "model=transformer: takes tokens, and dataset=digits has no vocabulary; use dataset=text",
        "task=language_model: dataset=digits is of task=classification, or of a custom one",
    ]


def test_the_loss_is_what_a_language_model_is_chosen_by(configured: Configured) -> None:
    assert configured(*TEXT).objective == "loss/val"
    assert (
        configured(*TEXT, "eval_split=test", "objective=perplexity/test").objective
        == "perplexity/test"
    )
