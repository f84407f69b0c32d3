"""What makes two runs the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from expt.command.conf_files import conf_dir
from expt.command.overrides import register_resolvers
from expt.config.identity import hyperparameters, identity, shown
from expt.config.parse import parse, plain
from expt.config.schema import RunConfig
from expt.machine import Machine


def config(*overrides: str) -> RunConfig:
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return parse(plain(compose("config", overrides=list(overrides))), Machine(cpus=8))


@pytest.mark.parametrize(
    "override", ["threads=3", "timeout_s=5.0", "dataset.root=/elsewhere", "dataset.download=false", "world_size=auto"]
)
def test_what_cannot_change_the_result_does_not_count(override: str) -> None:
    assert identity(config("dataset=mnist", override)) == identity(config("dataset=mnist"))


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=0.123", "seed=1", "epochs=11", "batch_size=32", "model=convnet", "model.hidden=[64]", "amp=true",
        "dataset=fashion_mnist", "dataset.train_limit=100", "world_size=4", "objective=loss/val",
    ],
)  # fmt: skip
def test_what_can_change_it_does(override: str) -> None:
    assert identity(config("dataset=mnist", override)) != identity(config("dataset=mnist"))


def test_a_default_spelled_out_is_the_same_run() -> None:
    assert identity(config("model=mlp", "seed=0", "epochs=10")) == identity(config())


def test_an_identity_stays_over_processes_and_is_12_hexadecimal_digits() -> None:
    found = identity(config("seed=3"))
    assert len(found) == 12
    assert int(found, 16) >= 0
    assert json.loads(json.dumps(shown(config("seed=3"))))["seed"] == 3


def test_hyperparameters_carry_the_keys_that_a_person_types() -> None:
    shown: dict[str, Any] = hyperparameters(dataclasses.asdict(config("model=mlp", "optimizer.lr=0.5")))
    assert (shown["model"], shown["optimizer"], shown["optimizer.lr"], shown["seed"]) == ("mlp", "sgd", 0.5, 0)
    assert all(isinstance(value, bool | int | float | str) for value in shown.values())
