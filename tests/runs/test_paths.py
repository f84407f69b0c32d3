"""A run's folder: its name, what it holds, its lock, and JSON for every reader."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expt.config.own_code import PREFIX
from expt.errors import ConfigError, FolderInUse
from expt.runs.overrides import folder_names, run_name
from expt.runs.paths import (
    FolderLock,
    RunPaths,
    at_work,
    dumps,
    is_held,
    make_unused_folder,
    remove_empty,
)
from tests.facade import Patch


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    name = str(tmp_path / "day" / "noon")
    assert [make_unused_folder(name) for _ in range(3)] == [name, f"{name}_2", f"{name}_3"]


def test_empty_folders_are_removed_upwards(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/day/noon", "outputs/night", "elsewhere/run"):
        Path(name).mkdir(parents=True)
    remove_empty(Path("elsewhere/run"))
    assert Path("elsewhere").exists(), "it is not a folder of expt's"
    with pytest.raises(OSError, match="not empty"):
        remove_empty(Path("outputs/day/noon"))
    assert [path.name for path in Path("outputs").iterdir()] == ["night"]


def test_what_a_folder_holds(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    assert paths.is_new()
    paths.hydra.mkdir(parents=True)
    paths.lock.touch()
    assert paths.is_new()
    assert not paths.holds_only_refusal(), "Hydra has begun it"
    paths.hydra.rmdir()
    paths.result.touch()
    assert paths.holds_only_refusal()
    assert not paths.is_new()
    paths.metrics.touch()
    assert not paths.has_trained(), "no number yet"
    paths.metrics.write_text("{}")
    assert paths.has_trained()
    assert not paths.holds_only_refusal()


def test_a_refused_run_takes_its_own_files_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs(0).mkdir(parents=True)
    paths.code.mkdir()
    paths.tokenizer.mkdir()
    (paths.tokenizer / "tokenizer.json").touch()
    own = [tmp_path / "notes.txt", paths.code / "notes.py", paths.logs(0).parent / "notes.txt"]
    for path in (paths.result, paths.metrics, paths.code / f"{PREFIX}0.py", *own):
        path.touch()
    paths.remove_refused()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*own}


def test_attempts_are_counted_by_their_logs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for number in range(2):
        assert paths.next_attempt() == number
        paths.logs(number).mkdir(parents=True)
    paths.logs(0).rmdir()
    (paths.logs(0).parent / "notes").mkdir()
    assert paths.next_attempt() == 2, "the older logs were removed to save room"
    assert paths.attempts() == [1]


def test_nan_is_null_and_infinity_is_read_as_such() -> None:
    content: dict[str, Any] = {
        "a": math.nan,
        "b": [math.inf, 1.5, "NaN", "1e999", True],
        "c": {"d": (-math.inf, 2)},
    }
    text = dumps(content)
    assert text == '{"a": null, "b": [1e999, 1.5, "NaN", "1e999", true], "c": {"d": [-1e999, 2]}}'
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found == {"a": None, "b": [math.inf, *content["b"][1:]], "c": {"d": [-math.inf, 2]}}
    assert dumps({"a": math.nan}, indent=1) == '{\n "a": null\n}'


@pytest.fixture(autouse=True)
def impatient(monkeypatch: Patch) -> None:
    monkeypatch.setattr("expt.runs.paths.PATIENCE_S", 0.0)


def test_a_failure_lets_others_in(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(KeyError), at_work(paths):
        raise KeyError
    with at_work(paths):
        pass


def test_a_folder_that_cannot_be_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = RunPaths(tmp_path / "file" / "run")
    with pytest.raises(ConfigError) as refused, at_work(paths):
        pass
    assert (
        str(refused.value)
        == f"hydra.run.dir={paths.folder}: Not a directory; choose another folder"
    )


def test_it_is_held_as_long_as_a_worker_has_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    lock = FolderLock(paths)
    workers = os.dup(lock.descriptor)
    os.close(lock.descriptor)  # as of a driver that was killed
    with pytest.raises(FolderInUse):
        FolderLock(paths)
    os.close(workers)
    FolderLock(paths).release()


def test_who_was_killed_a_moment_ago_is_waited_for(tmp_path: Path, monkeypatch: Patch) -> None:
    paths = RunPaths(tmp_path)
    first = FolderLock(paths)
    monkeypatch.setattr("expt.runs.paths.PATIENCE_S", 10.0)
    monkeypatch.setattr(time, "sleep", lambda _: first.release())
    FolderLock(paths).release()


def test_to_look_whether_it_is_held_leaves_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not is_held(paths)
    assert os.listdir(tmp_path) == []
    with at_work(paths):
        assert is_held(paths)
    assert not is_held(paths)


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path) -> None:
    """Its last holder has removed the folder that came to nothing; another has made it anew."""
    paths = RunPaths(tmp_path)
    with at_work(paths):
        paths.lock.unlink()
        with at_work(paths):
            assert is_held(paths)


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
        ([["a.b.1=1", "a.c.0.d=1"], ["a.b.1=2", "a.c.0.d=2"]], ["b.1=1,d=1", "b.1=2,d=2"]),
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
        st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8})?", fullmatch=True),
        st.text(max_size=300),
        max_size=4,
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
