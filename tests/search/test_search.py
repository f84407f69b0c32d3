"""The source that the pool asks: when it gives a point, when it waits, and when it ends."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from expt.config.search import parse_search
from expt.errors import ConfigError, Diverged, OutOfMemory, RunFailed
from expt.launch.job import QUEUED, Job
from expt.runs.attempt import record_end
from expt.runs.paths import RunPaths
from expt.runs.result import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    PAUSED,
    RUNNING,
    create_result,
    update_result,
)
from expt.search.budget import budget_of, stopped_in_words
from expt.search.goals import Goal, Limit
from expt.search.history import Point, Reader
from expt.search.pausing import Pausing
from expt.search.search import Searching
from expt.search.source import Source
from expt.search.space import Parameter, Space, Values
from tests.requests import request

SPACE = Space((Parameter("optimizer.lr", "float", 0.001, 1.0, log=True),))
LIMIT = Limit("memory/gpu_mib<100", "memory/gpu_mib", True, 100.0)


class Folder:
    """A search's folder, whose runs end when a test says so."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.jobs, self.room, self.finished = folder, list[Job](), True, list[str]()
        self.settings = parse_search({"name": "random", "runs": 4, **settings})
        self.searching = self.read()

    def read(self, space: Space = SPACE, **more: Any) -> Searching:
        """As a command does that begins there."""
        reader = Reader(
            space=space, goals=[Goal("accuracy/val", highest=True)], limits=[LIMIT], **more
        )
        return Searching(self.folder, space, self.settings, reader)

    def make(self, number: int, values: Values) -> Job:
        asked = request(self.folder / f"{number}")
        create_result(asked.paths, search={"number": number}, overrides={**values})
        self.jobs.append(Job(asked.paths, asked, RUNNING))
        return self.jobs[-1]

    def source(self, **options: Any) -> Source:
        return Source(self.searching, self.make, lambda _: None, lambda: self.room, **options)

    def complete(self, job: Job, value: float = 0.5, **fields: Any) -> None:
        update_result(
            job.paths,
            status=COMPLETED,
            objective={"name": "accuracy/val", "value": value},
            **fields,
        )
        job.status = COMPLETED


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def taken(source: Iterator[Job | None], times: int) -> list[str]:
    return ["wait" if job is None else job.name for job in (next(source) for _ in range(times))]


def test_a_point_is_chosen_when_there_is_room_and_the_end_waits_for_those_that_run(
    folder: Folder,
) -> None:
    source = folder.source()
    assert taken(source, 2) == ["0", "1"]
    folder.room = False
    assert taken(source, 2) == ["wait", "wait"]
    folder.room = True
    folder.complete(folder.jobs[0], 0.75)
    assert taken(source, 3) == ["2", "3", "wait"], "four points are all, and three of them run"
    assert folder.searching.best is not None
    assert folder.searching.best.objectives == (0.75,), (
        "what has ended is known before the next is chosen"
    )
    for job in folder.jobs:
        folder.complete(job)
    with pytest.raises(StopIteration):
        next(source)
    assert source.is_over
    assert not source.is_spent


class FirstGoesOn:
    """Rungs at which the first of the paused runs goes on."""

    def next(self, points: Sequence[Point]) -> tuple[Point, int | None] | None:
        return next(((point, None) for point in points if point.status == PAUSED), None)

    def first_stop(self, number: int) -> int:
        return 1

    def clear(self, points: Sequence[Point], planned: int) -> None:
        pass


def test_who_leads_is_told_once_and_of_equal_runs_it_is_the_first(folder: Folder) -> None:
    source, told = folder.source(), list[bool]()
    assert taken(source, 3) == ["0", "1", "2"]
    for number, status, value in (
        (1, PAUSED, 0.5),
        (1, COMPLETED, 0.5),
        (2, COMPLETED, 0.5),
        (0, COMPLETED, 0.75),
    ):
        update_result(
            folder.jobs[number].paths,
            status=status,
            objective={"name": "accuracy/val", "value": value},
        )
        told.append(folder.searching.is_new_best(folder.jobs[number].paths))
    assert told == [True, False, False, True]
    assert not folder.read().is_new_best(folder.jobs[0].paths), (
        "a later command has known it from its beginning"
    )


def test_what_is_left_are_points_to_come_and_those_that_were_begun(folder: Folder) -> None:
    assert folder.searching.num_left == 4
    taken(folder.source(), 2)
    folder.complete(folder.jobs[0])
    update_result(folder.jobs[1].paths, status=INTERRUPTED)
    assert folder.read().num_left == 3
    small = Space(
        (Parameter("optimizer.lr", "categorical", choices=("0.1", "0.2"), meant=(0.1, 0.2)),)
    )
    reader = Reader(space=small, goals=[Goal("accuracy/val", highest=True)])
    assert Searching(folder.folder, small, folder.settings, reader).num_left == 2, (
        "the space has no more"
    )


def test_a_batch_waits_for_all_of_the_one_before(tmp_path: Path) -> None:
    folder = Folder(tmp_path, runs=5)
    source = folder.source(batch=2)
    assert taken(source, 4) == ["0", "1", "wait", "wait"]
    folder.complete(folder.jobs[0])
    assert taken(source, 1) == ["wait"]
    folder.complete(folder.jobs[1])
    assert taken(source, 3) == ["2", "3", "wait"]


def test_a_budget_of_devices_counts_all_runs_of_the_folder(folder: Folder) -> None:
    budget = budget_of("100core-s")
    source = folder.source(budget=budget, finish=folder.finished.append)
    assert taken(source, 1) == ["0"]
    folder.complete(folder.jobs[0], device_s=99.0)
    assert taken(source, 1) == ["1"]
    folder.complete(folder.jobs[1], device_s=2.0)
    with pytest.raises(StopIteration):
        next(source)
    assert (source.is_spent, folder.finished) == (True, ["search.budget=100core-s is used up"])
    assert folder.read().spent_s == 101.0, "another command knows what was spent"


def test_what_was_stopped_had_begun_and_is_saved_where_it_has_a_checkpoint(folder: Folder) -> None:
    source, saved = folder.source(), RunPaths(folder.folder / "1")
    assert taken(source, 3) == ["0", "1", "2"]
    folder.jobs[2].paths.result.unlink()  # a job that was cancelled before it could begin
    searching = folder.searching
    for job in folder.jobs:
        searching.look(job.paths)
    assert (searching.count, searching.num_begun, len(searching.stopped)) == (3, 2, 2)
    assert stopped_in_words(searching.stopped) == "2 stopped, none of them with a checkpoint"
    saved.checkpoints.mkdir()
    saved.last.touch()
    assert stopped_in_words(searching.stopped) == "2 stopped, 1 of them with a checkpoint"
    assert stopped_in_words([saved]) == "1 stopped and saved"


def test_a_budget_of_devices_counts_runs_that_wait_for_their_next_turn(folder: Folder) -> None:
    folder.searching.pausing = cast("Pausing", FirstGoesOn())
    source = folder.source()
    assert taken(source, 3) == ["0", "1", "2"]
    at_rung, by_person, _ = folder.jobs
    for job in folder.jobs:
        job.started_at = time.monotonic()
    update_result(at_rung.paths, status=PAUSED, device_s=100.0)
    at_rung.status = PAUSED
    update_result(by_person.paths, status=PAUSED, device_s=20.0)
    by_person.status = QUEUED
    assert taken(source, 1) == ["0"], "the one at the rung goes on, and waits for its turn"
    assert source.spent_s == pytest.approx(120.0, abs=10)
    by_person.status, by_person.started_at = RUNNING, time.monotonic()
    assert source.spent_s == pytest.approx(120.0, abs=10)
    update_result(by_person.paths, device_s=50.0)
    by_person.status, by_person.started_at = QUEUED, by_person.started_at + 1
    folder.room = False
    assert taken(source, 1) == ["wait"]
    assert source.spent_s == pytest.approx(150.0, abs=10)


def test_what_a_command_finds_is_what_the_run_folders_say(folder: Folder) -> None:
    """Nothing else is kept: of a killed search the run under way is done again, and the next number
    follows.
    """
    for number, lr in enumerate((0.5, 0.1, 0.02, 7.0)):
        folder.make(number, {"optimizer.lr": lr})
    first, second, third, _ = folder.jobs
    folder.complete(first, 0.25, metrics={"memory/gpu_mib": 80.0})
    record_end(second.paths, Diverged("the loss was nan"))
    record_end(third.paths, OutOfMemory("out of memory"))
    folder.make(4, {"optimizer.lr": 0.3})
    found = folder.read()
    assert [(point.number, point.values["optimizer.lr"]) for point in found.own] == [
        (0, 0.5),
        (1, 0.1),
        (2, 0.02),
        (4, 0.3),
    ], "one lies outside of the space as it is now"
    assert [point.is_bad for point in found.own] == [False, True, True, False]
    assert [point.is_allowed for point in found.own] == [True, True, False, True]
    assert found.own[0].violations == {"memory/gpu_mib<100": -20.0}
    assert [point.number for point in found.unfinished] == [4]
    assert (found.count, found.is_complete) == (4, True)


def made(folder: Folder, searching: Searching) -> dict[int, float]:
    """The points that one command adds, all of them completed."""
    found = {}
    while not searching.is_complete and (point := searching.next()):
        job = folder.make(*point)
        searching.begin(*point, job.paths)
        folder.complete(job)
        found[point[0]] = float(point[1]["optimizer.lr"])
    return found


def lr(low: float, high: float) -> Space:
    return Space((Parameter("optimizer.lr", "float", low, high),))


def test_no_two_runs_of_a_folder_have_one_number_though_the_space_changes(folder: Folder) -> None:
    low, high = made(folder, folder.read(lr(0.001, 0.01))), made(folder, folder.read(lr(0.05, 0.3)))
    assert ([*low], [*high]) == ([0, 1, 2, 3], [4, 5, 6, 7]), "four points of each space"
    assert not made(folder, folder.read(lr(0.05, 0.3)))
    wide = folder.read(lr(0.001, 0.3))
    assert (wide.count, wide.is_complete) == (8, True)
    assert {point.number: point.values["optimizer.lr"] for point in wide.own} == {**low, **high}


def test_numbers_that_an_older_version_gave_twice_are_told_apart(folder: Folder) -> None:
    for name, value in (("a", 0.1), ("b", 0.2)):
        create_result(
            RunPaths(folder.folder / name), search={"number": 0}, overrides={"optimizer.lr": value}
        )
    searching = folder.read()
    numbers = {point.folder: point.number for point in searching.own}
    assert sorted(numbers.values(), key=str) == [0, 1]
    for run in numbers:
        assert run is not None
        searching.look(RunPaths(run))
    assert {point.folder: point.number for point in searching.own} == numbers


@pytest.mark.parametrize("name", ["random", "qmc", "tpe"])
def test_a_point_whose_run_is_gone_is_made_again(name: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path, name=name, runs=14)
    whole = made(folder, folder.read())
    shutil.rmtree(tmp_path / "10")
    RunPaths(tmp_path / "3").result.write_text("{")
    searching = folder.read()
    assert searching.is_missing(3)
    assert not searching.is_missing(14)
    for number in (3, 10):
        found = searching.next()
        assert found is not None
        assert (found[0], found[1]["optimizer.lr"]) == (number, whole[number])
        searching.begin(*found, RunPaths(tmp_path / f"{number} again"))
    assert searching.is_complete


def test_a_point_that_is_another_under_another_name_counts(folder: Folder) -> None:
    searching = folder.read()
    first = folder.make(0, {"optimizer.lr": 0.5})
    searching.begin(0, {"optimizer.lr": 0.5}, first.paths)
    searching.begin(1, {"optimizer.lr": 0.50001}, first.paths)
    searching.begin(2, {"optimizer.lr": 0.50002}, None)
    assert (searching.count, [point.number for point in searching.own]) == (3, [0])
    found = searching.next()
    assert found is not None
    assert found[0] == 3


def test_runs_of_other_settings_inform_a_search_only_as_a_warm_start_does(folder: Folder) -> None:
    before = made(folder, folder.read())
    searching = folder.read(differences=lambda *_: ["epochs"])
    assert (searching.own, searching.count, searching.best) == ([], 0, None)
    assert searching.found.differing == {f"{number}": ["epochs"] for number in range(4)}
    found = searching.next()
    assert found == (
        4,
        {"optimizer.lr": before[0]},
    ), "the first point once more, under a number of its own"
    folder.settings = replace(folder.settings, warm_start=(str(folder.folder),))
    warm = folder.read(differences=lambda *_: ["epochs"])
    assert [(point.number, point.is_of_others) for point in warm.points] == [(None, True)] * 4
    assert warm.next() == found
    assert not folder.read().points[4:], "its own runs are no others"


def test_a_fork_that_has_lost_its_checkpoints_and_what_it_began_from_is_left_as_it_is(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.searching.pausing = cast("Pausing", FirstGoesOn())
    source, parent = folder.source(), folder.folder / "parent"
    assert taken(source, 2) == ["0", "1"]
    forked: Any = {
        "given": f"{parent}@epoch:1",
        "run": str(parent),
        "step": 5,
        "epoch": 1,
        "arguments": [],
    }
    forked |= {"identity": "a", "seedless_identity": "a", "changed": {}}
    update_result(folder.jobs[0].paths, forked_from=forked)
    for job in folder.jobs:
        update_result(
            job.paths,
            status=PAUSED,
            resumable=False,
            objective={"name": "accuracy/val", "value": 0.5},
        )
        job.status = PAUSED
    before = folder.jobs[0].paths.result.read_bytes()
    assert taken(source, 2) == ["1", "2"], "the others go on"
    warned = capsys.readouterr().err
    assert f"{folder.folder}/0: was to go on" in warned
    assert (
        f"({parent}@epoch:1) is gone too; this cannot be mended, and it is left as it is" in warned
    )
    assert f"{folder.folder}/1: goes on after all, and from its beginning" in warned
    assert folder.jobs[0].paths.result.read_bytes() == before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            None,
            (
                "was to go on, and has come back paused after 2 of . epochs, as it was; remove the"
                " folder"
            ),
        ),
        (
            RunFailed("last.pt: no space left"),
            "could not go on: last.pt: no space left; once that is mended, type",
        ),
    ],
)
def test_a_run_that_is_promoted_and_comes_back_as_it_was_ends_the_search(
    error: RunFailed | None, said: str, folder: Folder
) -> None:
    folder.searching.pausing = cast("Pausing", FirstGoesOn())
    source = folder.source()
    assert taken(source, 1) == ["0"]
    (job,) = folder.jobs
    for epochs in (1, 2):
        update_result(job.paths, status=PAUSED, epoch_s=[1.0] * epochs)
        job.status = PAUSED
        assert taken(source, 1) == ["0"]
    job.status, job.error = (FAILED, error) if error else (PAUSED, None)
    with pytest.raises(RunFailed, match=f"0: {said}"):
        next(source)


def test_a_folder_without_points_is_no_warm_start(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(
        ConfigError, match=r"search\.warm_start=.*other: holds no run with a point of this space"
    ):
        Folder(tmp_path, warm_start=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"search\.warm_start=.*nowhere: there is no such folder"):
        Folder(tmp_path, warm_start=str(tmp_path / "nowhere"))


def test_the_kind_of_an_error_is_recorded(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    create_result(paths, started=0.0, world_size=2)
    record_end(paths, OutOfMemory("out of memory"))
    record = json.loads(paths.result.read_text())
    assert record["error_kind"] == "OutOfMemory"
    assert record["device_s"] > 2e9, "two workers, since 1970"
