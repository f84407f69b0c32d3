"""Which runs are meant, and in which order: by columns, settings and metrics of their records."""

import math
from pathlib import Path
from typing import Any

import pytest

from expt.errors import ConfigError
from expt.runs.found import FoundRun
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from expt.runs.view.listing import check_key, chosen, in_order, listing_csv, runs_below


def run(
    name: str, started: float = 0.0, *, metrics: dict[str, float] | None = None, **config: Any
) -> FoundRun:
    record: Any = {
        "started": started,
        "status": "completed",
        "metrics": metrics or {},
        "config": {"task": {"name": "classification"}, **config},
    }
    return FoundRun(Path(name), record)


def names(runs: list[FoundRun]) -> str:
    return "".join(str(run.folder) for run in runs)


NAN, HIGH = {"accuracy/val": math.nan, "loss/val": 0.1}, {"accuracy/val": 0.7}
RUNS = [
    run("a", 3, metrics={"accuracy/val": 0.5, "loss/val": 0.9}, amp=True, epochs=2, note="x=1"),
    run("b", 1, metrics=NAN, amp=False, epochs=10, note="yes"),
    run("c", 2, metrics=HIGH, amp="bf16", epochs=3, note=5),
]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([], "abc"),
        (["epochs<10"], "ac"),
        (["epochs>=3"], "bc"),
        (["epochs!=3"], "ab"),
        (["amp=true"], "a"),
        (["amp!=FALSE"], "ac"),
        (["amp<2"], ""),
        (["amp=b*"], "c"),
        (["note=x=1"], "a"),
        (["note=?es"], "b"),
        (["accuracy/val>0"], "ac"),
        (["loss/val>=0"], "ab"),
        (["note!=nix"], "abc"),
        ([" epochs = 3 "], "c"),
        (["note='yes'"], "b"),
    ],
)
def test_filters_compare_numbers_and_wildcards(filters: list[str], left: str) -> None:
    assert names(chosen(RUNS, filters)) == left


GROUPS = {"groups": [{"match": "a", "lr": 1e-3}]}
LISTS = [
    run("a", model={"hidden": [32]}, freeze=["^a.*"], seed=2**53, note="a*"),
    run("b", model={"hidden": [64]}, freeze=["^ab"], seed=2**53 + 1, note="ab"),
    run("c", model={"hidden": [32, 64]}, freeze=["x, y", True, None], optimizer=GROUPS),
    run("d", model={"hidden": []}, freeze="[nan]"),
]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (["model.hidden=[32]"], "a"),
        (["model.hidden=[32,64]"], "c"),
        (["model.hidden=[32*"], "ac"),
        (["model.hidden=[3[12]]"], ""),
        (["model.hidden=[64]"], "b"),
        (["freeze=['^a*']"], "ab"),
        (["freeze=[nan]"], "d"),
        (["freeze=['x, y',True,None]"], "c"),
        (["optimizer.groups=[{match: a, lr: 0.001}]"], "c"),
        (["optimizer.groups=[{lr: 0.001}]"], ""),
        (["seed=9007199254740993"], "b"),
        (["note=a*"], "a"),
        (["note=a?"], "ab"),
        (["model.hidden.0=32"], "ac"),
        (["model.hidden[1]=64"], "c"),
        (["model.hidden.0>40"], "b"),
    ],
)
def test_brackets_are_lists_and_equality_wins(filters: list[str], left: str) -> None:
    assert names(chosen(LISTS, filters)) == left


@pytest.mark.parametrize(
    ("overrides", "name"), [({"model": "mine"}, "mine"), ({}, "Net"), ({"model": {}}, "Net")]
)
def test_a_model_of_ones_own_is_found_by_its_name(overrides: dict[str, Any], name: str) -> None:
    own = run("o", model={"name": "_target_", "target": "my.nets.Net", "kwargs": {"width": 8}})
    own.record["overrides"] = overrides
    assert chosen([own, run("e", model={"name": "mlp"})], [f"model={name}"]) == [own]
    assert chosen([own], ["model.target=my.nets.*", "model.width=8"]) == [own]


def test_settings_of_ones_own_classes_have_the_names_that_are_typed() -> None:
    kwargs = {"lr": 0.01, "target": 3, "more": {"deep": 1}}
    own = run("o", optimizer={"name": "_target_", "target": "my.Sgd", "kwargs": kwargs})
    runs = [run("e", optimizer={"name": "sgd", "lr": 0.02}), own]
    assert names(chosen(runs, ["optimizer.lr<0.015", "optimizer.more.deep=1"])) == "o"
    assert names(in_order(runs, "optimizer.lr")) == "oe"
    assert own.values["optimizer.target"] == "my.Sgd"
    assert own.values["optimizer.kwargs.target"] == 3, "beside the class's name"


@pytest.mark.parametrize(
    ("key", "order"),
    [("started", "acb"), ("accuracy/val", "cab"), ("loss/val", "bac"), ("epochs", "acb"),
     ("note", "cab")],
)  # fmt: skip
def test_accuracies_fall_others_rise_missing_last(key: str, order: str) -> None:
    assert names(in_order(RUNS, key)) == order


@pytest.mark.parametrize(("objective", "order"), [("accuracy/val", "ba"), ("loss/val", "ab")])
def test_the_best_comes_first_whatever_the_objective(objective: str, order: str) -> None:
    records: list[Any] = [
        {
            "objective": {"name": objective, "value": value},
            "best": {"value": value},
            "config": {"task": {"name": "classification"}},
        }
        for value in (1, 2)
    ]
    runs = [FoundRun(Path(name), record) for name, record in zip("ab", records, strict=True)]
    assert names(in_order(runs, "best")) == order


def test_the_best_of_a_run_under_way_is_read_from_its_metrics() -> None:
    first = {"accuracy/val": 0.5}
    for metrics, best in (({**first, "best/accuracy/val": 0.6}, 0.6), (first, 0.5), ({}, None)):
        assert run("a", metrics=metrics, objective="accuracy/val").values["best"] == best


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch=1", "epoch: no run has such a column, setting or metric. Did you mean 'epochs'?"),
        ("epochs", "epochs: write KEY=VALUE, with = != < > <= or >="),
        ("=1", "=1: write KEY=VALUE, with = != < > <= or >="),
        ("epochs<many", "epochs<many: 'many' is not a number"),
    ],
)
def test_a_filter_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen(RUNS, [text])
    assert str(refused.value) == says


def test_a_key_that_no_run_has_is_refused() -> None:
    check_key("epochs", RUNS)
    with pytest.raises(ConfigError, match="Did you mean 'loss/val'"):
        check_key("loss/vall", RUNS)
    with pytest.raises(ConfigError, match="`report --csv -` has all of them"):
        check_key("nosuch", RUNS)


def test_runs_are_chosen_and_sorted_by_what_was_typed_of_own_groups() -> None:
    runs = list[FoundRun]()
    given = {"recipe": "x", "epochs": "2"}, {"recipe": "w"}, {"aug@model.opts": "t"}
    for name, typed in zip("abc", given, strict=True):
        overrides = {**typed, "wandb.project": "p"}
        record: Any = {"status": "completed", "overrides": overrides, "config": {"epochs": 2}}
        runs.append(FoundRun(Path(name), record))
    assert names(chosen(runs, ["recipe=x"])) == "a"
    assert names(chosen(runs, ["aug@model.opts=t"])) == "c"
    check_key("recipe", runs)
    assert names(in_order(runs, "recipe")) == "bac"
    head, *lines = listing_csv(runs).splitlines()
    counted = [head.count(each) for each in ("recipe", "aug@model.opts", "epochs", "wandb")]
    assert counted == [1, 1, 1, 0]
    assert len({line.count(",") for line in lines}) == 1


def test_a_copy_elsewhere_is_no_second_run(tmp_path: Path) -> None:
    copies = {"mlruns/1/b/artifacts": "a", "out/backup": "a"}
    for folder, name in {"out/a": "a", **copies, "renamed": "old"}.items():
        began = float(len(name)) + (folder == "out/backup")  # before "out/a" was resumed
        fields: Any = {"name": name, "started": began, "identity": "1f"}
        (tmp_path / folder).mkdir(parents=True)
        create_result(RunPaths(tmp_path / folder), **fields)
    found = runs_below(tmp_path)
    assert {run.folder.relative_to(tmp_path).as_posix() for run in found} == {"out/a", "renamed"}
