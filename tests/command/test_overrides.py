"""Names of folders, and what was typed as keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expt.command.overrides import (
    as_dict,
    folder_names,
    is_readable,
    last_of_each,
    run_name,
    swept_keys,
)


@pytest.mark.parametrize(
    ("points", "names"),
    [
        (
            [["model=mlp", "epochs=1"], ["model=convnet", "epochs=1"]],
            ["model=mlp", "model=convnet"],
        ),
        ([["optimizer.lr=0.1", "seed=0"], ["optimizer.lr=0.1", "seed=1"]], ["seed=0", "seed=1"]),
        ([["b=1", "a=1"], ["b=2", "a=2"]], ["a=1,b=1", "a=2,b=2"]),
        ([["x.lr=1", "y.lr=1"], ["x.lr=2", "y.lr=2"]], ["x.lr=1,y.lr=1", "x.lr=2,y.lr=2"]),
        ([["+model.width=1"], ["~model.width"]], ["width=1", "width="]),
        ([["epochs=1", "seed=0"]], ["epochs=1,seed=0"]),
        ([["seed=0"], ["seed=0"]], ["seed=0", "seed=0"]),
        ([["path=a=b"], [r"path=a\=c"]], ["path=a=b", "path=a=c"]),
        ([[]], ["run"]),
    ],
    ids=[
        "differs",
        "last part",
        "sorted",
        "ambiguous",
        "added and removed",
        "one point",
        "the same",
        "escaped",
        "nothing",
    ],
)
def test_a_folder_says_what_differs(points: list[list[str]], names: list[str]) -> None:
    assert folder_names(points) == names


def test_a_batch_in_which_a_swept_key_stays_names_it_all_the_same() -> None:
    assert folder_names([["lr=0.1", "model=mlp"], ["lr=0.1", "model=convnet"]], swept=["lr"]) == [
        "lr=0.1,model=mlp",
        "lr=0.1,model=convnet",
    ]


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8})?", fullmatch=True), st.text(max_size=300)
    )
)
def test_a_name_is_one_that_every_file_system_takes(settings: dict[str, str]) -> None:
    name = run_name(settings)
    assert 0 < len(name.encode()) <= 200
    assert Path(name).parts == (name,)
    assert name not in (".", "..")
    assert not set(name) & set("/\0\n\"' ")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/a/b", "_a_b"),
        ("x" * 300 + "1", "x" * 300 + "2"),
        ("é" * 200, "é" * 201),
        ("a b", "a:b"),
    ],
    ids=["slashes", "long", "long unicode", "spaces"],
)
def test_mended_names_do_not_collide(one: str, other: str) -> None:
    assert run_name({"key": one}) != run_name({"key": other})


def test_dots_and_unicode_stay_inside_the_folder(tmp_path: Path) -> None:
    for value in ("..", "../..", "naïve", "猫", "~", "$HOME", "-rf"):
        folder = tmp_path / run_name({"key": value})
        folder.mkdir()
        assert folder.resolve().parent == tmp_path


def test_overrides_keep_their_types() -> None:
    typed = [
        "model=mlp",
        "optimizer.lr=1e-3",
        "gpus=[0,1]",
        "amp=true",
        "max_steps=null",
        "+model.note='a b'",
        "~x.y",
    ]
    assert as_dict(typed) == {
        "model": "mlp",
        "optimizer.lr": 1e-3,
        "gpus": [0, 1],
        "amp": True,
        "max_steps": None,
        "model.note": "a b",
        "x.y": None,
    }


def test_keys_with_several_values_are_known() -> None:
    words = [
        "model=mlp,convnet",
        "seed=range(3)",
        "epochs=3",
        "note='a,b'",
        "optimizer=glob(*)",
        "lr=interval(0,1)",
    ]
    assert swept_keys(words) == ["model", "seed", "optimizer", "lr"]


@pytest.mark.parametrize(
    ("word", "is_read"), [("a=b c", True), ("a=[1,2]", True), ("a=b=c", False), ("a=[", False)]
)
def test_what_hydras_grammar_can_read_is_known(word: str, is_read: bool) -> None:
    assert is_readable(word) is is_read


def test_of_several_words_for_a_key_the_last_counts() -> None:
    words = [
        "seed=0",
        "model=mlp",
        "+own.width=1",
        "++own.depth=2",
        "seed=1,2",
        "own.width=3",
        "own.depth=4,5",
        "~ema",
    ]
    found = last_of_each([*words, "ema=0.9"])
    assert [each.input_line for each in found] == [
        "model=mlp",
        "seed=1,2",
        "+own.width=3",
        "++own.depth=4,5",
        "ema=0.9",
    ]
