"""Keyword arguments as words: each value comes back, and others are refused in a line."""

import enum
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import nn

import expt
from expt.command.grammar import parse as parsed
from expt.errors import ConfigError
from expt.python.arguments import folder_word, text_of, words_of


class Net(nn.Module):
    """Of a module, as a person's own would be."""

    def __init__(self, *, channels: int, width: int = 3) -> None:
        super().__init__()


class Watch(expt.Callback):
    """Told of epochs."""


class Colour(enum.Enum):
    RED = "red"


NET, WATCH = f"{__name__}.Net", f"{{_target_:{__name__}.Watch}}"


def back(value: object) -> object:
    """`value` by way of a word, as a configuration has it."""
    (override,) = parsed([f"a.b={text_of('a.b', value)}"])
    assert not override.is_sweep_override()
    config = OmegaConf.create({"a": {"b": None}})
    OmegaConf.update(config, "a.b", override.value(), merge=False)
    composed = OmegaConf.to_container(config, resolve=True)
    assert isinstance(composed, dict)
    return composed["a"]["b"]


TEXTS = (st.text() | st.text("\\${}'\"[],:= ~\n")).filter(lambda text: text != "???")
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXTS
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_-]{0,5}", fullmatch=True).filter(
    lambda key: key not in ("null", "true", "false")
)


@settings(max_examples=50)
@given(
    st.recursive(
        LEAVES,
        lambda c: st.lists(c, max_size=3) | st.dictionaries(KEYS, c, max_size=3),
        max_leaves=5,
    )
)
@example("/my photos/[x], {y}=$z")
@example("a\\\n")
@example("\\${oc.env:HOME}\\")
@example({"a": ["true", "1e5", "null", "a: b", "", "range(3)", "a,b"]})
def test_a_value_of_yaml_comes_out_as_it_went_in(value: object) -> None:
    assert repr(back(value)) == repr(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2.5, None)), [1, [2.5, None]]),
        (Path("/my data/x,y"), "/my data/x,y"),
        (PurePosixPath("a"), "a"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (torch.tensor([1.5]), [1.5]),
        (Colour.RED, "red"),
        (range(3), [0, 1, 2]),
        ({"_target_": Net, "width": 16}, {"_target_": NET, "width": 16}),
        ([functools.partial(Net, width=2)], [{"_target_": NET, "width": 2}]),
    ],
)
def test_what_python_has_beside_them_is_what_it_stands_for(value: object, plain: object) -> None:
    assert back(value) == plain


def test_numbers_that_are_none_stay_what_they_are() -> None:
    found = back([math.nan, math.inf, -math.inf])
    assert repr(found) == "[nan, inf, -inf]"


RUN: list[tuple[Mapping[str, Any], list[str]]] = [
    ({"epochs": 3, "amp": False, "resume": None}, ["epochs=3", "amp=false", "resume=null"]),
    ({"model": "mlp"}, ["model=mlp"]),
    ({"model": {}, "tensorboard": {}}, ["model={}"]),
    ({"model": Net}, [f"model={{_target_:{NET}}}"]),
    ({"model": functools.partial(Net, width=2)}, [f"model={{_target_:{NET},width:2}}"]),
    ({"optimizer": {"_target_": torch.optim.RMSprop, "lr": 0.5}},
     ["optimizer={_target_:torch.optim.rmsprop.RMSprop,lr:0.5}"]),
    ({"optimizer": {"name": "adam", "lr": 0.1, "betas": (0.8, 0.9)}},
     ["optimizer=adam", "optimizer.lr=0.1", "optimizer.betas=[0.8,0.9]"]),
    ({"dataset": {"augment": {"flip": True}, "transforms": [Net]}},
     ["dataset.augment.flip=true", f"dataset.transforms=[{{_target_:{NET}}}]"]),
    ({"callbacks": [Watch, {"_target_": Watch}]}, [f"callbacks=[{WATCH},{WATCH}]"]),
    ({"ddp": {"bucket_cap_mb": 5}}, ["ddp.bucket_cap_mb=5"]),
    ({"early_stop": {"metric": "loss/val", "patience": 2}},
        ["early_stop={metric:loss/val,patience:2}"]),
    ({"task": {"metrics": {"ece": {"_target_": "m.ECE", "better": "min"}}}},
     ["++task.metrics.ece={_target_:m.ECE,better:min}"]),
    ({"hydra": {"job": {"env_set": {"A": "b c"}}}}, ["hydra.job.env_set.A='b c'"]),
    ({"dataset": {"root": "a,b"}}, ["dataset.root='a,b'"]),
    ({"model": {"hidden[0]": 16}}, ["model.hidden.0=16"]),
]  # fmt: skip


SWEEP: list[tuple[Mapping[str, Any], list[str]]] = [
    ({"model": ["mlp", Net], "seed": range(3)}, [f"model=mlp,{{_target_:{NET}}}", "seed=0,1,2"]),
    ({"optimizer": {"lr": np.array([0.5, 0.25])}}, ["optimizer.lr=0.5,0.25"]),
    ({"model": {"hidden": [(64,), [64, 32], ()]}}, ["model.hidden=[64],[64,32],[]"]),
    ({"gpus": (4, 5)}, ["gpus=[4,5]"]),
    ({"gpus": [(4, 5), 1]}, ["gpus=[4,5],1"]),
    ({"dataset": {"root": ["a,b", "c"]}}, ["dataset.root='a,b',c"]),
    ({"model": {"_target_": Net, "width": [4, 8], "at": (1,)}},
     [f"model={{_target_:{NET},width:4,at:[1]}}", "model.width=4,8"]),
    ({"callbacks": (Watch,)}, [f"callbacks=[{WATCH}]"]),
    ({"callbacks": [Watch]}, [f"callbacks=[{WATCH}]"]),
    ({"search": {"name": "tpe", "runs": 3, "constraints": ["loss/val<1"]}},
     ["search=tpe", "search.runs=3", "search.constraints=['loss/val<1']"]),
]  # fmt: skip


@pytest.mark.parametrize(("given_by_name", "words"), RUN + SWEEP)
def test_keywords_are_words(given_by_name: Mapping[str, Any], words: list[str]) -> None:
    """In a sweep a list is an axis, and a tuple is one value."""
    is_of_sweep = (given_by_name, words) in SWEEP
    assert words_of((), given_by_name, sweep=is_of_sweep) == words


def test_words_dicts_and_names_go_together() -> None:
    given_at_once = ("model=mlp", {"optimizer.lr": 0.1})
    assert words_of(given_at_once, {"epochs": 2}) == ["model=mlp", "optimizer.lr=0.1", "epochs=2"]
    assert folder_word("my runs/a", sweep=False) == ["hydra.run.dir='my runs/a'"]
    assert folder_word("latest", sweep=True) == ["hydra.sweep.dir=latest"]


def built_in_place() -> type:
    class Inner(nn.Module):
        pass

    return Inner


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"model": Net(channels=1)}, "model=Net()"),
    ({"model": lambda: 1}, "model="),
    ({"model": built_in_place()}, "model=built_in_place.<locals>.Inner"),
    ({"model": functools.partial(nn.Linear, 3)}, "model"),
    ({"model": {"_target_": Net, "width": nn.ReLU}}, "model.width="),
    ({"model": {"_target_": Net, "width": nn.ReLU()}}, "model.width=ReLU()"),
    ({"model": {"_target_": Net, "of": {1, 2}}}, "model.of={1, 2}"),
    ({"model": {"_target_": Net, "of": {"a b": 1}}}, "model.of"),
    ({"seed": 1j}, "seed=1j"),
    ({"model": {"_target_": Net, "width": expt.interval(1, 2)}}, "model.width="),
]


def test_an_interval_is_an_axis_also_of_a_class_and_by_numbers_of_numpy() -> None:
    width = expt.interval(np.int64(8), np.int64(64))
    words = words_of((), {"model": {"_target_": Net, "width": width}}, sweep=True)
    assert words[0].startswith("model={_target_:")
    assert "width:8" in words[0].replace(" ", "")
    assert words[1:] == ["model.width=int(interval(8,64))"]
    assert expt.interval(*np.logspace(-4, 0, 2), log=True) == "tag(log,interval(0.0001,1.0))"


def test_a_list_of_a_search_is_no_axis_however_its_key_is_given() -> None:
    limits = ["loss/val<1", "memory/worker_mib<4000"]
    found = [
        words_of(({"search.constraints": limits},), {}, sweep=True),
        words_of((), {"search": {"constraints": limits}}, sweep=True),
    ]
    assert found[0] == found[1]
    assert len(words_of(found[0], {})) == 1
    assert not words_of(found[0], {})[0].startswith("search.constraints='loss")
    when = {"model=mlp": ["a=1,2", "b=3,4"]}
    assert words_of((), {"search": {"when": when}}, sweep=True) == words_of(
        (), {"search": {"when": ["model=mlp: a=1,2", "model=mlp: b=3,4"]}}, sweep=True
    )


@pytest.mark.parametrize(("given_by_name", "key"), REFUSED)
def test_inexpressible_value_is_refused(given_by_name: Mapping[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}"):
        words_of((), given_by_name)


def test_what_has_no_name_or_no_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^seed="):
        words_of((), {"seed": []}, sweep=True)
    with pytest.raises(ConfigError, match=r"^3: give KEY=VALUE as a text, or by name"):
        words_of((3,), {})  # type: ignore[arg-type]
