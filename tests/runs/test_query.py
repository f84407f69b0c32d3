"""Which runs are meant, and in which order: by columns, settings and metrics of their records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from expt.errors import ConfigError
from expt.runs.view.query import ListedRun, check_key, chosen, in_order


def run(name: str, started: float = 0.0, *, metrics: dict[str, float] | None = None, **config: Any) -> ListedRun:
    record: Any = {"started": started, "status": "completed", "metrics": metrics or {}, "config": config}
    return ListedRun(Path(name), record)


def names(runs: list[ListedRun]) -> str:
    return "".join(str(run.folder) for run in runs)


RUNS = [
    run("a", 3, metrics={"accuracy/val": 0.5, "loss/val": 0.9}, amp=True, epochs=2, note="x=1"),
    run("b", 1, metrics={"accuracy/val": math.nan, "loss/val": 0.1}, amp=False, epochs=10, note="yes"),
    run("c", 2, metrics={"accuracy/val": 0.7}, amp="bf16", epochs=3, note=5),
]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([], "abc"),
        (["epochs<10"], "ac"),
        (["epochs<=10", "epochs>2"], "bc"),
        (["epochs>=3"], "bc"),
        (["epochs=10.0"], "b"),
        (["epochs!=3"], "ab"),
        (["amp=true"], "a"),
        (["amp=True"], ""),
        (["amp=1"], ""),
        (["amp=b*"], "c"),
        (["note=x=1"], "a"),
        (["note=?es"], "b"),
        (["note<9"], "c"),
        (["accuracy/val>0"], "ac"),
        (["loss/val=*"], "abc"),
        (["loss/val>=0"], "ab"),
    ],
)
def test_filters_compare_numbers_as_numbers_and_text_with_wildcards(filters: list[str], left: str) -> None:
    assert names(chosen(RUNS, filters)) == left


@pytest.mark.parametrize(("overrides", "name"), [({"model": "mine"}, "mine"), ({}, "Net"), ({"model": {}}, "Net")])
def test_a_model_of_ones_own_is_found_by_its_name(overrides: dict[str, Any], name: str) -> None:
    own = run("o", model={"name": "_target_", "target": "my.nets.Net", "kwargs": {"width": 8}})
    own.result["overrides"] = overrides
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
    ("key", "reverse", "order"),
    [
        ("started", False, "acb"),
        ("started", True, "bca"),
        ("accuracy/val", False, "cab"),
        ("accuracy/val", True, "acb"),
        ("loss/val", False, "bac"),
        ("loss/val", True, "abc"),
        ("epochs", False, "acb"),
        ("note", False, "cab"),
        ("run", False, "abc"),
    ],
)
def test_accuracies_fall_and_all_else_rises_and_what_has_no_value_comes_last(
    key: str, reverse: bool, order: str
) -> None:
    assert names(in_order(RUNS, key, reverse=reverse)) == order


@pytest.mark.parametrize(("objective", "order"), [("accuracy/val", "ba"), ("loss/val", "ab")])
def test_the_best_comes_first_whatever_the_objective(objective: str, order: str) -> None:
    records: list[Any] = [
        {"objective": {"name": objective, "value": value}, "best": {"value": value}} for value in (1, 2)
    ]
    runs = [ListedRun(Path(name), record) for name, record in zip("ab", records, strict=True)]
    assert names(in_order(runs, "best")) == order


def test_the_best_of_a_run_under_way_is_read_from_its_metrics() -> None:
    assert (
        run("a", metrics={"accuracy/val": 0.5, "best/accuracy/val": 0.6}, objective="accuracy/val").values["best"]
        == 0.6
    )
    assert run("a", metrics={"accuracy/val": 0.5}, objective="accuracy/val").values["best"] == 0.5
    assert run("a", objective="accuracy/val").values["best"] is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch=1", "epoch: no run has such a column, setting or metric. Did you mean 'epochs'?"),
        ("epochs", "epochs: write KEY=VALUE, with = != < > <= or >="),
        ("=1", "=1: write KEY=VALUE, with = != < > <= or >="),
        ("epochs<many", "epochs<many: 'many' is no number"),
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
