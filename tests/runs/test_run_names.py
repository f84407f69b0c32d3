"""Names of a sweep's folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expt.runs.sweep import folder_names, run_name


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
        ([["model=mlp"], ["model={_target_:mine.Net}"]], ["model=mlp", "model=Net"]),
        ([[]], ["run"]),
    ],
)
def test_a_folder_says_what_differs(points: list[list[str]], names: list[str]) -> None:
    assert folder_names(points) == names


def test_a_swept_key_is_named_where_only_one_value_is_looked_at() -> None:
    assert folder_names([["lr=0.1", "model=mlp", "seed=1"]], swept=["lr", "model"]) == [
        "lr=0.1,model=mlp"
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
    [("/a/b", "_a_b"), ("x" * 300 + "1", "x" * 300 + "2"), ("é" * 200, "é" * 201), ("a b", "a:b")],
)
def test_changed_names_do_not_collide(one: str, other: str) -> None:
    assert run_name({"key": one}) != run_name({"key": other})


def test_dots_and_unicode_stay_inside_the_folder(tmp_path: Path) -> None:
    for value in ("..", "../..", "naïve", "猫", "~", "$HOME", "-rf"):
        folder = tmp_path / run_name({"key": value})
        folder.mkdir()
        assert folder.resolve().parent == tmp_path
