"""Runs that GPUs fail before their first step, in a pool whose workers are not processes."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from expt.errors import DeviceFull, DeviceLost, OutOfMemory, RunFailed
from expt.launch.job import Job
from expt.launch.packing import LEFT_ALONE_S
from expt.runs.attempt import Attempt
from expt.runs.result import COMPLETED, FAILED, create_result, read_result
from tests.launch.test_pool import FakeWorkers, World, world

__all__ = ["world"]

Fault = Callable[[str], RunFailed | None]
"""What a run fails by on a GPU of this name."""


def dead(*gpus: str, kind: type[RunFailed] = DeviceLost) -> Fault:
    def fault(gpu: str) -> RunFailed | None:
        told = {gpu: f"GPU {gpu} (uuid): it is dead"}
        return kind("rank 0 of 1: dead\nlog: 0.log", gpus=told) if gpu in gpus else None

    return fault


def put(world: World, fault: Fault, *names: str) -> None:
    """Let the runs of these names, or all, fail as `fault` says by the GPUs that they get."""
    start = world.start

    def start_there(attempt: Attempt) -> FakeWorkers:
        workers: FakeWorkers = start(attempt)
        errors = [error for gpu in attempt.devices if (error := fault(gpu))]
        if errors and (not names or attempt.paths.folder.name in names):
            told = dict(pair for error in errors for pair in error.gpus.items())
            workers.error = type(errors[0])(str(errors[0]), gpus=told)
            workers.looks = 1
        return workers

    world.start = start_there  # type: ignore[method-assign]


def jobs(world: World, names: Collection[str], **config: Any) -> list[Job]:
    return [world.job(name, **({"gpus": 1} | config)) for name in names]


def places(world: World) -> list[tuple[str, ...]]:
    return [tuple(event[1:]) for event in world.told.events if event[0] == "starting"]


@pytest.mark.parametrize("kind", [DeviceLost, DeviceFull, RunFailed])
def test_a_run_that_a_gpu_fails_is_started_on_another(world: World, kind: type[RunFailed]) -> None:
    put(world, dead("0", kind=kind))
    found = jobs(world, "ab")
    world.run(*found, gpus=3, fail_fast=True)
    assert [(job.status, job.retries) for job in found] == [(COMPLETED, 0)] * 2
    assert found[0].devices != ("0",)
    assert read_result(found[0].paths)["attempts"] == 1
    assert found[0].paths.attempts() == [0]
    assert ("moved", "a", "GPU 0 (uuid): it is dead") in world.told.events


def test_the_folder_of_a_run_that_waits_for_another_gpu_is_as_before(world: World) -> None:
    put(world, dead("0"), "b")
    world.plans["a"] = [{"looks": 9}]
    (b,) = jobs(world, "b")
    seen = list[bool]()
    world.told.tick = lambda active: seen.append(b.paths.is_new())  # type: ignore[method-assign]
    world.run(world.job("a", gpus=(1,)), b, gpus=2)
    assert (b.status, b.devices) == (COMPLETED, ("1",))
    assert places(world)[1:] == [("b", "0"), ("b", "1")]
    assert seen[:6] == [True] * 6


def test_a_gpu_is_left_alone_for_minutes_and_for_good_after_two_runs(world: World) -> None:
    put(world, dead("1"))
    world.plans |= {name: [{"looks": 3}] for name in "abcdefghijkl"}

    def tick(active: Sequence[Job]) -> None:
        world.clock.now += LEFT_ALONE_S / 4

    world.told.tick = tick  # type: ignore[method-assign]
    pool = world.pool(gpus=2)
    found = jobs(world, "abcdefghijkl")
    pool.run(iter(found))
    assert {job.status for job in found} == {COMPLETED}
    on_it = [workers.attempt for workers in world.started if workers.attempt.devices == ("1",)]
    assert len(on_it) == 2
    first, second = (attempt.request.waited_since for attempt in on_it)
    assert second >= first + LEFT_ALONE_S


def test_only_where_no_gpu_is_left_runs_fail(world: World) -> None:
    put(world, dead("0", "1", "2"))
    pool = world.pool(gpus=3)
    found = jobs(world, "abcdef")
    pool.run(iter(found))
    assert [type(job.error) for job in found] == [DeviceLost] * 6
    assert all("(uuid): it is dead" in str(job.error) for job in found)
    assert len(world.started) <= 2 * 3  # each GPU by two runs
    failed = next(job for job in found if job.paths.result.exists())
    assert read_result(failed.paths)["error_kind"] == "DeviceLost"


def test_a_run_that_needs_more_gpus_than_are_left_is_told_so(world: World) -> None:
    put(world, dead("3"))
    (large,) = jobs(world, "a", gpus=4)
    world.run(large, world.job("b", gpus=1), gpus=4)
    assert isinstance(large.error, DeviceLost)
    assert "3 have not failed; use gpus=[0,1]\nGPU 3 (uuid)" in str(large.error)


def test_a_run_on_named_gpus_gets_no_others(world: World) -> None:
    put(world, dead("1"))
    (job,) = jobs(world, "a", gpus=(1,))
    world.run(job, gpus=2)
    assert isinstance(job.error, DeviceLost)
    assert "use gpus=[0]\n" in str(job.error)
    assert places(world) == [("a", "1")]


@pytest.mark.parametrize("kind", [DeviceLost, DeviceFull])
@pytest.mark.parametrize(("gpus", "instead"), [(4, "0,1"), ((2, 3), "0,3"), ((0, 1, 2), "0,1,3")])
def test_other_gpus_are_named(world: World, kind: type[RunFailed], gpus: Any, instead: str) -> None:
    put(world, dead("2", kind=kind))
    (job,) = jobs(world, "a", gpus=gpus)
    world.run(job, gpus=4)
    assert type(job.error) is DeviceLost
    assert f"use gpus=[{instead}]\nGPU 2 (uuid): it is dead" in str(job.error)


def test_what_fails_on_two_gpus_is_the_runs_own_fault(world: World) -> None:
    """As a label out of range: both GPUs go on."""
    put(world, dead(*"0123", kind=RunFailed), "a", "b")
    pool = world.pool(gpus=4)
    found = jobs(world, "abcdef")
    pool.run(iter(found))
    assert [job.status for job in found] == [FAILED] * 2 + [COMPLETED] * 4
    assert "rank 0 of 1: dead" in str(found[0].error)
    assert [place[0] for place in places(world)].count("a") == 2
    assert {job.devices for job in found[2:]} <= {(gpu,) for gpu in "0123"}


def test_memory_that_others_hold_everywhere_fails_a_run_by_that(world: World) -> None:
    put(world, dead("0", "1", kind=DeviceFull), "a")
    (a, b) = found = jobs(world, "ab")
    world.run(*found, gpus=2)
    assert (type(a.error), b.status) == (DeviceLost, COMPLETED)
    assert sorted(place for place in places(world) if place[0] == "a") == [("a", "0"), ("a", "1")]


def test_a_gpu_on_which_another_run_trains_is_not_to_blame(world: World) -> None:
    put(world, dead("0", kind=DeviceFull), "b")
    a, b = jobs(world, "ab")
    world.plans["a"] = [{"looks": 9, "on_poll": lambda: a.paths.metrics.write_text("{}\n")}]
    pool = world.pool(gpus=1, runs_per_gpu=2)
    pool.run(iter([a, b]))
    assert type(b.error) is OutOfMemory
    assert "GPUs needed" not in str(b.error)


def resumed(world: World, name: str, **config: Any) -> Job:
    """Return a run that an earlier command has begun, and which failed."""
    job = world.job(name, may_have_run=True, gpus=1, **config)
    identity = job.asked.identity.digest
    create_result(job.paths, may_exist=False, status=FAILED, identity=identity, attempts=1)
    job.paths.checkpoints.mkdir()
    job.paths.logs(0).mkdir(parents=True)
    return job


@pytest.mark.parametrize("shared", [False, True])
def test_a_resumed_run_is_moved_as_a_new_one_is(world: World, shared: bool) -> None:
    """The checkpoints of an earlier command say nothing of today's GPU."""
    put(world, dead("0", kind=DeviceFull if shared else DeviceLost))
    found = [resumed(world, name) for name in "ab"]
    world.run(*found, gpus=3, runs_per_gpu=2 if shared else 1)
    assert {job.status for job in found} == {COMPLETED}
    assert ("moved", "a", "GPU 0 (uuid): it is dead") in world.told.events


def test_a_restart_leaves_the_gpu_alone_that_has_failed_the_run(world: World) -> None:
    put(world, dead("0"))
    a, b, c = found = [*jobs(world, "ab", max_restarts=2), *jobs(world, "c")]
    for name in "ab":
        world.plans[name] = [{}, {"error": RunFailed("x")}, {"error": RunFailed("y")}, {}]
    world.run(a, gpus=3)
    world.run(b, c, gpus=3, max_concurrent=1)
    assert [(job.status, job.retries) for job in found] == [(COMPLETED, 2)] * 2 + [(COMPLETED, 0)]
    assert [place for place in places(world) if place[1] == "0"] == [("a", "0"), ("b", "0")]


def test_no_trial_waits_for_gpus_that_are_lost(world: World) -> None:
    """Two fail at once; one that was moved meanwhile is not left in the queue."""
    put(world, dead(*"0123"))
    found = jobs(world, "abc")
    for trial in found:
        trial.is_trial = True
    world.run(*found, gpus=4)
    assert [type(trial.error) for trial in found] == [DeviceLost] * 3


def test_fail_fast_starts_nothing_where_no_gpu_is_left(world: World) -> None:
    put(world, dead("0"))
    found = jobs(world, "abc")
    world.run(*found, gpus=1, fail_fast=True)
    assert [job.status for job in found].count(FAILED) == 1


def test_a_search_takes_no_further_trial_where_no_gpu_is_left(world: World) -> None:
    put(world, dead("0"))
    pool, taken = world.pool(gpus=1), list[Job]()

    def trials() -> Any:
        for name in "abcdef":
            (trial,) = jobs(world, name)
            trial.is_trial = True
            taken.append(trial)
            yield trial
            while trial.status not in (FAILED, COMPLETED):
                yield None

    pool.run(trials())
    assert pool.is_closed
    assert [job.status for job in taken] == [FAILED]
