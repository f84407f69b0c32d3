"""What counts in a search's folder where a person has copied runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from expt.command.search_settings import names_of_others, told_copies
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PAUSED, create_result, update_result
from expt.search.folder import Found, of_another, read
from expt.search.goals import Goal
from expt.search.history import Reader
from expt.search.space import Parameter, Space

READER = Reader(
    space=Space((Parameter("lr", "float", 0.001, 1.0),)), goals=[Goal("accuracy/val", highest=True)]
)


def run(folder: Path, number: int, lr: float, **more: Any) -> RunPaths:
    paths = RunPaths(folder)
    about: Any = {
        "search": {"number": number},
        "overrides": {"lr": lr},
        "name": folder.name,
        "device_s": 1.0,
    }
    create_result(paths, status=PAUSED, **{**about, **more})
    return paths


def numbers(found: Found) -> dict[str, int | None]:
    return {point.folder.name: point.number for point in found.points.values() if point.folder}


def test_a_copy_of_a_run_is_no_further_point(tmp_path: Path) -> None:
    first = run(tmp_path / "lr=0.1", 0, 0.1, identity="a")
    run(tmp_path / "lr=0.2", 1, 0.2, identity="b")
    for name in ("a backup", "z backup"):
        shutil.copytree(first.folder, tmp_path / name)
    update_result(first, status=COMPLETED, overrides={"lr": 0.1, "resume": "auto"})  # as by hand
    found = read(tmp_path, READER)
    assert numbers(found) == {"lr=0.1": 0, "lr=0.2": 1}
    assert sum(point.device_s for point in found.points.values()) == 2.0
    assert not found.spent_elsewhere_s
    assert names_of_others(found) == [], (
        "the report tells copies by itself, and a renamed folder may be all that is left"
    )
    assert (
        told_copies(found, "there")
        == "hydra.sweep.dir=there: has copies of runs, which do not count: a backup (of lr=0.1), z"
        " backup (of lr=0.1)"
    )
    assert sorted(
        point.folder.name for point in of_another(READER, tmp_path, ()) if point.folder
    ) == [
        "lr=0.1",
        "lr=0.2",
    ], "a warm start counts it once, too"
    shutil.rmtree(first.folder)
    found = read(tmp_path, READER)
    assert numbers(found) == {
        "a backup": 0,
        "lr=0.2": 1,
    }, "the first by name, where the run itself is gone"
    assert (
        told_copies(found, "there")
        == "hydra.sweep.dir=there: has a copy of a run, which does not count: z backup (of a"
        " backup)"
    )
    shutil.rmtree(tmp_path / "z backup")
    assert not told_copies(read(tmp_path, READER), "there")


def test_runs_that_are_alike_under_other_numbers_are_no_copies_nor_are_other_runs_of_one_number(
    tmp_path: Path,
) -> None:
    run(tmp_path / "a", 0, 0.1)
    run(tmp_path / "b", 1, 0.1)
    run(tmp_path / "c", 1, 0.2)  # of an older version
    assert numbers(read(tmp_path, READER)) == {"a": 0, "b": 1, "c": 2}


def test_a_copy_of_a_run_that_is_typed_by_hand_or_lies_outside_of_the_space_does_not_count_either(
    tmp_path: Path,
) -> None:
    for name, lr in (("lr=0.1", 0.1), ("lr=7", 7)):
        about: Any = {"overrides": {"lr": lr}, "name": name, "identity": name}
        create_result(RunPaths(tmp_path / name), status=COMPLETED, **about)
        shutil.copytree(tmp_path / name, tmp_path / f"{name}.bak")
    found = read(tmp_path, READER)
    assert [point.folder and point.folder.name for point in found.by_hand] == ["lr=0.1"]
    assert found.outside == ["lr=7"]
    assert names_of_others(found) == ["lr=7", "lr=7.bak"]


@pytest.mark.parametrize(
    ("key", "choices", "meant", "config"),
    [
        (
            "model.hidden",
            ("[8]", "[256,1]"),
            ([8], [256, 1]),
            {"model": {"name": "mlp", "hidden": [256, 1]}},
        ),
        ("model.hidden", ("[8]", "[]"), ([8], []), {"model": {"name": "mlp", "hidden": []}}),
        ("model.hidden", ("[8]", "null"), ([8], None), {"model": {"name": "mlp", "hidden": None}}),
        (
            "model.hidden",
            ("[8]", "[256]"),
            ([8], [256]),
            {"model": {"name": "_target_", "target": "a.B", "kwargs": {"hidden": [256]}}},
        ),
        (
            "model.sizes",
            ("{a:8}", "{a:9}"),
            ({"a": 8}, {"a": 9}),
            {"model": {"name": "_target_", "target": "a.B", "kwargs": {"sizes": {"a": 9}}}},
        ),
        (
            "dataset.augment",
            ("{flip:true}", "{flip:false}"),
            ({"flip": True}, {"flip": False}),
            {"dataset": {"augment": {"flip": False, "cutout": 0}}},
        ),
        ("optimizer.name", ("adamw", "'sgd'"), ("adamw", "sgd"), {"optimizer": {"name": "sgd"}}),
        ("optimizer", ("adamw", "'sgd'"), ("adamw", "sgd"), {"optimizer": {"name": "sgd"}}),
    ],
)
def test_a_run_that_has_a_choice_without_it_being_typed_is_a_point(
    key: str,
    choices: tuple[str, ...],
    meant: tuple[Any, ...],
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Whatever is searched: it was by its default, or by a preset."""
    create_result(RunPaths(tmp_path / "a"), status=COMPLETED, overrides={"lr": 0.1}, config=config)
    conditional = Parameter("lr", "float", 0.01, 1.0, when=(key, choices[1]))
    space = Space((Parameter(key, "categorical", choices=choices, meant=meant), conditional))
    reader = Reader(space=space, goals=[Goal("accuracy/val", highest=True)])
    (point,) = read(tmp_path, reader).points.values()
    assert point.values == {key: choices[1], "lr": 0.1}
    assert of_another(reader, tmp_path, ())
