"""What makes two runs the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from expt.config.constraints import Target
from expt.config.identity import NOT_IN_RESULT, OF_TRACKERS, flat, hyperparameters, identity, shown
from expt.config.parse import parse, parse_again
from expt.config.schema import RunConfig
from expt.machine import Machine
from tests.composing import composed


def config(*overrides: str, gpus: tuple[str, ...] = ()) -> RunConfig:
    return parse(composed(*overrides), Machine(gpus=gpus, cpus=8))


# As earlier versions wrote them into result.json: a half-finished sweep goes on by them.
PINNED = {
    "": "aab41fa49d57",
    "model=convnet dataset=mnist": "097fc884df95",
    "model=resnet18 dataset=cifar10": "df2570b415f1",
    "optimizer=adamw scheduler=cosine": "58553412213a",
    "init=kaiming": "a38543c3713c",
    "experiment=keras_convnet": "939fb2dde106",
    "experiment=d2l_resnet18": "33a89ba6c40d",
    "amp=bf16": "e89163952645",
    "dataset=image_folder dataset.root=photos": "5afeb12f05e1",
    "compile=true": "3603e5dc0468",
    "dataset=cifar10 optimizer.groups=[{match:head,lr_scale:0.1}]": "8328cb63c528",
    "dataset=torchvision dataset.set=KMNIST": "ce1212c7fa64",
    "dataset=segmentation_folder task=segmentation model=unet dataset.root=x dataset.num_classes=2": (
        "22ca06187303"
    ),
}


@pytest.mark.parametrize(
    ("words", "known"), PINNED.items(), ids=[words or "defaults" for words in PINNED]
)
def test_an_identity_stays_what_it_was_in_earlier_versions(words: str, known: str) -> None:
    assert identity(config(*words.split())) == known


def test_a_batch_norm_of_all_workers_is_what_it_was_under_its_former_name() -> None:
    assert identity(config("batch_norm=sync", gpus=("a", "b"))) == "761878e9700a", (
        "of ddp.sync_batchnorm=true"
    )


def test_a_rate_that_falls_with_no_layer_is_none_that_falls() -> None:
    """The same settings, so also the same groups of parameters and the same numbers."""
    assert config("optimizer.layer_decay=1.0") == config("optimizer.layer_decay=1") == config()
    assert config("optimizer.layer_decay=0.9").optimizer.layer_decay == 0.9


def test_pictures_read_in_other_channels_are_another_run() -> None:
    folder = ("dataset=image_folder", "dataset.root=photos")
    assert (
        identity(config(*folder, "dataset.channels=3"))
        == PINNED["dataset=image_folder dataset.root=photos"]
    )
    assert (
        identity(config(*folder, "dataset.channels=1"))
        != PINNED["dataset=image_folder dataset.root=photos"]
    )


def test_a_limit_that_takes_other_images_than_it_did_is_another_run() -> None:
    limited = config("dataset=image_folder", "dataset.root=photos", "dataset.train_limit=10")
    assert identity(limited) != "20266ee061ab"


EVERY_KEY = (
    ("dataset=mnist", "model=convnet", "scheduler=cosine", "init=kaiming"),
    (
        "dataset=image_folder",
        "dataset.root=photos",
        "scheduler=step",
        "optimizer=adam",
        "init=xavier",
    ),
    ("dataset=synthetic", "model=resnet18", "scheduler=one_cycle", "init=orthogonal"),
    ("init=normal", "scheduler=plateau"),
    ("dataset=table", "dataset.path=t.csv", "dataset.targets=y"),
    ("model=transformer", "dataset=text", "dataset.root=t.txt", "task=language_model"),
)
NOT_IN_EXPERIMENT = {
    "resume", "max_restarts", "timeout_s", "debug", "profile", "preflight", "print_every", "threads", "onednn",
    "ddp.shared_memory",
    "checkpoint.every_steps", "checkpoint.every_epochs", "checkpoint.every_minutes", "checkpoint.keep",
    "tensorboard.images", "tensorboard.graph", "tensorboard.norms", "tensorboard.histograms", "tensorboard.health",
    "dataset.root", "dataset.download", "dataset.num_workers", "dataset.cache", "patches.unguarded", "patches.malloc",
    "patches.backward", "dataset.path", "checkpoint.sharded", "activation_checkpointing", "offload", "model.size",
    "sharding.wrap", "sharding.shards", "sharding.reshard_after_forward", "sharding.reduce_each_part",
}  # fmt: skip


def replaced(instance: Any, path: list[str], value: object) -> Any:
    """A copy of nested frozen dataclasses with one field changed, unchecked."""
    first, *rest = path
    copy = object.__new__(type(instance))
    for field in dataclasses.fields(instance):
        object.__setattr__(copy, field.name, getattr(instance, field.name))
    object.__setattr__(
        copy, first, replaced(getattr(instance, first), rest, value) if rest else value
    )
    return copy


def keys() -> list[tuple[RunConfig, str]]:
    """Every key of configurations that have all keys between them, each once."""
    found: dict[str, RunConfig] = {}
    for one in (config(*words) for words in EVERY_KEY):
        settings = dataclasses.asdict(one)
        del settings["secrets"]
        for key in flat(settings):
            found.setdefault(key, one)
    return [(one, key) for key, one in found.items()]


def test_every_key_counts_but_for_those_that_change_no_result() -> None:
    own = [(one, key) for one, key in keys() if key.partition(".")[0] not in OF_TRACKERS]
    changed = [
        (key, identity(one), identity(replaced(one, key.split("."), "changed"))) for one, key in own
    ]
    assert (
        {key for key, before, after in changed if before == after}
        == NOT_IN_EXPERIMENT
        == NOT_IN_RESULT
    )
    assert len(changed) > 100


def test_where_copies_of_a_run_go_does_not_count() -> None:
    found = [(one, key) for one, key in keys() if key.partition(".")[0] in OF_TRACKERS]
    assert {key.partition(".")[0] for _, key in found} == {"send", "mlflow", "wandb"}
    assert all(
        identity(replaced(one, key.split("."), "changed")) == identity(one) for one, key in found
    )


def test_a_person_s_own_arguments_count() -> None:
    settings = {"_target_": "mine.Net", "width": 3}
    node = composed()
    one, other = (
        parse({**node, "model": {**settings, "width": w}}, Machine(cpus=8)) for w in (3, 4)
    )
    assert identity(one) != identity(other)


def test_the_arguments_of_a_nested_class_count() -> None:
    node, settings = composed(), {"_target_": "mine.Net"}
    deep = [{"augment": [{"_target_": "mine.Noise", "std": std}]} for std in (0.1, 0.2)]
    one, other = (parse({**node, "model": {**settings, **more}}, Machine(cpus=8)) for more in deep)
    assert identity(one) != identity(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": {}}, {}),
        ({"x.y": 1}, {"x": {"y": 1}}),
        ({"x": {"y": {}}}, {"x": {}}),
        ({"x": [{}]}, {"x": []}),
    ],
    ids=str,
)
def test_arguments_whose_flat_keys_are_alike_are_told_apart(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    node = composed()
    found = {
        identity(parse({**node, "model": {"_target_": "mine.Net", **each}}, Machine(cpus=8)))
        for each in (one, other)
    }
    assert len(found) == 2


def test_arguments_that_are_told_apart_are_known_as_before() -> None:
    own = {
        "_target_": "mine.Net",
        "width": 3,
        "head": {"_target_": "mine.Head", "sizes": [1, {"deep": {}}]},
    }
    metric = {"_target_": "torchmetrics.PearsonCorrCoef", "better": "max"}
    node = {
        **composed(),
        "model": own,
        "task": {"name": "classification", "metrics": {"pearson": metric}},
    }
    assert identity(parse(node, Machine(cpus=8))) == "9fa729a5c63f"


def test_a_default_spelled_out_is_the_same_run() -> None:
    assert identity(config("model=mlp", "seed=0", "epochs=10", "world_size=2")) == identity(
        config()
    )


def test_an_identity_is_12_hexadecimal_digits() -> None:
    found = identity(config("seed=3"))
    assert len(found) == 12
    assert int(found, 16) >= 0
    assert json.loads(json.dumps(shown(config("seed=3"))))["seed"] == 3


def test_a_secret_is_neither_shown_nor_part_of_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPT_TEST_FOLDER", "/secret/folder")
    with_secret = config("dataset=mnist", "dataset.root=${oc.env:EXPT_TEST_FOLDER}")
    assert with_secret.secrets == {"EXPT_TEST_FOLDER": "/secret/folder"}
    assert shown(with_secret)["dataset"]["root"] == "${oc.env:EXPT_TEST_FOLDER}"
    assert "secrets" not in shown(with_secret)
    assert identity(with_secret) == identity(config("dataset=mnist"))


def test_a_number_that_is_made_of_a_variable_is_not_shown_and_part_of_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPT_TEST_PIN", "4711")
    own = (
        "+model._target_=mine.Net",
        "+model.pin='${oc.decode:${oc.env:EXPT_TEST_PIN}}'",
        "epochs=4711",
    )
    made = config(*own)
    assert isinstance(made.model, Target)
    assert made.model.kwargs["pin"] == 4711
    assert shown(made)["model"]["kwargs"]["pin"] == "${oc.decode:${oc.env:EXPT_TEST_PIN}}"
    assert shown(made)["epochs"] == 4711
    again = parse_again(shown(made), Machine(cpus=8))
    assert (shown(again), identity(again)) == (shown(made), identity(made))
    monkeypatch.setenv("EXPT_TEST_PIN", "4712")
    assert identity(config(*own)) != identity(made)


def test_hyperparameters_carry_the_keys_that_a_person_types() -> None:
    settings: dict[str, Any] = hyperparameters(
        dataclasses.asdict(config("model=mlp", "optimizer.lr=0.5"))
    )
    assert (
        settings["model"],
        settings["optimizer"],
        settings["optimizer.lr"],
        settings["seed"],
    ) == (
        "mlp",
        "sgd",
        0.5,
        0,
    )
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())
