"""Population based training by real runs: places go to forks of the best, also in a search that was
killed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import expt
from expt.config.search import Search
from expt.errors import ConfigError
from expt.runs import checkpoint
from expt.runs.forkable import epochs_of, has_beginning
from expt.runs.paths import RunPaths
from expt.runs.result import (
    COMPLETED,
    FAILED,
    PAUSED,
    Made,
    Record,
    create_result,
    results,
    update_result,
)
from expt.search.alike import Changes
from expt.search.goals import Goal
from expt.search.history import Point
from expt.search.population import NewRun, PopulationTraining
from expt.search.space import Parameter, Space
from tests.conftest import Configured, start

SHORT = (
    "dataset.train_limit=320",
    "batch_size=32",
    "tensorboard.images=false",
    "model.hidden=[8]",
    "world_size=1",
)
SEARCH = (
    "search=pbt",
    "search.runs=4",
    "optimizer.lr=tag(log,interval(1e-4,1))",
    "hydra.launcher.max_concurrent=1",
)
LR = Parameter(name="optimizer.lr", kind="float", low=1e-4, high=1.0, log=True)
ACCURACY = Goal("accuracy/val", highest=True)


def _records(folder: Path) -> list[Record]:
    return sorted(
        (record for _, record in results(folder)), key=lambda record: record["search"]["number"]
    )


def _kept(record: Record) -> dict[str, Any]:
    """What of a record hangs on no clock, and on no folder's name."""
    metrics = {
        tag: value
        for tag, value in record["metrics"].items()
        if tag.startswith(("loss/", "accuracy/"))
    }
    forked = record.get("forked_from")
    whose = forked and (forked["step"], forked["identity"], forked["changed"])
    return {
        **{key: record.get(key) for key in ("identity", "search", "status", "objective")},
        **metrics,
        "": whose,
    }


def test_places_go_to_forks_of_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each member's worker dies once."""
    folder = tmp_path / "sweep"
    monkeypatch.setenv("EXPT_FAULT", "0:5:kill:once")
    expt.sweep(*SHORT, *SEARCH, "epochs=2", "search.seed=7", f"hydra.sweep.dir='{folder}'")
    records = _records(folder)
    assert [record["status"] for record in records].count(COMPLETED) == 4
    (fork,) = records[4:]
    replaced, parent = fork["search"]["replaces"], fork["forked_from"]
    after_1 = [
        record["metrics"]["accuracy/val"] for record in records[:4] if record["status"] == PAUSED
    ]
    assert records[replaced]["status"] == PAUSED
    assert records[replaced]["resumable"] is False
    assert not list((folder / records[replaced]["name"]).glob("checkpoints/*.pt")), (
        "it does not go on"
    )
    assert after_1 == [records[replaced]["metrics"]["accuracy/val"]]
    assert (parent["step"], parent["epoch"]) == (10, 1)
    assert [*parent["changed"]] == ["optimizer.lr"]
    best = next(record for record in records if record.get("identity") == parent["identity"])
    assert best["search"]["number"] != replaced
    assert (folder / best["name"] / "checkpoints/forked-1.pt").exists() is (
        fork["name"] in _best(records)
    )
    rate = fork["config"]["optimizer"]["lr"] / best["config"]["optimizer"]["lr"]
    assert 1e-4 <= fork["config"]["optimizer"]["lr"] <= 1
    assert rate != 1
    capsys.readouterr()
    expt.sweep(*SHORT, *SEARCH, "epochs=2", "threads=1", f"hydra.sweep.dir='{folder}'")
    assert "do not count" not in "".join(capsys.readouterr()), "a fork is of the search, too"
    assert _records(folder) == records


def _best(records: Sequence[Mapping[str, Any]]) -> list[str]:
    values = {record["name"]: record["objective"]["value"] for record in records}
    return [name for name, value in values.items() if value == max(values.values())]


def test_what_the_best_was_forked_from_is_kept_and_no_other(
    configured: Configured, tmp_path: Path
) -> None:
    """Of 0, 1 is a fork, and 2 of that, the best in the end; 3 is no better, and 4 may still become
    so.
    """

    def point(number: int, value: float, parent: int | None = None, **more: Any) -> Point:
        more = {"status": COMPLETED, "began_at": 0 if parent is None else 1, **more}
        folder = tmp_path / str(number)
        _leave_checkpoint(RunPaths(folder))
        return Point(
            values={}, number=number, parent=parent, objectives=(value,), folder=folder, **more
        )

    def kept(*points: Point) -> dict[str, list[str]]:
        training.clear(points, range(len(points)))
        found = {path.name: RunPaths(path).kept_for_forks for path in sorted(tmp_path.iterdir())}
        return {number: [path.stem for path in paths] for number, paths in found.items() if paths}

    training = _training(configured)
    points = [
        point(0, 0.5, status=PAUSED), point(1, 0.6, parent=0, status=PAUSED, replaces=7),
        point(2, 0.9, parent=1, replaces=1), point(3, 0.8), point(4, 0.7, parent=3, status=PAUSED),
        point(7, 0.1, status=PAUSED),
    ]  # fmt: skip
    for each in points:
        training.keep(points, NewRun({}, parent=each.number, began_at=1))
        training.keep(points, NewRun({}, parent=each.number, began_at=2))  # there is none
    update_result(RunPaths(tmp_path / "7"), status=PAUSED)
    shutil.rmtree(tmp_path / "4" / "checkpoints")
    assert kept(*points) == {"0": ["forked-1"], "1": ["forked-1"], "3": ["forked-1"]}
    assert not RunPaths(tmp_path / "7").checkpoints.exists()
    ended = [
        dataclasses.replace(each, status=COMPLETED) if each.number == 4 else each for each in points
    ]
    assert kept(*ended) == {"0": ["forked-1"], "1": ["forked-1"]}
    for path in (tmp_path / "1" / "checkpoints").glob("last*"):
        path.unlink()
    assert epochs_of(tmp_path / "1") == {1}, "it can be forked there again"


def _measured(folder: Path) -> int:
    """How often runs have been evaluated so far."""
    return sum(path.read_text().count('"loss/val"') for path in folder.glob("*/metrics.jsonl"))


def _kill_once_measured(times: int, *words: str, cwd: Path) -> None:
    process, end = start("-m", *words, "hydra.sweep.dir=killed", cwd=cwd), time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end and _measured(cwd / "killed") < times:
        time.sleep(0.005)  # the workers need the core
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_a_search_that_is_killed_five_times_comes_to_the_same_end(tmp_path: Path) -> None:
    words = (*SHORT, *SEARCH, "epochs=4", "search.quantile=0.5")
    expt.sweep(*words, f"hydra.sweep.dir='{tmp_path / 'whole'}'")
    for times in (1, 3, 6, 9, 13):
        _kill_once_measured(times, *words, cwd=tmp_path)
    expt.sweep(*words, f"hydra.sweep.dir='{tmp_path / 'killed'}'")
    whole, killed = (list(map(_kept, _records(tmp_path / name))) for name in ("whole", "killed"))
    assert len(whole) > 6
    assert killed == whole


def _training(
    configured: Configured,
    *parameters: Parameter,
    changes: Changes = MappingProxyType({}),
    **settings: Any,
) -> PopulationTraining:
    found = Search(name="pbt", runs=4, **settings)
    return PopulationTraining(
        found, configured("epochs=4"), [ACCURACY], Space((LR, *parameters)), changes
    )


def test_what_a_population_cannot_search_is_refused(configured: Configured) -> None:
    width = Parameter(name="model.hidden", kind="categorical", choices=("[8]", "[16]"))
    recipe = dataclasses.replace(width, name="recipe")
    refusals: Sequence[tuple[str, Sequence[Parameter], Mapping[str, Any]]] = (
        (
            "model.hidden: a fork keeps its model, so search=pbt can't change it on the way",
            [width],
            {},
        ),
        ("model: a fork keeps its model", [dataclasses.replace(width, name="model")], {}),
        (
            "epochs: search=pbt compares runs of as many epochs",
            [dataclasses.replace(LR, name="epochs")],
            {},
        ),
        (
            "recipe: a fork keeps its model",
            [recipe],
            {"changes": {"recipe": {"epochs", "model.hidden"}}},
        ),
        (
            "of as many epochs, which recipe changes; give it",
            [recipe],
            {"changes": {"recipe": {"max_steps"}}},
        ),
        ("search.interval=4: a run has epochs=4, and would never pause", [], {"interval": 4}),
        ("search.rungs=asha: search=pbt has pauses of its own", [], {"rungs": "asha"}),
    )
    for told, parameters, settings in refusals:
        with pytest.raises(ConfigError) as refused:
            _training(configured, *parameters, **settings)
        assert told in str(refused.value)


def test_a_fork_is_compared_by_what_it_has_trained_itself(
    configured: Configured, tmp_path: Path
) -> None:
    def point(number: int, values: dict[int, float], **more: Any) -> Point:
        folder = tmp_path / str(number)
        _leave_checkpoint(RunPaths(folder))
        return Point(
            values={"optimizer.lr": 0.1},
            status=PAUSED,
            number=number,
            rung_values=values,
            folder=folder,
            **more,
        )

    training = _training(configured)
    points = [point(0, {1: 0.9}), point(1, {1: 0.2}), point(2, {1: 0.8}), point(3, {1: 0.7})]
    new = training.new(points, 4)
    assert training.wants_more(points)
    assert (new.words, new.replaces, training.first_stop(4)) == (
        [f"fork='{tmp_path}/0@epoch:1'"],
        1,
        2,
    )
    assert new.values["optimizer.lr"] != 0.1
    points.append(point(4, {2: 0.1}, replaces=1, began_at=1))
    assert training.next(points) == (points[0], 2), "of epoch 1 it has no value of its own"
    assert not training.wants_more(points)
    assert training.stop_of(9, {"attempts": 1, "until_epoch": 3}) == 3


def _leave_checkpoint(paths: RunPaths) -> None:
    content: Made = {"data": None, "code": None}
    create_result(
        paths, identity="a", seedless_identity="a", content=content, config={}, arguments=[]
    )
    position = {"epoch": 1, "step": 10, "step_in_epoch": 10}
    checkpoint.save(
        paths.last,
        {"model": {}, "position": position, "config": {}, "workers": [], "steps_per_epoch": 10},
    )


def test_a_fork_can_begin_again_where_its_parent_has_the_checkpoint_whole(tmp_path: Path) -> None:
    parent, fork = RunPaths(tmp_path / "0"), RunPaths(tmp_path / "1")
    _leave_checkpoint(parent)
    forked: Any = {"given": f"{parent.folder}@epoch:1", "step": 10}
    assert has_beginning({}, fork), "it is none"
    assert has_beginning({"forked_from": forked}, fork)
    other: Any = {**forked, "step": 11}
    assert not has_beginning({"forked_from": other}, fork)
    content = bytearray(parent.last.read_bytes())
    content[len(content) // 2] ^= 1
    parent.last.write_bytes(content)
    assert not has_beginning({"forked_from": forked}, fork)
    shutil.rmtree(parent.folder)
    assert not has_beginning({"forked_from": forked}, fork)


def test_the_place_of_a_fork_whose_parent_is_removed_goes_to_a_fork_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent is removed when it has been chosen, and its fork has not started."""
    real, removed = PopulationTraining.new, list[Path]()

    def new(self: PopulationTraining, points: Sequence[Point], number: int) -> NewRun:
        found = real(self, points, number)
        if found.parent is not None and not removed:
            removed.extend(
                point.folder for point in points if point.number == found.parent and point.folder
            )
            shutil.rmtree(removed[0])
        return found

    monkeypatch.setattr(PopulationTraining, "new", new)
    folder = tmp_path / "sweep"
    expt.sweep(*SHORT, *SEARCH, "epochs=2", "search.quantile=0.5", f"hydra.sweep.dir='{folder}'")
    records = {record["search"]["number"]: record for record in _records(folder)}
    refused = [record for record in records.values() if record["status"] == FAILED]
    assert [f"there is no folder {removed[0]};" in record["error"] for record in refused] == [True]
    assert f"warning: {removed[0]}: has no checkpoint to fork any more" in capsys.readouterr().err
    replaced = [record["search"].get("replaces") for record in records.values()]
    assert refused[0]["search"]["number"] in replaced
    assert [record["status"] for record in records.values()].count(COMPLETED) == 4
