"""What an experiment sets beside other choices: told where the two do not go together, and nowhere
else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.command.experiment import told
from expt.errors import ConfigError

YAML = """# @package _global_
defaults:
  - override /model: null
  - override /dataset: mnist
model:
  _target_: mine.Net
dataset:
  standardise: true
  size: [8]
optimizer:
  groups: [{match: head, scale: 2}]
early_stop: {metric: loss/val, patienc: 3}
epochs: 0
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A person's own YAML."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(YAML)
    return tmp_path


def explained(problem: str, *words: str, conf: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised, told(words, [conf]):
        raise ConfigError(problem)
    return tuple(raised.value.problems)


NO_KEY = "dataset.standardise=True: there is no such key."


@pytest.mark.parametrize("word", ["", "dataset=mnist", "model=mlp model._target_=mine.Other"])
@pytest.mark.parametrize(
    "problem",
    [
        NO_KEY,
        "early_stop.patienc=3: no key",
        "optimizer.groups.0.scale=2: no key",
        "epochs=0: too few",
    ],
)
def test_a_key_that_nobody_typed_is_told_with_the_experiment(
    problem: str, word: str, conf: Path
) -> None:
    found = explained(problem, "experiment=own", *word.split(), conf=conf)
    assert found == (f"{problem.removesuffix('.')} (experiment=own sets it)",)


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        ("epochs=-1: too few", "epochs=-1"),
        ("early_stop.metric=3: no", "early_stop={metric: 3}"),
        ("early_stop.patienc=3: no key", "early_stop.patienc=3"),
        ("model: no", ""),
        ("task=classification: no", ""),
        ("a model of several phases", ""),
    ],
)
def test_other_problems_stay_what_they_are(problem: str, word: str, conf: Path) -> None:
    assert explained(problem, "experiment=own", word, conf=conf) == (problem,)
    assert (
        explained(NO_KEY, "epochs=3", conf=conf)
        == explained(NO_KEY, "experiment=none", conf=conf)
        == (NO_KEY,)
    )


def test_a_choice_that_has_not_what_the_experiment_sets_is_told_with_both(conf: Path) -> None:
    first = "experiment=own dataset=digits: the experiment sets"
    assert explained(NO_KEY, "experiment=own", "dataset=digits", conf=conf) == (
        (
            f"{first} dataset.standardise, which dataset=digits has not; leave out dataset=digits,"
            " or add ~dataset.standardise"
        ),
    )
    assert explained(
        "dataset.size=[8]: no integer", "experiment=own", "dataset=digits", conf=conf
    ) == (
        (
            f"{first} what dataset=digits takes otherwise (dataset.size=[8]: no integer); leave out"
            " dataset=digits, or type dataset.size=..."
        ),
    )


@pytest.mark.parametrize("word", ["model=mlp", "model=mine"])
def test_a_choice_beside_a_class_of_the_experiment_is_refused(word: str, conf: Path) -> None:
    says = rf"^experiment=own {word}: the experiment has a model of its own, mine\.Net, "
    with pytest.raises(ConfigError, match=says), told(["experiment=own", word], [conf]):
        pytest.fail("it would get the other's keys")
    with told(["experiment=own", word, "model._target_=mine.Other"], [conf]), told([word], [conf]):
        pass  # the class is typed, or there is no experiment


def test_a_key_that_a_group_of_ones_own_sets_is_told_with_its_choice(conf: Path) -> None:
    (conf / "recipe").mkdir()
    (conf / "recipe" / "wide.yaml").write_text("# @package _global_\nmodel: {width: 8}\n")
    (conf / "recipe" / "within.yaml").write_text("model: {width: 8}\n")
    problem = "model.width=8: there is no such key."
    (alone,) = explained(problem, "+recipe=wide", conf=conf)
    assert alone == "model.width=8: there is no such key (recipe=wide sets it)"
    (beside,) = explained(problem, "model=mlp", "+recipe=wide", conf=conf)
    assert beside.startswith(
        "recipe=wide model=mlp: the recipe sets model.width, which model=mlp has not; leave out"
    )
    assert explained(problem, "+recipe=wide", "model.width=8", conf=conf) == (problem,)
    assert explained(problem, "+recipe=within", conf=conf) == (problem,)
