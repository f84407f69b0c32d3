"""Many runs on one machine, with simulated workers and a clock that the test moves."""

import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt import signals
from expt.errors import (
    ConfigError,
    Diverged,
    ExptError,
    Interrupted,
    Killed,
    OutOfMemory,
    RunFailed,
    WorkersLost,
)
from expt.launch import pool
from expt.launch.job import Job, Observer
from expt.launch.packing import GpuLocks
from expt.launch.pool import LOCKED_ELSEWHERE_S, Pool, PoolOptions
from expt.machine import Machine
from expt.runs import paths, result
from expt.runs.attempt import Attempt
from expt.runs.paths import FolderLock, is_held
from expt.runs.request import RunRequest
from expt.runs.result import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    PRUNED,
    create_result,
    read_result,
    update_result,
)
from tests.data.test_build import folder_config
from tests.facade import Patch, request


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ready() -> int:
    """What can be read for ever, so that the pool never sleeps."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@dataclasses.dataclass
class FakeWorkers:
    """Workers of one attempt, which do what they are told when the pool looks at them."""

    attempt: Attempt
    looks: int = 1
    """The look at which they have ended."""
    error: ExptError | None = None
    on_poll: Callable[[], None] = lambda: None
    obeys: bool = True
    """Whether they end when asked to stop."""
    asked: int = 0
    stopped: bool = False

    def poll(self) -> bool:
        self.on_poll()
        self.looks -= 1
        if self.asked and self.obeys:
            raise Interrupted("interrupted, and saved")
        if self.looks > 0:
            return False
        if self.error:
            raise self.error
        return True

    closed: bool = False
    ended: int = dataclasses.field(default_factory=ready)

    def ask_to_stop(self) -> None:
        self.asked += 1

    def close(self) -> None:
        self.closed = True
        os.close(self.ended)

    def stop(self) -> None:
        self.stopped = True

    @property
    def sentinels(self) -> Sequence[int]:
        return [self.ended]


class Told(Observer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        self.events.append(("waiting", job.name, *devices))

    def job_starting(self, job: Job) -> None:
        self.events.append(("starting", job.name, *job.devices))

    def job_retrying(self, job: Job, error: ExptError) -> None:
        self.events.append(("retrying", job.name, str(error)))

    def job_moved(self, job: Job, why: str) -> None:
        self.events.append(("moved", job.name, why))

    def job_locked_out(self, job: Job) -> None:
        self.events.append(("locked out", job.name))

    def job_ended(self, job: Job) -> None:
        self.events.append(("ended", job.name, job.status))


class World:
    """A pool, and all that it is given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.told = folder, Clock(), Told()
        self.started: list[FakeWorkers] = []
        self.plans: dict[str, list[dict[str, Any]]] = {}
        """What the attempts of a run are like, by its name."""

    def start(self, attempt: Attempt) -> Any:
        attempt.begin()
        name = attempt.paths.folder.name
        attempt.paths.stdout(attempt.number, 0).parent.mkdir(parents=True)
        plan = self.plans.get(name) or [{}]
        workers = FakeWorkers(attempt, **(plan.pop(0) if len(plan) > 1 else plan[0]))
        self.started.append(workers)
        return workers

    def job(self, name: str, **config: Any) -> Job:
        asked = request(self.folder / name, **config)
        return Job(asked.paths, asked)

    def pool(
        self, *, gpus: int = 0, cpus: int = 4, waits_for_folders: bool = False, **options: Any
    ) -> Pool:
        machine = Machine(gpus=tuple(map(str, range(gpus))), cpus=cpus)
        how: Any = {"start": self.start, "clock": self.clock}
        return Pool(
            machine, PoolOptions(**options), self.told, waits_for_folders=waits_for_folders, **how
        )

    def run(self, *jobs: Job, **machine: Any) -> None:
        self.pool(**machine).run(iter(jobs))

    @property
    def names(self) -> list[str]:
        """The runs in the order of their starts."""
        return [workers.attempt.paths.folder.name for workers in self.started]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: Patch) -> World:
    monkeypatch.setenv("EXPT_LOCKS", str(tmp_path / "locks"))
    return World(tmp_path / "sweep")


def test_the_next_run_starts_at_once_where_one_has_ended(world: World, monkeypatch: Patch) -> None:
    happened = list[str]()
    monkeypatch.setattr(pool, "wait", lambda *_: happened.append("wait"))
    monkeypatch.setattr(
        world.told, "job_starting", lambda job: happened.append(f"{job.name} starts")
    )
    monkeypatch.setattr(world.told, "job_ended", lambda job: happened.append(f"{job.name} ends"))
    for name in "ab":
        world.plans[name] = [{"looks": 6}]
    world.run(world.job("a"), world.job("b"), cpus=1)
    ends = happened.index("a ends")
    assert happened[ends - 1 : ends + 2] == ["wait", "a ends", "b starts"]


def test_in_a_sweep_time_counts_from_a_runs_turn(world: World) -> None:
    alone, first, second = world.job("c", typed_at=500.0), world.job("a"), world.job("b")
    world.plans["a"] = [{"on_poll": lambda: setattr(world.clock, "now", 1060.0)}]
    world.run(alone, first, second, cpus=1)
    expected = [500.0, 1000.0, 1060.0]
    assert [workers.attempt.request.waited_since for workers in world.started] == expected


def test_next_run_is_prepared_while_another_trains(world: World, monkeypatch: Patch) -> None:
    told = list[str]()
    monkeypatch.setattr(Told, "job_next", lambda _, job: told.append(job.name))
    world.plans = {"a": [{"looks": 3}], "b": [{"looks": 3}]}
    world.run(*(world.job(name, world_size=3) for name in "abc"), cpus=3)
    assert (world.names, told) == (["a", "b", "c"], ["b", "c", "c"])


@pytest.mark.parametrize(
    ("there", "options", "text"),
    [
        ("val", {"eval_split": "test"}, "^eval_split=test: "),
        ("val", {"objective": "loss/test"}, "^objective=loss/test: "),
        (
            "test",
            {"eval_split": "val"},
            r"^dataset\.val_fraction=0.*: leaves nothing to evaluate on",
        ),
    ],
)
def test_missing_part_first(there: str, options: dict[str, Any], text: str, world: World) -> None:
    root = world.folder / "images"
    for part in ("train", there):
        (root / part / "cat").mkdir(parents=True)
        (root / part / "cat/bad.png").write_text("no image")
    job = world.job("a", dataset=folder_config(root, val_fraction=0.0), **options)
    world.run(job)
    assert (isinstance(job.error, ConfigError), world.started) == (True, [])
    assert re.search(text, str(job.error))


def test_runs_wait_for_gpus_and_start_when_they_are_free(world: World) -> None:
    world.plans = {"a": [{"looks": 5}]}
    world.run(world.job("a", gpus=2), world.job("b", gpus=1), world.job("c", gpus=2), gpus=2)
    assert world.told.events == [
        ("starting", "a", "0", "1"),
        ("ended", "a", COMPLETED),
        ("starting", "c", "0", "1"),  # larger ones first
        ("ended", "c", COMPLETED),
        ("starting", "b", "0"),
        ("ended", "b", COMPLETED),
    ]


def test_cores_are_shared_out_by_workers_and_threads(world: World) -> None:
    world.plans = {"a": [{"looks": 4}]}
    world.run(world.job("a", world_size=2, threads=2), world.job("b"), cpus=4)
    assert world.told.events[:2] == [("starting", "a"), ("ended", "a", COMPLETED)]
    assert world.names == ["a", "b"]


def test_starts_are_staggered(world: World) -> None:
    world.plans = {
        "a": [{"looks": 4, "on_poll": lambda: setattr(world.clock, "now", world.clock.now + 1)}]
    }
    jobs = [world.job("a"), world.job("b")]
    world.run(*jobs, stagger_s=2.0)
    assert jobs[1].started_at >= jobs[0].started_at + 2.0


def test_a_gpu_in_other_hands_is_tried_again_after_a_while(world: World) -> None:
    others = GpuLocks()
    assert others.acquire(["0"]) == []
    job, times = world.job("a", gpus=1), list[float]()

    def tick(active: Sequence[Job]) -> None:
        times.append(world.clock.now)
        world.clock.now += LOCKED_ELSEWHERE_S / 4
        if len(times) == 6:
            others.release(["0"])

    world.told.tick = tick  # type: ignore[method-assign]
    world.run(job, gpus=1)
    assert world.told.events[:2] == [("waiting", "a", "0"), ("starting", "a", "0")]  # told once
    freed_at = times[5] + LOCKED_ELSEWHERE_S / 4
    assert freed_at <= job.started_at <= freed_at + 1.25 * LOCKED_ELSEWHERE_S


def test_who_holds_gpus_is_said_once_for_all_runs_that_they_keep_waiting(world: World) -> None:
    others = GpuLocks()
    assert others.acquire(["1", "2"]) == []
    jobs = [world.job(name, gpus=1) for name in "abcd"]
    world.plans = {name: [{"looks": 3}] for name in "abcd"}

    def tick(active: Sequence[Job]) -> None:
        world.clock.now += LOCKED_ELSEWHERE_S / 2

    world.told.tick = tick  # type: ignore[method-assign]
    world.run(*jobs, gpus=3)
    assert [event[0] for event in world.told.events].count("waiting") == 1


def test_gpus_are_given_back_while_others_are_in_use(world: World) -> None:
    missed = list[list[str]]()
    world.plans = {
        "b": [{"looks": 4, "on_poll": lambda: missed.append(GpuLocks().acquire(["0", "1"]))}]
    }
    world.run(world.job("a", gpus=(0,)), world.job("b", gpus=(1,)), gpus=2)
    assert missed == [["1"]] * 4


def test_a_gpu_that_another_run_shares_stays_locked(world: World) -> None:
    missed = list[list[str]]()
    world.plans = {
        "a": [{"looks": 3}],
        "b": [{"looks": 6, "on_poll": lambda: missed.append(GpuLocks().acquire(["0"]))}],
    }
    world.run(world.job("a", gpus=1), world.job("b", gpus=1), gpus=1, runs_per_gpu=2)
    assert world.told.events[2] == ("ended", "a", COMPLETED)
    assert missed == [["0"]] * 6


def test_the_time_of_a_run_that_starts_again_counts_once(world: World, monkeypatch: Patch) -> None:
    later = SimpleNamespace(time=lambda: time.time() + 100)  # as if each attempt had taken that
    monkeypatch.setattr(result, "time", later)
    asked = request(world.folder / "a", typed_at=world.clock.now - 60, max_restarts=1)
    world.plans["a"] = [{"error": RunFailed("first")}, {}]
    world.run(Job(asked.paths, asked))
    expected = [world.clock.now - 60, world.clock.now]
    assert [workers.attempt.request.waited_since for workers in world.started] == expected
    assert read_result(asked.paths)["device_s_before"] >= 100


@pytest.mark.parametrize(
    ("error", "starts"),
    [
        (RunFailed("again"), 3),
        (RunFailed("rank 0 raised\n\nx\nConnectionError: a\n\nlog: 1"), 3),
        (RunFailed("rank 0 raised\n\nx\nKeyError: a\n\nlog: 1"), 2),
        (ConfigError("bad"), 1),
        (Diverged("nan"), 1),
        (Interrupted("asked"), 1),
    ],
    ids=str,
)
def test_retries_end_and_repeats_are_not_tried(world: World, error: ExptError, starts: int) -> None:
    world.plans["a"] = [{"error": error}]
    world.run(world.job("a"), retries=2)
    assert len(world.started) == starts


def test_fail_fast_stops_the_others(world: World) -> None:
    jobs = [world.job(name) for name in "abc"]
    world.plans = {"a": [{"looks": 3, "error": RunFailed("bad")}], "b": [{"looks": 9}]}
    world.run(*jobs, cpus=2, fail_fast=True)
    assert [job.status for job in jobs] == [FAILED, INTERRUPTED, "queued"]
    assert [workers.stopped for workers in world.started] == [False, True]
    assert read_result(jobs[1].paths)["error"] == "another run failed, and fail_fast is on"


def test_a_run_is_its_commands_own_until_all_know_what_became_of_it(world: World) -> None:
    job, held = world.job("a", max_restarts=1), list[bool]()
    for told in ("job_starting", "job_retrying", "job_ended"):
        setattr(world.told, told, lambda *_: held.append(is_held(job.paths)))
    world.plans["a"] = [
        {"error": RunFailed("first"), "on_poll": lambda: held.append(is_held(job.paths))},
        {},
    ]
    world.run(job)
    assert held == [True] * 5
    assert not is_held(job.paths)
    assert all(workers.closed and workers.attempt.lock for workers in world.started)


def test_what_another_command_has_completed_meanwhile_is_done(world: World) -> None:
    asked = request(world.folder / "a", may_have_run=True)
    create_result(asked.paths, status=COMPLETED)
    job = Job(asked.paths, asked)
    world.run(job)
    assert (job.status, world.started) == (COMPLETED, [])


def pausing(world: World, name: str, until_epoch: int | None) -> Job:
    """A job whose workers pause after that epoch, and complete if there is none."""
    job = world.job(name)
    job.continue_until(until_epoch)

    def epochs_pass() -> None:
        asked = world.started[-1].attempt.request.until_epoch
        update_result(
            job.paths, status=PRUNED if asked else COMPLETED, epoch_s=[0.1] * (asked or 9)
        )

    world.plans[name] = [{"on_poll": epochs_pass}]
    return job


def test_a_job_that_has_paused_is_queued_again_and_goes_on_in_its_folder(world: World) -> None:
    job, other = pausing(world, "a", 1), world.job("b")
    other.status = COMPLETED  # what is yielded where there is nothing to do

    def source() -> Iterator[Job]:
        yield job
        while job.status != COMPLETED:
            pruned = job.status == PRUNED
            if pruned:
                job.continue_until(3 if len(world.started) < 2 else None)
            yield job if pruned else other

    world.pool(cpus=1).run(source())
    ended = [event[2] for event in world.told.events if event[0] == "ended"]
    assert ended == [PRUNED, PRUNED, COMPLETED]
    attempts = [workers.attempt for workers in world.started]
    expected = [(0, 1), (1, 3), (2, None)]
    assert [(each.number, each.request.until_epoch) for each in attempts] == expected
    assert {each.paths.folder for each in attempts} == {job.paths.folder}
    assert (job.error, read_result(job.paths).get("until_epoch")) == (None, None)


def test_what_has_paused_there_already_is_not_started(world: World) -> None:
    job = pausing(world, "a", 3)
    create_result(job.paths, status=PRUNED, epoch_s=[0.1] * 3)
    world.run(job)
    assert (job.status, world.started) == (PRUNED, [])
    later = pausing(world, "a", 4)
    world.run(later)
    assert (later.status, len(world.started)) == (PRUNED, 1)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("until_epoch", "status"), [(1, PRUNED), (None, COMPLETED)])
def test_ended_run_is_not_interrupted(world: World, until_epoch: int | None, status: str) -> None:
    job = pausing(world, "a", until_epoch)
    ends = world.plans["a"][0]["on_poll"]

    def at_the_end() -> None:
        ends()
        if world.started[0].looks == 1:
            press(signal.SIGTERM)

    world.plans["a"] = [{"looks": 3, "on_poll": at_the_end}]
    world.run(job)
    assert job.status == status


def test_a_run_that_lost_its_workers_before_it_began_starts_again(world: World) -> None:
    job, begun = world.job("a"), world.job("b")
    for one in (job, begun):
        world.plans[one.name] = [{"error": WorkersLost("killed")}, {}]
    begun.paths.folder.mkdir(parents=True)
    world.plans["b"][0]["on_poll"] = begun.paths.metrics.touch
    world.run(job, begun)
    assert [(one.status, one.retries) for one in (job, begun)] == [(COMPLETED, 1), (FAILED, 0)]


@pytest.mark.parametrize("error", [Killed("by SIGKILL"), WorkersLost("all"), OutOfMemory("x")])
def test_killed_trial_is_tried_again_before_it_is_judged(world: World, error: RunFailed) -> None:
    job, trial, again = world.job("a"), world.job("b"), world.job("c")
    for one in (job, trial, again):
        world.plans[one.name] = [{"error": error, "on_poll": one.paths.metrics.touch}, {}]
        one.paths.folder.mkdir(parents=True)
        one.is_trial = one is not job
    world.plans["c"][1] = {"error": error}
    world.run(job, trial, again)
    ends = [(one.status, one.retries) for one in (job, trial, again)]
    assert ends == [(FAILED, 0), (COMPLETED, 1), (FAILED, 1)]


def test_an_error_of_the_command_itself_is_nobodys_interruption(world: World) -> None:
    job = world.job("a")
    world.plans["a"] = [{"looks": 9}]
    world.told.tick = lambda active: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        world.run(job)
    assert (
        read_result(job.paths)["error"]
        == "the command itself failed: ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize("error", [RunFailed("no process to fork from"), OSError(28, "full", "x")])
def test_record_of_a_run_whose_workers_do_not_start_is_at_its_end(
    world: World, error: Exception
) -> None:
    job, start = world.job("a"), world.start

    def start_in_vain(attempt: Attempt) -> Any:
        start(attempt)
        raise error

    world.start = start_in_vain  # type: ignore[method-assign]
    world.run(job)
    assert (job.status, read_result(job.paths)["status"]) == (FAILED, FAILED)
    assert read_result(job.paths)["error"] == str(job.error)


def test_a_folder_that_is_renamed_before_its_workers_start_is_named(
    world: World, monkeypatch: Patch
) -> None:
    job = world.job("a")
    rename = job.paths.folder.rename
    monkeypatch.setattr(world.told, "job_starting", lambda _: rename(world.folder / "renamed"))
    monkeypatch.setattr(world, "start", lambda attempt: attempt.paths.stdout(0, 0).parent.mkdir())
    world.run(job)
    assert isinstance(job.error, RunFailed)
    assert "a was renamed or removed" in str(job.error)


def test_a_folder_is_free_where_an_attempt_cannot_be_made(world: World, monkeypatch: Patch) -> None:
    def fail(_: RunRequest) -> int:
        raise OSError(5, "Input/output error")

    job = world.job("a")
    monkeypatch.setattr(RunRequest, "next_attempt", fail)
    world.run(job)
    assert job.status == FAILED
    FolderLock(job.paths, 0.0).release()


def test_an_earlier_record_stays_where_an_attempt_is_refused(world: World) -> None:
    job = world.job("a")
    create_result(job.paths, status="running", started=time.time() - 1000)

    def refuse(attempt: Attempt) -> Any:
        raise ConfigError("it holds a run already")

    world.start = refuse  # type: ignore[method-assign]
    world.run(job)
    assert (job.status, read_result(job.paths)["status"]) == (FAILED, "running")


def press(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def heard(monkeypatch: Patch) -> Iterator[None]:
    """Signals are Python's own again afterwards."""
    before = {number: signal.getsignal(number) for number in signals.ASKING}
    monkeypatch.setattr(signals, "_in_command", True)
    monkeypatch.setattr(signals, "_interrupted", False)  # by a command in this process before
    yield
    assert {number: signal.getsignal(number) for number in signals.ASKING} == before
    signals._received.clear()


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("sent", "waits_s", "name"),
    [
        ([signal.SIGINT], signals.IMPATIENT_S, "Ctrl-C"),
        ([signal.SIGINT] * 2, 0, "Ctrl-C"),
        ([signal.SIGTERM], signals.GRACE_S, "SIGTERM"),
        ([signal.SIGHUP] * 2, 30, "SIGHUP"),
        ([signal.SIGUSR1] * 2, 0, "SIGUSR1"),
    ],
)
def test_who_does_not_end_in_time_is_ended_and_at_a_second_signal_at_once(
    world: World, sent: list[signal.Signals], waits_s: float, name: str
) -> None:
    left = [*sent]

    def pass_time() -> None:
        world.clock.now += 1
        if left:
            press(left.pop())

    job = world.job("a")
    world.plans["a"] = [{"looks": 99, "obeys": False, "on_poll": pass_time}]
    with pytest.raises(KeyboardInterrupt):
        world.run(job)
    assert (job.status, world.started[0].stopped) == (INTERRUPTED, True)
    assert waits_s <= job.ended_at - 1001.0 <= waits_s + 2
    assert read_result(job.paths)["error"] == f"interrupted ({name})"


def test_run_in_a_used_folder_waits_and_holds_up_the_search(world: World) -> None:
    """As workers of a command that was killed are, as long as they take to be gone."""
    a, b = world.job("a"), world.job("b")
    other, room = paths.FolderLock(a.paths), list[bool]()

    def look() -> None:
        room.append(asked.has_room())
        world.clock.now += 0.75

    orders: list[Callable[[], object]] = [lambda: None, *[look] * 4, other.release]
    world.told.tick = lambda _: orders.pop(0)() if orders else None  # type: ignore[method-assign, assignment]
    asked = world.pool(waits_for_folders=True)
    asked.run(iter([a, b]))
    assert (a.status, b.status) == (COMPLETED, COMPLETED)
    assert world.names == ["b", "a"]
    assert room == [False] * 4
    expected = [("locked out", "a"), ("starting", "a"), ("ended", "a", COMPLETED)]
    assert [event for event in world.told.events if event[1] == "a"] == expected


def test_a_source_may_have_nothing_now_and_is_asked_when_there_is_room(world: World) -> None:
    """It decides by what came of those before: at most as many wait or run as there are cores."""
    left, rooms = [world.job(name, world_size=2) for name in "abc"], list[int]()
    asked = world.pool()

    def source() -> Iterator[Job | None]:
        while left:
            if asked.has_room():
                rooms.append(sum(job.status == "running" for job in started))
                started.append(left.pop(0))
                yield started[-1]
            else:
                yield None

    started = list[Job]()
    world.plans = {"a": [{"looks": 3}], "b": [{"looks": 5}], "c": [{}]}
    asked.run(source())
    assert world.names == ["a", "b", "c"]
    assert rooms == [0, 1, 1], "the third is asked for when the first has ended"
    assert not world.pool(gpus=1, max_concurrent=0).has_room()


def test_to_finish_lets_what_runs_save_and_is_no_interruption(world: World) -> None:
    world.plans = {"a": [{"looks": 99}]}
    pool, job = world.pool(), world.job("a")

    def source() -> Iterator[Job | None]:
        yield job
        pool.finish("the budget is used up")

    pool.run(source())
    assert world.told.events[-1] == ("ended", "a", INTERRUPTED)
    assert str(job.error) == "the budget is used up"
    assert not pool.has_room()
