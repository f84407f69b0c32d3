"""What makes two runs the same."""

import copy
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from expt.command.evaluation_settings import evaluation_values
from expt.config import own_code
from expt.config.constraints import Target, typed
from expt.config.identity import (
    REPEATED,
    Content,
    Identity,
    Rule,
    differences,
    differing,
    digest,
    shown,
    typed_hyperparameters,
)
from expt.config.keys import (
    choices_of,
    effects_in_words,
    flat,
    without_effect,
)
from expt.config.parse import parse, recorded, settings_of
from expt.config.schema import TRACKERS, RunConfig
from expt.machine import Machine
from expt.runs.found import FoundRun
from tests.composing import composed
from tests.facade import Patch, as_typed

identity = functools.partial(digest, content={})


def config(*overrides: str, gpus: tuple[str, ...] = ()) -> RunConfig:
    return parse(composed(*overrides), Machine(gpus=gpus, cpus=8))


def test_a_rate_that_falls_with_no_layer_is_none_that_falls() -> None:
    """The same settings, so also the same groups of parameters and the same numbers."""
    assert config("optimizer.layer_decay=1.0") == config("optimizer.layer_decay=1") == config()
    assert config("optimizer.layer_decay=0.9").optimizer.layer_decay == 0.9


EVERY_KEY = (
    ("dataset=mnist", "model=convnet", "scheduler=cosine", "init=kaiming"),
    (
        *as_typed("dataset=image_folder dataset.root=photos scheduler=step optimizer=adam"),
        *as_typed("init=xavier"),
    ),
    ("dataset=synthetic", "model=resnet18", "scheduler=one_cycle", "init=orthogonal"),
    ("init=normal", "scheduler=plateau"),
    ("dataset=table", "dataset.path=t.csv", "dataset.targets=y"),
    ("model=transformer", "dataset=text", "dataset.root=t.txt", "task=language_model"),
)
IN_NO_IDENTITY = {
    "max_restarts", "timeout_s", "debug", "profile", "preflight", "print_every",
    "log_every", "threads", "eval_batch_size", "detect_anomaly",
    "activation_checkpointing", "offload", "model.size",
    "dataset.root", "dataset.path", "dataset.download", "dataset.num_workers", "dataset.cache",
    "dataset.max_categories", "dataset.tokenizer",
    "dataset.group", "dataset.labels",  # of a folder: what the file holds counts
}  # fmt: skip
"""With all keys below the following."""
NO_IDENTITY_BELOW = ("checkpoint", "tensorboard", "patches", "send", *TRACKERS)
WITHOUT_EFFECT = {  # as no other key is set with which they have one
    "base_batch_size", "batch_norm_group", "dataset.augment.padding_mode", "dataset.fold",
    "ddp.find_unused_parameters", "ddp.static_graph", "ddp.gradient_as_bucket_view",
    "ddp.bucket_cap_mb", "ddp.shared_memory",
    "sharding.wrap", "sharding.shards", "sharding.reshard_after_forward",
    "sharding.reduce_each_part",
    "sharding.param_dtype", "sharding.reduce_dtype",
}  # fmt: skip


def replaced(instance: Any, path: list[str], value: object) -> Any:
    """A copy of nested frozen dataclasses with one field changed, unchecked."""
    first, *rest = path
    changed = copy.copy(instance)
    new = replaced(getattr(instance, first), rest, value) if rest else value
    object.__setattr__(changed, first, new)
    return changed


def another(one: RunConfig, key: str) -> object:
    """Another value of the key: the next one that it may have, if these are few."""
    choices, now = choices_of(key), typed(flat(dataclasses.asdict(one))[key])
    few = [value for value in choices if value not in (now, "null")]
    return yaml.safe_load(few[0]) if few else "changed"


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
    every = keys()
    uncounted = {
        key
        for one, key in every
        if identity(one) == identity(replaced(one, key.split("."), another(one, key)))
    }
    below = {key for key in uncounted if key.partition(".")[0] in NO_IDENTITY_BELOW}
    assert uncounted - below == IN_NO_IDENTITY | WITHOUT_EFFECT
    assert {key.partition(".")[0] for key in below} == {*NO_IDENTITY_BELOW}
    assert len(every) - len(uncounted) > 80


@pytest.mark.parametrize(
    ("with_effect", "key"),
    [
        ("lr_scaling=linear", "base_batch_size"),
        ("batch_norm=groups", "batch_norm_group"),
        ("dataset.augment.crop_padding=1", "dataset.augment.padding_mode"),
        ("dataset.folds=3", "dataset.fold"),
        ("strategy=fsdp", "sharding.param_dtype"),
    ],
)
def test_a_key_counts_only_beside_settings_with_which_it_has_an_effect(
    with_effect: str, key: str
) -> None:
    given = {"dataset.fold": "1", "base_batch_size": "32"}.get(key)
    one = config(with_effect, *([f"{key}={given}"] if given else []))
    assert identity(one) != identity(replaced(one, key.split("."), "changed"))


def test_a_key_that_came_later_counts_where_it_is_not_at_its_default() -> None:
    table = ("task=regression", "dataset=diabetes", "model=mlp")
    found = {identity(config(*table, *more)) for more in ((), ("dataset.shuffle=true",))}
    assert len(found) == 1
    for word in ("dataset.shuffle=false", "dataset.val_split=last"):
        found.add(identity(config(*table, word)))
    assert len(found) == 3
    people = ("task=classification", "dataset=table", "dataset.path=a.csv", "dataset.targets=y")
    words = [f"dataset.{word}" for word in ("max_categories=9", "categories=[]", "group=null")]
    words += ["dataset.categories=[zip]", "dataset.group=house"]
    assert len({identity(config(*people, *more)) for more in ((), *((x,) for x in words))}) == 3
    own = "dataset={_target_: a.B, num_classes: 2}"
    of_class = [config("~dataset", f"+{own}", *more) for more in ((), ("+dataset.val={a: 1}",))]
    assert len({*map(identity, of_class)}) == 2


@pytest.mark.parametrize(
    ("rule", "changed", "listed"),
    [
        ("resume", {"epochs": 20, "gpus": 1, "timeout_s": 5.0}, []),
        ("resume", {"optimizer.lr": 0.2, "epochs": 20}, ["optimizer.lr"]),
        ("resume", {"batch_norm_group": 64, "base_batch_size": 8}, []),
        ("fork", {"optimizer.lr": 0.2, "seed": 1, "model.dropout": 0.5}, []),
        ("fork", {"model.hidden": [8], "dataset.val_fraction": 0.5}, ["dataset.val_fraction",
            "model.hidden"]),
        ("fork", {"model.name": "convnet", "model.pool": 2, "optimizer.name": "adam"},
            ["model.name"]),
        ("fork_within_epoch", {"seed": 1, "optimizer.lr": 0.2}, ["seed"]),
        ("evaluate", {"batch_size": 8, "dataset.fold": 1, "dataset.mean": [0.5]}, []),
        ("evaluate", {"dataset.name": "mnist"}, ["dataset.name"]),
        ("result", {"seed": 1, "log_every": 1, "threads": 9, "optimizer.eps": 1}, ["optimizer.eps",
            "seed"]),
    ],
)  # fmt: skip
def test_a_rule_lists_the_settings_that_may_not_differ(
    rule: Rule, changed: dict[str, Any], listed: list[str]
) -> None:
    then = json.loads(json.dumps(flat(shown(config()))))
    assert differing(then, flat(shown(config())), rule) == []
    assert differing(then, {**then, **changed}, rule) == listed


def test_an_evaluation_has_the_runs_settings_but_for_those_of_training() -> None:
    values = evaluation_values()
    assert (values["gpus"], values["strategy"], values["fork"]) == ("auto", "ddp", None)
    assert (values["callbacks"], values["debug"]) == ([], False)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("optimizer.lr", ""),
        ("timeout_s", "changes no number"),
        ("epochs", "may change on resume"),
        ("model.hidden", "kept by a fork"),
        ("base_batch_size", "only with lr_scaling=linear or sqrt"),
        ("sharding.wrap", "changes rounding only; only with strategy=fsdp or hsdp"),
    ],
)
def test_a_key_is_described_by_what_its_change_does(key: str, says: str) -> None:
    assert effects_in_words(key) == says


def test_given_keys_without_effect_are_listed() -> None:
    given = ("batch_norm_group", "sharding.reduce_dtype", "epochs", "base_batch_size")
    assert without_effect(config(), given) == [
        "batch_norm_group=32: has no effect, only with batch_norm=groups",
        "sharding.reduce_dtype=float32: has no effect, only with strategy=fsdp or hsdp",
    ]
    assert without_effect(config("batch_norm=groups"), ["batch_norm_group"]) == []
    assert without_effect(config(), ["batch_norm_group"], ["seed"]) != []
    assert without_effect(config(), ["batch_norm_group"], ["batch_norm"]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"width": 3}, {"width": 4}),
        ({"of": [{"_target_": "mine.N", "std": 1}]}, {"of": [{"_target_": "mine.N", "std": 2}]}),
        ({"x": {}}, {}),
        ({"x.y": 1}, {"x": {"y": 1}}),
        ({"x": {"y": {}}}, {"x": {}}),
        ({"x": [{}]}, {"x": []}),
    ],
    ids=str,
)
def test_other_arguments_are_another_run_also_where_flat_keys_are_alike(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    node = composed()
    found = {
        identity(parse({**node, "model": {"_target_": "mine.Net", **each}}, Machine(cpus=8)))
        for each in (one, other)
    }
    assert len(found) == 2


def test_a_default_spelled_out_is_the_same_run() -> None:
    assert identity(config("model=mlp", "seed=0", "epochs=10", "world_size=2")) == identity(
        config()
    )


def test_a_secret_is_neither_shown_nor_part_of_the_identity(monkeypatch: Patch) -> None:
    monkeypatch.setenv("EXPT_TEST_FOLDER", "/secret/folder")
    with_secret = config("dataset=mnist", "dataset.root=${oc.env:EXPT_TEST_FOLDER}")
    assert with_secret.secrets == {"dataset.root": "${oc.env:EXPT_TEST_FOLDER}"}
    assert shown(with_secret)["dataset"]["root"] == "${oc.env:EXPT_TEST_FOLDER}"
    assert "secrets" not in shown(with_secret)
    assert identity(with_secret) == identity(config("dataset=mnist"))


def test_a_number_that_is_made_of_a_variable_is_not_shown_and_part_of_the_identity(
    monkeypatch: Patch,
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
    again = parse(settings_of(shown(made)), Machine(cpus=8))
    assert (shown(again), identity(again)) == (shown(made), identity(made))
    monkeypatch.setenv("EXPT_TEST_PIN", "4712")
    assert identity(config(*own)) != identity(made)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("batch_norm", {"per_worker", "groups", "sync"}),
        ("ddp.comm_hook", {"bf16", "fp16", "powersgd", "null"}),
        ("optimizer.nesterov", {"true", "false"}),
        ("tensorboard.images", {"true", "false", "end", "spare"}),
        ("send", {*TRACKERS}),
        ("epochs", set()),
        ("model", set()),
        ("model.nowhere", set()),
        ("", set()),
    ],
)
def test_choices_are_those_of_the_schema(key: str, values: set[str]) -> None:
    assert set(choices_of(key)) == values


def test_arguments_of_a_class_are_shown_as_they_are_typed() -> None:
    arguments = {"name": "a", "kwargs_x": 3, "layer": {"_target_": "mine.Layer", "width": 2}}
    kept: Any = {"name": "_target_", "target": "mine.Net", "kwargs": arguments}
    typed_model = {"model": {"_target_": "mine.Net", **arguments}}
    below = {f"model.kwargs.{key}": value for key, value in flat(arguments).items()}
    found = typed_hyperparameters({"model": kept}, typed_model)
    assert found == {"model.target": "mine.Net", **below}
    record: Any = {"config": {"model": kept}, "overrides": typed_model}
    assert FoundRun(Path("run"), record).settings == {
        "model": "Net",
        "model.target": "mine.Net",
        **{key.replace("model.kwargs.", "model."): value for key, value in below.items()},
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (0.05, "0.05"), (12345678.0, "12345678"), ([1e22, None], "[1e+22,null]")],
)
def test_a_number_is_shown_with_all_its_digits(value: object, text: str) -> None:
    assert typed(value) == text
    assert typed([1.0, "a"], exact=True) == "[1.0,a]"


def test_hyperparameters_of_a_comparison_are_those_that_were_typed() -> None:
    settings: dict[str, Any] = {
        "model": {"name": "convnet", "dropout": 0.5},
        "dataset": {"name": "digits", "augment": {"flip": True, "cutout": 2}},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "timeout_s": 600.0,
    }
    overrides = {"model": "convnet", "optimizer.lr": 0.1, "dataset.augment": {"flip": True}}
    assert typed_hyperparameters(
        settings, {**overrides, "experiment": "mine", "timeout_s": 600}
    ) == {
        "model": "convnet",
        "optimizer.lr": 0.1,
        "dataset.augment.flip": True,
        "experiment": "mine",
    }


def test_folds_are_other_runs_that_repeat_one_measurement() -> None:
    first, second = (config("dataset.folds=5", f"dataset.fold={n}", f"seed={n}") for n in range(2))
    assert identity(first) != identity(second)
    assert identity(first, but=("seed",)) != identity(second, but=("seed",))
    assert identity(first, but=REPEATED) == identity(second, but=REPEATED)
    assert identity(first, but=REPEATED) != identity(config("seed=0"), but=REPEATED)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("weights=pre/s${seed}", "weights"),
        ("model={_target_: own.Net, own: {deep: [1, '${seed}']}, twice: '${.own.deep[1]}'}", None),
        (
            "dataset={_target_: own.Rows, num_classes: 2, train: {noise: '${seed}'}, test: {}}",
            "data",
        ),
        ("dataset.root=part${dataset.fold}", "data"),
    ],
)
def test_what_follows_the_seed_or_the_fold_repeats_too(word: str, part: str | None) -> None:
    key, words = "seed", ["model=mlp"]
    if "fold}" in word:
        key, words = "dataset.fold", ["dataset=mnist", "dataset.folds=5"]
    both = [config(*words, f"{key}={n}", word) for n in range(2)]
    contents: list[Content] = [{part: str(n)} if part else {} for n in range(2)]  # type: ignore[misc]
    one, other = map(Identity.of, both, contents)
    assert (one.digest == other.digest, one.seedless == other.seedless) == (False, True)
    assert Identity.of(recorded(shown(both[0])), contents[0]) == one
    fixed = config(*words, f"{key}=0", re.sub(r"\$\{[\w.]*\}", "7", word))
    assert Identity.of(fixed, contents[0]).seedless != one.seedless


def test_an_interpolation_of_another_setting_repeats_nothing() -> None:
    both = [
        config(f"optimizer.lr={lr}", "optimizer.weight_decay=${optimizer.lr}") for lr in (0.1, 0.2)
    ]
    assert both[0].following == {}
    assert identity(both[0], but=REPEATED) != identity(both[1], but=REPEATED)


NET = "class Net:\n    pass\n"


@pytest.mark.parametrize(
    ("before", "after", "code", "named"),
    [
        ({"frozen": "1"}, {"frozen": "2"}, NET, "its frozen networks"),
        ({"data": "1", "base": None}, {"data": "2"}, NET, "its dataset's files"),
        ({"fork": "a@1"}, {"fork": "b@1"}, NET, "its beginning"),
        ({}, {}, NET, "its beginning"),
        ({}, {}, NET + "#", "its own source"),
    ],
    ids=["frozen", "data", "a fork", "nothing known", "code"],
)
def test_of_runs_with_equal_settings_that_is_named_which_differs(
    before: Content, after: Content, code: str, named: str, tmp_path: Path
) -> None:
    asked, file = config(), tmp_path / "no_module.py"
    file.write_text(NET)
    imported = {"no_module": {"file": str(file), "hash": own_code.hash_now(str(file))}}
    file.write_text(code)
    then = {"config": shown(asked), "content": before, "imported": imported}
    (found,) = differences(then, asked, Identity.of(asked, after))
    assert found == named
