"""The keys of a search: what conf/ says of each, and what is wrong with a value."""

import dataclasses
import re
from typing import Any, get_args

import pytest

from expt.command.conf_files import options
from expt.config import conf_dir, read_yaml
from expt.config.search import SamplerName, Search, parse_search
from expt.errors import ConfigError


def test_every_sampler_has_all_keys_at_their_defaults() -> None:
    found = {name: read_yaml(conf_dir() / f"search/{name}.yaml") for name in options("search")}
    assert {*get_args(SamplerName)} == found.keys()
    for name in get_args(SamplerName):
        content = {key: value for key, value in found[name].items() if key != "defaults"}
        assert {*content} == {field.name for field in dataclasses.fields(Search)}
        assert parse_search(content) == parse_search({"name": name, "runs": content["runs"]})


@pytest.mark.parametrize(
    "given",
    [
        {"name": "nsga2", "population": 8, "random_fraction": 0.1},
        {"name": "random", "rungs": "asha", "reduction": 2, "min_epochs": 2},
        {"name": "random", "reduction": 3, "population": None},
    ],
)
def test_what_the_sampler_heeds_or_is_as_by_default_is_taken(given: dict[str, Any]) -> None:
    assert parse_search(given)


def test_one_text_is_a_list_of_one_and_a_mapping_names_conditions() -> None:
    found = parse_search(
        {"name": "tpe", "constraints": "a<1", "when": {"model=mlp": ["seed=1,2", "epochs=1,2"]}}
    )
    assert found.constraints == ("a<1",)
    assert found.when == ("model=mlp: seed=1,2", "model=mlp: epochs=1,2")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"runs": 0}, "search.runs=0"),
        ({"rungs": "hyperband"}, "search.rungs="),
        ({"run": 3}, "search.run=3"),
        ({"reduction": 1}, "search.reduction=1"),
        ({"population": 8}, "search.population=8"),
        ({"name": "random", "random_fraction": 0.4}, "search.random_fraction=0.4"),
        ({"name": "random", "warm_start": "a"}, "search.warm_start=[a]: has"),
        ({"min_epochs": 2}, "search.min_epochs=2"),
        ({"rungs": "median", "reduction": 2}, "search.reduction=2"),
        ({"keep_checkpoints": True}, "search.keep_checkpoints=true"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}"):
        parse_search({"name": "tpe", **given})


def test_an_axis_of_a_condition_that_is_one_number_is_its_text() -> None:
    assert parse_search({"name": "tpe", "when": {"model=mlp": 5}}).when == ("model=mlp: 5",)
