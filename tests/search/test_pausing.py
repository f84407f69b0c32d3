"""A search with rungs, whose runs are only records: what goes on when, what is removed, and what
kills change.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from expt.config.search import Search
from expt.errors import ConfigError
from expt.launch.job import Job, request_of
from expt.runs.folder_lock import at_work
from expt.runs.metrics_file import MetricsReader, MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import (
    COMPLETED,
    FAILED,
    PAUSED,
    RUNNING,
    create_result,
    read_result,
    update_result,
)
from expt.search.folder import read
from expt.search.goals import Goal
from expt.search.history import Point, Reader
from expt.search.pausing import Pausing
from expt.search.search import Searching
from expt.search.source import Source
from expt.search.space import Parameter, Space, Values
from tests.conftest import Configured
from tests.requests import request

EPOCHS, TAG = 9, "loss/val"
SPACE = Space((Parameter("optimizer.lr", "float", 1e-3, 1.0, log=True),))
GOAL = Goal(TAG, highest=False)


class KilledError(Exception):
    """As by SIGKILL: nothing is written after it."""


class Machine:
    """Runs one job of a search after another, as a pool with one device does; may be killed at the
    next moment.
    """

    def __init__(
        self, folder: Path, configured: Configured, *, kill_at: int = -1, **settings: Any
    ) -> None:
        self.folder, self._left, self.starts = folder, kill_at, list[tuple[str, int, int | None]]()
        self.settings = Search(**{"name": "tpe", "rungs": "asha", "runs": 12, **settings})
        reader = Reader(space=SPACE, goals=[GOAL], with_rungs=True)
        config = configured(f"epochs={EPOCHS}", "objective=loss/val")
        pausing = Pausing(self.settings, config, [GOAL], SPACE) if self.settings.rungs else None
        self.searching = Searching(folder, SPACE, self.settings, reader, pausing)

    @property
    def source(self) -> Source:
        """Of a machine that always has room."""
        return Source(self.searching, self._make, self._again, lambda: True)

    def run(self) -> Machine:
        """To the end of the search."""
        for job in self.source:
            assert job is not None, (
                "one at a time: there is always something to do, or nothing is left"
            )
            self._train(job)
        return self

    def _moment(self) -> None:
        if self._left == 0:
            raise KilledError
        self._left -= 1

    def _make(self, number: int, values: Values) -> Job:
        about: Any = {
            "overrides": values,
            "arguments": SPACE.words(values),
            "search": {"number": number},
        }
        return self._job(self.folder / f"run{number}", about)

    def _again(self, point: Point) -> Job:
        assert point.folder is not None
        known = read_result(RunPaths(point.folder))
        keys = ("overrides", "arguments", "search")
        return self._job(point.folder, {key: known[key] for key in keys})  # type: ignore[literal-required]

    def _job(self, folder: Path, about: Any) -> Job:
        asked = request(folder)
        asked.about.clear()  # type: ignore[attr-defined]
        asked.about.update(about)
        return Job(asked.paths, asked)

    def _train(self, job: Job) -> None:
        """What workers leave behind, from moment to moment."""
        asked, paths = request_of(job), job.paths
        done = len(list(paths.checkpoints.glob("epoch*")))  # a checkpoint of each, as it were
        self.starts.append((job.name, done, asked.until_epoch))
        self._moment()
        attempts: Any = {
            "attempts": 1,
            "node": socket.gethostname(),
            "config": {"objective": TAG, "epochs": EPOCHS},
        }
        until = {} if asked.until_epoch is None else {"until_epoch": asked.until_epoch}
        create_result(paths, may_exist=True, status=RUNNING, **{**asked.about, **attempts, **until})
        kept = [point for point in MetricsReader(paths).read() if point.epoch <= done]
        paths.metrics.unlink(missing_ok=True)
        with contextlib.closing(MetricsWriter(paths)) as writer:
            for point in kept:
                writer.write(point.step, point.epoch, {point.tag: point.value})
            end = self._epochs(asked, writer, done)
        lr = float(asked.about["overrides"]["optimizer.lr"])
        self._moment()
        best = min(cost(lr, epoch) for epoch in range(1, end + 1))
        objective: Any = {"name": TAG, "value": best}
        job.status = COMPLETED if end == EPOCHS else PAUSED
        if lr > 0.9:
            job.status = FAILED
            update_result(paths, error="it diverged", error_kind="Diverged")
        update_result(paths, status=job.status, objective=objective, epoch_s=[1.0] * end)

    def _epochs(self, asked: RunRequest, writer: MetricsWriter, done: int) -> int:
        """All until the run pauses or ends; returns how many there are then."""
        end = min(asked.until_epoch or EPOCHS, EPOCHS)
        for epoch in range(done + 1, end + 1):
            self._moment()
            writer.write(
                epoch, epoch, {TAG: cost(float(asked.about["overrides"]["optimizer.lr"]), epoch)}
            )
            self._moment()  # evaluated, and not saved
            asked.paths.checkpoints.mkdir(exist_ok=True)
            (asked.paths.checkpoints / f"epoch{epoch}.pt").touch()
        return end

    @property
    def outcome(self) -> dict[str, Any]:
        """All that a search comes to."""
        reader = Reader(space=SPACE, goals=[GOAL], with_rungs=True)
        points = {point.number: point for point in read(self.folder, reader).points.values()}
        return {
            "runs": {
                number: (point.values, point.status, dict(point.rung_values))
                for number, point in points.items()
            },
            "best": self.searching.best,
        }

    @property
    def kept(self) -> set[str]:
        """The runs that have checkpoints."""
        return {path.parent.name for path in self.folder.glob("*/checkpoints")}


def cost(lr: float, epoch: int) -> float:
    return abs(lr - 0.1) + random.Random(f"{lr}/{epoch}").random() / epoch


@pytest.mark.parametrize("rungs", ["asha", "hyperband", "median"])
def test_a_search_that_is_killed_at_any_moment_goes_on_to_the_same_end(
    rungs: str, configured: Configured, tmp_path: Path
) -> None:
    whole = Machine(tmp_path / "same", configured, rungs=rungs).run()
    statuses = [status for _, status, _ in whole.outcome["runs"].values()]
    assert {PAUSED, COMPLETED} <= {*statuses}
    (tmp_path / "same").rename(tmp_path / "whole")  # points tell their folder
    moments = random.Random(rungs)
    kills = 0
    while True:
        machine = Machine(tmp_path / "same", configured, rungs=rungs, kill_at=moments.randrange(12))
        try:
            machine.run()
            break
        except KilledError:
            kills += 1
    assert kills >= 5
    outcome = machine.outcome
    (tmp_path / "same").rename(tmp_path / "killed")
    (tmp_path / "whole").rename(tmp_path / "same")
    assert outcome == whole.outcome
    kept = {path.parent.name for path in (tmp_path / "killed").glob("*/checkpoints")}
    assert kept == whole.kept


@pytest.mark.parametrize("rungs", ["asha", "hyperband", "median"])
def test_a_run_that_a_person_has_paused_between_two_rungs_goes_on_to_the_next_in_a_later_command(
    rungs: str, configured: Configured, tmp_path: Path
) -> None:
    """It waits at no rung: it had been promoted, and others may have come to be better there since."""
    more: Any = {"rungs": rungs, "name": "random", "runs": 9}
    whole = Machine(tmp_path / "same", configured, **more).run()
    (tmp_path / "same").rename(tmp_path / "whole")
    ends = set[int | None]()
    for kill_at in range(1, 100, 3):
        machine = Machine(tmp_path / "same", configured, kill_at=kill_at, **more)
        with contextlib.suppress(KilledError):
            machine.run()
        _, _, until = machine.starts[-1]
        paths = RunPaths(tmp_path / "same" / machine.starts[-1][0])
        done = len(list(paths.checkpoints.glob("epoch*")))
        if read_result(paths).get("status") == RUNNING and done and done != until:
            update_result(paths, status=PAUSED, epoch_s=[1.0] * done)
            later = Machine(tmp_path / "same", configured, **more)
            later.searching.clear()
            later.run()
            assert later.starts[0] == (paths.folder.name, done, until)
            outcome = later.outcome
            shutil.move(tmp_path / "same", tmp_path / f"killed {kill_at}")
            (tmp_path / "whole").rename(tmp_path / "same")
            assert outcome == whole.outcome
            (tmp_path / "same").rename(tmp_path / "whole")
            ends.add(until)
        else:
            shutil.rmtree(tmp_path / "same", ignore_errors=True)
    assert len(ends) > 1
    assert rungs == "median" or {None, 3} <= ends


def test_what_has_paused_goes_on_from_there_also_in_a_later_command_with_more_points(
    configured: Configured, tmp_path: Path
) -> None:
    first = Machine(tmp_path, configured, runs=4, keep_checkpoints=True).run()
    assert [(done, until) for _, done, until in first.starts[:5]] == [(0, 1)] * 3 + [(1, 3)] + [
        (0, 1)
    ]
    assert first.kept == {f"run{number}" for number in range(4)}
    later = Machine(tmp_path, configured, runs=12, keep_checkpoints=True).run()
    assert later.starts[0] == ("run4", 0, 1), "nobody is to go on before there are more"
    assert {until for _, _, until in later.starts} == {1, 3, None}
    assert all(done in (0, 1, 3) for _, done, _ in later.starts)
    assert any(name in first.kept and done for name, done, _ in later.starts), "from its checkpoint"


def test_what_goes_on_is_not_asked_to_once_more_while_others_run(
    configured: Configured, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, configured)
    source = machine.source
    for _ in range(3):
        job = next(source)
        assert job
        machine._train(job)
    found = [next(source) for _ in range(3)]
    assert all(found)
    assert [request_of(job).until_epoch for job in found if job] == [3, 1, 1]
    assert len({*found}) == 3, "the best of three, and two new ones"


def test_a_paused_run_whose_folder_a_person_has_removed_is_not_gone_on_with(
    configured: Configured, tmp_path: Path
) -> None:
    Machine(tmp_path, configured, runs=2, keep_checkpoints=True).run()
    later = Machine(tmp_path, configured, runs=4, keep_checkpoints=True)
    lowest = min(later.outcome["runs"].items(), key=lambda run: run[1][2][1])[0]
    shutil.rmtree(tmp_path / f"run{lowest}")
    later.run()
    assert later.starts[0] == ("run2", 0, 1)
    assert f"run{lowest}" not in {name for name, *_ in later.starts}
    assert 1 in {done for _, done, _ in later.starts}, "the best of the other three goes on"


@pytest.mark.parametrize("left", [0, 90])
def test_a_paused_run_that_has_lost_what_it_measured_is_trained_anew(
    left: int, configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Machine(tmp_path, configured, runs=4, keep_checkpoints=True).run()
    before = whole.outcome
    lost = next(
        point
        for point in whole.searching.own
        if point.status == PAUSED and max(point.rung_values) == 3
    )
    assert lost.folder is not None
    metrics = RunPaths(lost.folder).metrics
    metrics.write_bytes(metrics.read_bytes()[:left])
    later = Machine(tmp_path, configured, runs=4, keep_checkpoints=True).run()
    assert later.starts == [(lost.folder.name, 0, 3)]
    assert (
        f"{metrics}: lacks values of epochs that the run has trained; it is trained anew"
        in capsys.readouterr().err
    )
    assert later.outcome == before


@pytest.mark.parametrize(("kind", "left"), [("asha", 0), ("asha", 90), ("median", 0)])
def test_a_completed_run_that_has_lost_what_it_measured_leaves_its_place_at_the_rungs_to_nobody(
    kind: Any, left: int, configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Machine(tmp_path, configured, runs=9, rungs=kind).run()
    for point in whole.searching.own:
        if point.status == COMPLETED and point.folder is not None:
            metrics = RunPaths(point.folder).metrics
            metrics.write_bytes(metrics.read_bytes()[:left])
    later = Machine(tmp_path, configured, runs=9, rungs=kind).run()
    assert later.starts == []
    assert later.searching.best is not None
    assert whole.searching.best is not None
    assert later.searching.best.folder == whole.searching.best.folder
    told = capsys.readouterr().err
    assert (
        f"{metrics}: lacks values of epochs that the run has trained; it has completed, and counts"
        " as past" in told
    )


def test_without_rungs_all_that_had_paused_go_to_their_ends(
    configured: Configured, tmp_path: Path
) -> None:
    Machine(tmp_path, configured, runs=4, keep_checkpoints=True).run()
    later = Machine(tmp_path, configured, runs=4, rungs=None).run()
    assert {done for _, done, _ in later.starts} <= {1, 3}
    assert {until for _, _, until in later.starts} == {None}
    assert {status for _, status, _ in later.outcome["runs"].values()} <= {COMPLETED, FAILED}


def test_checkpoints_of_those_that_never_go_on_are_removed_but_for_the_best(
    configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):  # of another space, which have taken numbers
        about: Any = {"search": {"number": number}, "overrides": {"optimizer.lr": 7.0}}
        create_result(RunPaths(tmp_path / f"other{number}"), **about)
    done = Machine(tmp_path, configured, name="random", seed=1).run()
    begun = [name for name, *_ in done.starts]
    on = [start for place, start in enumerate(done.starts) if start[0] in begun[:place]]
    assert len(on) > 2
    assert all(epochs for _, epochs, _ in on), "who goes on has kept its own"
    points = {point.folder.name: point for point in done.searching.own if point.folder}
    completed = {name for name, point in points.items() if point.status == COMPLETED}
    best = min(points, key=lambda name: min(points[name].rung_values.values()))
    assert done.kept == completed | {best}
    assert completed
    gone = {name for name, point in points.items() if point.status == PAUSED} - {best}
    assert {read_result(RunPaths(tmp_path / name)).get("resumable") for name in gone} == {False}
    more = Machine(
        tmp_path, configured, name="random", seed=1, runs=27
    ).run()  # who goes on now has to begin again
    assert {done for name, done, _ in more.starts if name in gone} == {0}
    told = capsys.readouterr().err
    for name in {name for name, *_ in more.starts} & gone:
        assert f"{tmp_path / name}: goes on after all, and from its beginning" in told


@pytest.mark.parametrize("of_first", [FAILED, RUNNING])
def test_the_best_that_keeps_its_checkpoints_is_none_that_has_diverged_or_may_yet(
    of_first: str, configured: Configured, tmp_path: Path
) -> None:
    points = []
    for number, (status, value) in enumerate([(of_first, 0.1), (PAUSED, 0.2), (PAUSED, 0.3)]):
        paths = RunPaths(tmp_path / f"{number}")
        create_result(paths, status=status)
        paths.last.parent.mkdir()
        paths.last.touch()
        known: Any = {"number": number, "objectives": (value,), "rung_values": {1: value}}
        points.append(Point(values={}, status=status, folder=paths.folder, **known))
    settings, config = (
        Search(name="random", rungs="asha"),
        configured("epochs=9", "objective=loss/val"),
    )
    Pausing(settings, config, [GOAL], SPACE).clear(points, range(3))
    assert [RunPaths(tmp_path / f"{number}").last.exists() for number in range(3)] == [
        True,
        True,
        False,
    ]


def test_who_is_at_work_in_a_run_keeps_its_checkpoints(
    configured: Configured, tmp_path: Path
) -> None:
    done = Machine(tmp_path, configured, keep_checkpoints=True).run()
    taken = next(
        point.folder for point in done.searching.own if point.status == PAUSED and point.folder
    )
    with at_work(RunPaths(taken)):
        Machine(tmp_path, configured).searching.clear()
        assert (taken / "checkpoints").exists()
        assert done.kept < {f"run{number}" for number in range(12)}
    Machine(tmp_path, configured).searching.clear()
    assert not (taken / "checkpoints").exists()


UNMEASURED = "search.rungs=asha: objective={} is not measured after each epoch; use {}"
TOO_LONG = "search.min_epochs={}: a run has epochs=3, and would never pause"


@pytest.mark.parametrize(
    ("settings", "words", "goals", "said"),
    [
        (
            {},
            ("objective=loss/test",),
            ["loss/test"],
            UNMEASURED.format("loss/test", "objective=loss/val"),
        ),
        (
            {},
            (),
            ["speed/samples_per_s"],
            UNMEASURED.format("speed/samples_per_s", "one of loss/train, loss/val"),
        ),
        (
            {},
            (),
            ["loss/val", "accuracy/val"],
            "compares runs by one objective, not by [loss/val,accuracy/val]; name",
        ),
        ({"min_epochs": 3}, ("epochs=3",), ["loss/val"], TOO_LONG.format(3)),
        ({"rungs": "median", "min_epochs": 9}, ("epochs=3",), ["loss/val"], TOO_LONG.format(9)),
    ],
)
def test_what_cannot_be_compared_at_rungs_is_refused(
    settings: dict[str, Any],
    words: tuple[str, ...],
    goals: list[str],
    said: str,
    configured: Configured,
) -> None:
    search = Search(name="random", **{"rungs": "asha", **settings})
    with pytest.raises(ConfigError) as raised:
        Pausing(search, configured(*words), [Goal(tag, highest=False) for tag in goals], SPACE)
    assert said in str(raised.value)


def test_runs_of_other_lengths_are_no_rivals(configured: Configured) -> None:
    space = Space((Parameter("epochs", "int", 1, 9),))
    with pytest.raises(ConfigError, match="compares runs of as many epochs"):
        Pausing(Search(name="random", rungs="asha"), configured(), [GOAL], space)
    recipes = Space((Parameter("recipe", "categorical", choices=("a", "b")),))
    with pytest.raises(
        ConfigError, match="as many epochs, which recipe changes; give epochs one value"
    ):
        Pausing(
            Search(name="random", rungs="asha"),
            configured(),
            [GOAL],
            recipes,
            {"recipe": {"epochs", "loss"}},
        )


def test_forks_are_compared_by_what_they_have_trained_themselves(
    configured: Configured, tmp_path: Path
) -> None:
    asked = request(tmp_path / "fork")
    texts = dict.fromkeys(("given", "run", "identity", "seedless_identity"), "")
    parent = {**texts, "step": 2, "epoch": 2, "arguments": [], "changed": {}}
    about: Any = {
        "overrides": {"optimizer.lr": 0.1},
        "search": {"number": 0},
        "forked_from": parent,
    }
    create_result(asked.paths, status=PAUSED, **about)
    with contextlib.closing(MetricsWriter(asked.paths)) as writer:
        for epoch in (1, 2, 3):
            writer.write(epoch, epoch, {TAG: 1.0 / epoch})
    (point,) = read(tmp_path, Reader(space=SPACE, goals=[GOAL], with_rungs=True)).points.values()
    assert point.rung_values == {3: 1.0 / 3}
    settings, config = (
        Search(name="random", rungs="asha"),
        configured("epochs=3", "objective=loss/val"),
    )
    assert Pausing(settings, config, [GOAL], SPACE, begins_at=1).first_stop(0) == 2
    with pytest.raises(
        ConfigError,
        match="epochs=3, 2 of them of the run that it is a fork of, and would never pause",
    ):
        Pausing(settings, config, [GOAL], SPACE, begins_at=2)
