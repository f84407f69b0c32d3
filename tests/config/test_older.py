"""A run that an older version has recorded is what it was then."""

from __future__ import annotations

import json
from typing import Any

import pytest

from expt.config.identity import identity, shown
from expt.config.older import brought_up_to_date
from expt.config.parse import parse_again
from expt.machine import Machine
from tests.config.test_identity import config


def recorded(**changed: Any) -> dict[str, Any]:
    """The settings in an older version's result.json."""
    settings: dict[str, Any] = json.loads(json.dumps(shown(config())))
    return {**settings, **changed}


@pytest.mark.parametrize(("synced", "now"), [(True, "sync"), (False, "per_worker")])
def test_batch_norm_had_a_key_of_ddp(synced: bool, now: str) -> None:
    settings = recorded()
    for key in ("batch_norm", "batch_norm_group"):
        del settings[key]
    settings["ddp"]["sync_batchnorm"] = synced
    then = parse_again(settings, Machine(cpus=8))
    assert then.batch_norm == now
    assert identity(then) == identity(config(f"batch_norm={now}"))


def test_an_optimizer_had_no_groups() -> None:
    settings = recorded()
    for key in ("groups", "decay_biases_and_norms", "layer_decay"):
        del settings["optimizer"][key]
    assert brought_up_to_date(settings) == recorded(), "or it could not be resumed"
    assert identity(parse_again(settings, Machine(cpus=8))) == identity(config())


def test_a_crop_showed_black_and_all_parameters_were_trained_to_the_end() -> None:
    words = ("dataset.augment.crop_padding=1", "optimizer.groups=[{match:bias,lr_scale:0.5}]")
    now: dict[str, Any] = json.loads(json.dumps(shown(config(*words))))
    then = json.loads(json.dumps(now))
    del then["dataset"]["augment"]["padding_mode"]
    del then["optimizer"]["groups"][0]["epochs"]
    assert brought_up_to_date(then) == now, "or it could not be resumed"
    assert identity(parse_again(then, Machine(cpus=8))) == identity(config(*words))


def test_an_own_scheduler_was_stepped_with_the_optimiser() -> None:
    own = {
        "name": "_target_",
        "target": "torch.optim.lr_scheduler.StepLR",
        "kwargs": {"step_size": 3},
    }
    then = parse_again(recorded(scheduler=own), Machine(cpus=8))
    assert then.scheduler.interval == "step"
    assert identity(then) == "c6d843e7c277", "by which it is found"
    now = parse_again(recorded(scheduler={**own, "interval": "epoch"}), Machine(cpus=8))
    assert identity(now) != identity(then)


def test_first_weights_and_frozen_parameters_have_not_been_a_choice_always() -> None:
    settings = recorded()
    del settings["weights"], settings["freeze"]
    assert identity(parse_again(settings, Machine(cpus=8))) == identity(config())
    assert brought_up_to_date(settings) == recorded(), "so that such a run can be resumed"


def test_a_transformer_had_no_choice_of_its_parts() -> None:
    words = ("model=transformer", "dataset=text", "dataset.root=a.txt", "task=language_model")
    settings: dict[str, Any] = json.loads(json.dumps(shown(config(*words))))
    before = {**settings, "model": {key: settings["model"][key] for key in OF_A_TRANSFORMER}}
    resumed, now = brought_up_to_date(before)["model"], settings["model"]
    assert {**resumed, "size": None} == now, "or it could not be resumed"
    assert (
        identity(parse_again(before, Machine(cpus=8))) == identity(config(*words)) == "fb6eb45e94c4"
    )


OF_A_TRANSFORMER = ("name", "layers", "heads", "width", "dropout", "tied")
