"""The iterator that the pool pulls: which jobs it yields, when it waits, ends, and after kills."""

import contextlib
import dataclasses
import random
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from expt.config.search import Search as Settings
from expt.config.search import parse_search
from expt.errors import ConfigError, Diverged, OutOfMemory, RunFailed
from expt.launch.job import Job
from expt.runs.attempt import record_end
from expt.runs.metrics_file import MetricsReader, MetricsWriter
from expt.runs.paths import RunPaths, at_work
from expt.runs.request import RunRequest
from expt.runs.result import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    PRUNED,
    RUNNING,
    create_result,
    read_result,
    update_result,
)
from expt.search.rungs import Halving, Median
from expt.search.search import Budget, Search
from expt.search.space import Parameter, Space, Values
from expt.search.trial import Goal, Limit, Reader, Trial
from tests.facade import Patch, record_points, request

SPACE = Space((Parameter("optimizer.lr", "float", 0.001, 1.0, log=True),))
LIMIT = Limit("memory/gpu_mib<100", "memory/gpu_mib", True, 100.0, True)
ACCURACY = Goal("accuracy/val", highest=True)


Make = Callable[[int, Values], Job | None]


def as_they_are(values: Values, tried: Sequence[Values]) -> Values:
    return values


class Folder:
    """A search's folder, whose runs end when a test says so."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.jobs, self.room, self.finished = folder, list[Job](), True, list[str]()
        self.settings = parse_search({"name": "random", "runs": 4, **settings})

    def search(self, space: Space = SPACE, *, batch: int | None = None, **more: Any) -> Search:
        """Begin as a command does there."""
        budget = more.pop("budget", None)
        rungs = more.pop("rungs", None)
        reader = Reader(space=space, goals=[ACCURACY], limits=[LIMIT], **more)
        found = Search(self.folder, self.settings, reader, rungs, budget, as_they_are)
        self.begin(found, self.make, batch)
        return found

    def begin(self, search: Search, make: Make, batch: int | None = None) -> None:
        search.begin(make, has_room=lambda: self.room, finish=self.finished.append, batch=batch)

    def make(self, number: int, values: Values) -> Job:
        asked = request(self.folder / f"{number}")
        about: Any = {"search": {"number": number}, "overrides": {**values}, "identity": "a"}
        create_result(asked.paths, may_exist=True, **about)
        self.jobs.append(Job(asked.paths, asked, RUNNING))
        return self.jobs[-1]

    def complete(self, job: Job, value: float = 0.5, **fields: Any) -> None:
        objective: Any = {"name": "accuracy/val", "value": value}
        update_result(job.paths, status=COMPLETED, objective=objective, **fields)
        job.status = COMPLETED

    def completed(self, search: Search) -> dict[int, float]:
        """Let a command complete all its trials; return their values."""
        found = {}
        for job in search:
            assert job is not None
            self.complete(job)
            found[int(job.name)] = read_result(job.paths)["overrides"]["optimizer.lr"]
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def taken(search: Iterator[Job | None], times: int) -> list[str]:
    return ["wait" if job is None else job.name for job in (next(search) for _ in range(times))]


def test_trials_fill_room_and_the_end_waits(folder: Folder) -> None:
    search = folder.search()
    assert taken(search, 2) == ["0", "1"]
    folder.room = False
    assert taken(search, 2) == ["wait", "wait"]
    folder.room = True
    folder.complete(folder.jobs[0], 0.75)
    assert taken(search, 3) == ["2", "3", "wait"], "four trials are all, and three of them run"
    assert search.trials.best is not None
    assert search.trials.best.objectives == (0.75,), "an end is known before the next is chosen"
    for job in folder.jobs:
        folder.complete(job)
    with pytest.raises(StopIteration):
        next(search)
    assert (search.is_over, search.is_spent) == (True, False)


def test_a_new_best_is_reported_once_and_of_equal_runs_it_is_the_first(folder: Folder) -> None:
    search, told = folder.search(), list[bool]()
    assert taken(search, 3) == ["0", "1", "2"]
    ends = (1, PRUNED, 0.5), (1, COMPLETED, 0.5), (2, COMPLETED, 0.5), (0, COMPLETED, 0.75)
    for number, status, value in ends:
        objective: Any = {"name": "accuracy/val", "value": value}
        paths = folder.jobs[number].paths
        update_result(paths, status=status, objective=objective)
        told.append(search.trials.is_new_best(paths))
    assert told == [True, False, False, True]
    assert not folder.search().trials.is_new_best(folder.jobs[0].paths), "a later command knows it"


def test_trials_to_come_and_begun_ones_are_left(folder: Folder) -> None:
    search = folder.search()
    assert search.num_left == 4
    taken(search, 2)
    folder.complete(folder.jobs[0])
    update_result(folder.jobs[1].paths, status=INTERRUPTED)
    assert folder.search().num_left == 3


def test_a_batch_waits_for_all_of_the_one_before(tmp_path: Path) -> None:
    folder = Folder(tmp_path, runs=5)
    search = folder.search(batch=2)
    assert taken(search, 4) == ["0", "1", "wait", "wait"]
    folder.complete(folder.jobs[0])
    assert taken(search, 1) == ["wait"]
    folder.complete(folder.jobs[1])
    assert taken(search, 3) == ["2", "3", "wait"]


def test_device_budget_counts_all_runs(folder: Folder, monkeypatch: Patch) -> None:
    monkeypatch.setattr("expt.search.search.LOOK_S", 0.0)
    other: Any = {"overrides": {"optimizer.lr": 7.0}, "device_s": 50.0}
    create_result(RunPaths(folder.folder / "outside"), status=COMPLETED, **other)
    search = folder.search(budget=Budget("100core-s"))
    assert taken(search, 1) == ["0"]
    folder.complete(folder.jobs[0], device_s=49.0)
    assert taken(search, 1) == ["1"]
    folder.complete(folder.jobs[1], device_s=2.0)
    with pytest.raises(StopIteration):
        next(search)
    assert (search.is_spent, folder.finished) == (True, ["search.budget=100core-s is used up"])
    assert folder.search().note_costs() == 101.0, "another command knows what was spent"


def test_a_command_finds_what_the_run_folders_have(folder: Folder) -> None:
    """Nothing else is kept: the run under way when a search was killed is done again."""
    for number, lr in enumerate((0.5, 0.1, 0.02, 7.0)):
        folder.make(number, {"optimizer.lr": lr})
    first, second, third, _ = folder.jobs
    folder.complete(first, 0.25, metrics={"memory/gpu_mib": 80.0})
    record_end(second.paths, Diverged("the loss was nan"))
    record_end(third.paths, OutOfMemory("out of memory"))
    folder.make(4, {"optimizer.lr": 0.3})
    search = folder.search()
    trials = [*search.trials]
    found = [(trial.number, trial.values["optimizer.lr"]) for trial in trials]
    inside = [(0, 0.5), (1, 0.1), (2, 0.02), (4, 0.3)]
    assert found == inside, "one lies outside of the space as it is now"
    assert search.trials.others == {"3": ()}
    assert [trial.is_bad for trial in trials] == [False, True, True, False]
    assert [trial.is_allowed for trial in trials] == [True, True, False, True]
    assert trials[0].violations == {"memory/gpu_mib<100": -20.0}
    assert [trial.number for trial in search.unfinished] == [4]
    assert taken(search, 1) == ["4"]


@pytest.mark.parametrize("name", ["random", "qmc", "tpe"])
def test_a_trial_whose_run_is_gone_is_made_again(name: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path, name=name, runs=14)
    whole = folder.completed(folder.search())
    shutil.rmtree(tmp_path / "10")
    RunPaths(tmp_path / "3").result.write_text("{")
    shutil.copytree(tmp_path / "4", tmp_path / "a copy of 4")
    (tmp_path / "3").rename(tmp_path / "damaged")
    again = folder.completed(folder.search())
    assert again == {number: whole[number] for number in (3, 10)}


def test_a_trial_that_is_the_run_of_another_counts(folder: Folder) -> None:
    search, numbers = folder.search(), list[int]()

    def make(number: int, values: Values) -> Job | None:
        numbers.append(number)
        return None if number in (1, 2) else folder.make(number, values)

    folder.begin(search, make)
    assert taken(search, 2) == ["0", "3"]
    assert (search.count, numbers) == (4, [0, 1, 2, 3])


def test_runs_of_other_settings_inform_a_search_only_as_a_warm_start(tmp_path: Path) -> None:
    folder = Folder(tmp_path, name="tpe", runs=12, random_fraction=0)
    before = folder.completed(folder.search())
    search = folder.search(differences=lambda *_: ["epochs"])
    assert ([*search.trials], search.count, search.trials.best) == ([], 0, None)
    assert search.trials.others == {f"{number}": ["epochs"] for number in range(12)}
    assert search.suggest() == (0, {"optimizer.lr": before[0]}), "the first trial once more"
    folder.settings = parse_search({"name": "tpe", "warm_start": str(tmp_path)})
    warm = folder.search(differences=lambda *_: ["epochs"])
    found = warm.suggest()
    assert found is not None
    assert found[1] != {"optimizer.lr": before[0]}
    (tmp_path / "other").mkdir()
    for source in ("other", "nowhere"):
        folder.settings = parse_search({"name": "tpe", "warm_start": str(tmp_path / source)})
        with pytest.raises(ConfigError, match=rf"^search\.warm_start=.*{source}: "):
            folder.search()


@pytest.mark.parametrize("error", [None, RunFailed("last.safetensors: no space left")])
def test_stuck_trial_is_not_promoted_again(error: RunFailed | None, folder: Folder) -> None:
    search = folder.search(rungs=Median([1]))
    assert taken(search, 2) == ["0", "1"]
    for job in folder.jobs:
        pause(job, 1)
    assert taken(search, 1) == ["0"], "too few have completed to hold it back"
    pause(folder.jobs[0], 1)
    folder.jobs[0].status, folder.jobs[0].error = (FAILED, error) if error else (PRUNED, None)
    assert taken(search, 2) == ["1", "2"]


def pause(job: Job, epoch: int) -> None:
    record_points(job.paths, (epoch, epoch, {ACCURACY.tag: 0.5}))
    update_result(job.paths, status=PRUNED, objective={"name": ACCURACY.tag, "value": 0.5})
    job.status = PRUNED


OWN = {"model": {"name": "_target_", "target": "a.B", "kwargs": {"hidden": [256]}}}


@pytest.mark.parametrize(
    ("key", "choices", "meant", "config"),
    [
        ("model.hidden", ("[8]", "[256,1]"), ([8], [256, 1]), {"model": {"hidden": [256, 1]}}),
        ("model.hidden", ("[8]", "null"), ([8], None), {"model": {"hidden": None}}),
        ("model.hidden", ("[8]", "[256]"), ([8], [256]), OWN),
        ("optimizer", ("adamw", "'sgd'"), ("adamw", "sgd"), {"optimizer": {"name": "sgd"}}),
    ],
)
def test_a_run_that_has_a_choice_without_it_being_typed_is_a_trial(
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
    trials, others = Reader(space=space, goals=[ACCURACY]).own(tmp_path)
    assert [trial.values for trial in trials] == [{key: choices[1], "lr": 0.1}]
    assert not others


EPOCHS, TAG = 9, "loss/val"
LOSS = Goal(TAG, highest=False)


class KilledError(Exception):
    """As by SIGKILL: nothing is written after it."""


class Machine:
    """Runs one job of a search after another; may be killed at any moment."""

    def __init__(self, folder: Path, *, kill_at: int = -1, **settings: Any) -> None:
        self.folder, self._left, self.starts = folder, kill_at, list[tuple[str, int, int | None]]()
        self.settings = Settings(**{"name": "tpe", "rungs": "asha", "runs": 12, **settings})
        kinds = {"asha": Halving([1, 3], 3), "median": Median(range(1, EPOCHS)), None: None}
        reader = Reader(space=SPACE, goals=[LOSS])
        rungs = kinds[self.settings.rungs]
        self.search = Search(folder, self.settings, reader, rungs, None, as_they_are)
        self.search.begin(self._make, has_room=lambda: True, finish=print, batch=None)

    def run(self) -> "Machine":
        """Run to the end of the search."""
        for job in self.search:
            assert job is not None, "one at a time: there is always something to do, or the end"
            self._train(job)
        return self

    def _moment(self) -> None:
        if self._left == 0:
            raise KilledError
        self._left -= 1

    def _make(self, number: int, values: Values) -> Job:
        asked = request(self.folder / f"run{number}")
        about: Any = {"overrides": values, "search": {"number": number}, "identity": f"{number}"}
        return Job(asked.paths, dataclasses.replace(asked, about=about))

    def _train(self, job: Job) -> None:
        """Leave behind what workers do, from moment to moment."""
        asked, paths = job.asked, job.paths
        done = len(list(paths.checkpoints.glob("epoch*")))  # a checkpoint of each, as it were
        self.starts.append((job.name, done, asked.until_epoch))
        self._moment()
        attempts: Any = {"attempts": 1, "node": socket.gethostname()}
        attempts["config"] = {"objective": TAG, "epochs": EPOCHS}
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
        job.status = COMPLETED if end == EPOCHS else PRUNED
        if lr > 0.9:
            job.status = FAILED
            update_result(paths, error="it diverged", error_kind="Diverged")
        objective: Any = {"name": TAG, "value": best}
        update_result(paths, status=job.status, objective=objective, epoch_s=[1.0] * end)

    def _epochs(self, asked: RunRequest, writer: MetricsWriter, done: int) -> int:
        """Train until the run pauses or ends; return how many epochs there are then."""
        end = min(asked.until_epoch or EPOCHS, EPOCHS)
        for epoch in range(done + 1, end + 1):
            self._moment()
            value = cost(float(asked.about["overrides"]["optimizer.lr"]), epoch)
            writer.write(epoch, epoch, {TAG: value})
            self._moment()  # evaluated, and not saved
            asked.paths.checkpoints.mkdir(exist_ok=True)
            (asked.paths.checkpoints / f"epoch{epoch}.pt").touch()
        return end

    @property
    def outcome(self) -> dict[str, Any]:
        """All that a search comes to."""
        trials, _ = Reader(space=SPACE, goals=[LOSS]).own(self.folder)
        found = {each.number: (each.values, each.status, dict(each.costs)) for each in trials}
        best = self.search.trials.best
        return {"runs": found, "best": best and best.number}

    @property
    def kept(self) -> set[str]:
        """The runs that have checkpoints."""
        return {path.parent.name for path in self.folder.glob("*/checkpoints")}


def cost(lr: float, epoch: int) -> float:
    return abs(lr - 0.1) + random.Random(f"{lr}/{epoch}").random() / epoch


@pytest.mark.parametrize("rungs", ["asha", "median"])
def test_killed_search_ends_alike(rungs: str, tmp_path: Path) -> None:
    whole = Machine(tmp_path / "whole", rungs=rungs).run()
    assert {PRUNED, COMPLETED} <= {status for _, status, _ in whole.outcome["runs"].values()}
    moments, kills = random.Random(rungs), 0
    while True:
        machine = Machine(tmp_path / "killed", rungs=rungs, kill_at=moments.randrange(12))
        try:
            machine.run()
            break
        except KilledError:
            kills += 1
    assert kills >= 5
    assert (machine.outcome, machine.kept) == (whole.outcome, whole.kept)


def test_a_promoted_trial_is_not_promoted_once_more_while_it_runs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for _ in range(3):
        job = next(machine.search)
        assert job
        machine._train(job)
    found = [next(machine.search) for _ in range(3)]
    assert [job.asked.until_epoch for job in found if job] == [3, 1, 1]
    assert len({*found}) == 3, "the best of three, and two new ones"


def test_a_trial_whose_metrics_are_gone_ends_no_search(tmp_path: Path) -> None:
    whole = Machine(tmp_path, runs=9, keep_checkpoints=True).run()
    for trial in whole.search.trials:
        if trial.folder and trial.epochs == 3:
            RunPaths(trial.folder).metrics.write_bytes(b"")
    later = Machine(tmp_path, runs=9, keep_checkpoints=True).run()
    assert later.search.is_over


def test_without_rungs_all_paused_trials_run_to_their_ends(tmp_path: Path) -> None:
    Machine(tmp_path, runs=4, keep_checkpoints=True).run()
    later = Machine(tmp_path, runs=4, rungs=None).run()
    assert {done for _, done, _ in later.starts} <= {1, 3}
    assert {until for _, _, until in later.starts} == {None}
    assert {status for _, status, _ in later.outcome["runs"].values()} <= {COMPLETED, FAILED}


def test_checkpoints_of_hopeless_trials_are_removed_except_the_bests(tmp_path: Path) -> None:
    done = Machine(tmp_path, name="random", seed=1).run()
    begun = [name for name, *_ in done.starts]
    again = [start for place, start in enumerate(done.starts) if start[0] in begun[:place]]
    assert len(again) > 2
    assert all(epochs for _, epochs, _ in again), "a promoted one has kept its own"
    trials = {trial.folder.name: trial for trial in done.search.trials if trial.folder}
    completed = {name for name, trial in trials.items() if trial.status == COMPLETED}
    best = min(trials, key=lambda name: min(trials[name].costs.values()))
    assert completed
    assert done.kept == completed | {best}
    gone = {name for name, trial in trials.items() if trial.status == PRUNED} - {best}
    assert {read_result(RunPaths(tmp_path / name)).get("resumable") for name in gone} == {False}
    more = Machine(tmp_path, name="random", seed=1, runs=27).run()
    assert {done for name, done, _ in more.starts if name in gone} == {0}, "from the beginning"


def test_a_run_at_work_keeps_its_checkpoints(tmp_path: Path) -> None:
    done = Machine(tmp_path, keep_checkpoints=True).run()
    pruned = [trial for trial in done.search.trials if trial.status == PRUNED]
    worst: Trial = max(pruned, key=lambda trial: trial.costs[trial.epochs])
    assert worst.folder is not None
    with at_work(RunPaths(worst.folder)):
        Machine(tmp_path).run()
        assert (worst.folder / "checkpoints").exists()
        assert done.kept < {f"run{number}" for number in range(12)}
    Machine(tmp_path).run()
    assert not (worst.folder / "checkpoints").exists()
