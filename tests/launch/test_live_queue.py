"""A queue of cluster jobs that is told to do more, less or later; the cluster is none."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.errors import Interrupted
from expt.launch import submitit_jobs
from expt.launch.job import DROPPED, Job, Observer
from expt.launch.live_queue import LiveQueue
from expt.launch.submitit_jobs import ClusterJob
from expt.machine import Machine
from expt.runs import spending
from expt.runs.request import received
from expt.runs.result import (
    COMPLETED,
    INTERRUPTED,
    PAUSED,
    RUNNING,
    create_result,
    read_result,
    update_result,
)
from expt.search.source import running_elsewhere_s
from tests.launch.test_submitit_jobs import jobs


class Submitted:
    """Runs for so many looks; if it is cancelled before, it saves, if it has begun."""

    job_id, num_tasks = "4711", 1

    def __init__(self, job: ClusterJob, looks: int, *, begins: bool) -> None:
        self._looks = looks
        self.paths = SimpleNamespace(stderr="queue.err", result_pickle=Path("4711_0_result.pkl"))
        self.run, self.cancelled = received(job.sent, Machine(cpus=8), typed_at=1.0).paths, 0
        if begins:
            create_result(self.run, may_exist=True, status=RUNNING)

    def done(self) -> bool:
        self._looks -= 1
        if self._looks < 0 and not self.cancelled:
            create_result(self.run, may_exist=True, status=COMPLETED)
        return self._looks < 0

    def cancel(self, check: bool = True) -> None:
        self.cancelled, self._looks = self.cancelled + 1, 0
        if self.run.result.exists():
            update_result(self.run, status=INTERRUPTED)

    def task(self, _: int) -> Submitted:
        return self

    def exception(self) -> Exception | None:
        assert not self.cancelled, "submitit waits 15 s for what it says"
        return None


class Killed(Submitted):
    """Has no time to save when it is cancelled, at work for 100 s then; the cluster says later that
    it has ended.
    """

    def __init__(self, job: ClusterJob, looks: int, *, begins: bool) -> None:
        super().__init__(job, looks, begins=begins)
        update_result(self.run, started=time.time() - 100, world_size=1)

    def cancel(self, check: bool = True) -> None:
        self.cancelled, self._looks = self.cancelled + 1, 3


class Silent(Submitted):
    """Ends without a word, or one that has not come yet from another node."""

    def done(self) -> bool:
        self._looks -= 1
        return self._looks < 0


class Executor:
    def __init__(self, *plans: tuple[int, bool], kind: type[Submitted] = Submitted) -> None:
        self.plans, self.submitted, self._kind = list(plans), list[Submitted](), kind

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        yield

    def submit(self, job: ClusterJob) -> Submitted:
        looks, begins = self.plans.pop(0)
        self.submitted.append(self._kind(job, looks, begins=begins))
        return self.submitted[-1]


class Orders(Observer):
    """At each look what is to be done then."""

    def __init__(self, *orders: Callable[[LiveQueue], object]) -> None:
        self._orders, self.events = list(orders), list[tuple[str, str]]()
        self.queue: LiveQueue | None = None

    def tick(self, active: Sequence[Job]) -> None:
        if self._orders:
            assert self.queue is not None
            self._orders.pop(0)(self.queue)

    def job_held(self, job: Job) -> None:
        self.events.append(("held", job.name))

    def job_dropped(self, job: Job) -> None:
        self.events.append(("dropped", job.name))

    def job_ended(self, job: Job) -> None:
        self.events.append((job.status, job.name))


LONG, WAITS = (50, True), (50, False)


def run(executor: Executor, orders: Orders, *some: Job) -> None:
    orders.queue = LiveQueue(executor, orders)
    orders.queue.run(iter(some))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitit_jobs, "POLL_S", 0.0)


def wait(_: LiveQueue) -> None:
    """Look on."""


@pytest.mark.parametrize("plan", [LONG, WAITS], ids=["it runs", "it waits in the queue"])
def test_a_job_is_cancelled_to_pause_and_submitted_again_to_go_on(
    tmp_path: Path, plan: tuple[int, bool]
) -> None:
    (job,) = jobs(tmp_path, 1)
    seen = list[Any]()
    orders = Orders(
        lambda queue: queue.pause([job]),
        *[wait] * 3,
        lambda queue: seen.extend([queue.held, read_result(job.paths).get("status"), queue.rests]),
        lambda queue: queue.let_go_on([job]),
    )
    executor = Executor(plan, (2, True))
    run(executor, orders, job)
    assert seen == [[job], PAUSED if plan is LONG else None, True]
    assert (job.status, [each.cancelled for each in executor.submitted]) == (COMPLETED, [1, 0])
    assert orders.events == [("held", "0"), (COMPLETED, "0")]


def test_one_that_is_let_go_on_before_it_has_ended_is_submitted_once_it_has_whatever_holds_others(
    tmp_path: Path,
) -> None:
    (job,) = jobs(tmp_path, 1)
    executor = Executor(LONG, (1, True))

    def at_once(queue: LiveQueue) -> None:
        queue.is_paused, queue.is_held = True, lambda _: True
        queue.pause([job])
        queue.let_go_on([job])

    run(executor, Orders(at_once), job)
    assert (job.status, len(executor.submitted)) == (COMPLETED, 2)


def test_a_dropped_job_is_no_failure_whether_it_runs_waits_or_has_paused(tmp_path: Path) -> None:
    runs, waits, paused = some = jobs(tmp_path, 3)
    orders = Orders(
        lambda queue: queue.pause([paused]), *[wait] * 3, lambda queue: queue.drop(some)
    )
    executor = Executor(LONG, WAITS, LONG)
    run(executor, orders, *some)
    assert [(job.status, str(job.error)) for job in some] == [(INTERRUPTED, DROPPED)] * 3
    assert isinstance(runs.error, Interrupted)
    assert read_result(runs.paths)["error"] == read_result(paused.paths)["error"] == DROPPED
    assert not waits.paths.result.exists()
    assert {*orders.events} == {
        ("held", "2"),
        ("dropped", "2"),
        (INTERRUPTED, "0"),
        (INTERRUPTED, "1"),
    }


def test_one_that_ends_before_it_is_cancelled_has_ended(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1)
    executor = Executor((0, True))

    def late(queue: LiveQueue) -> None:
        create_result(job.paths, may_exist=True, status=COMPLETED)
        queue._stopping[job] = True

    executor.plans = [(1, True)]
    run(executor, Orders(late), job)
    assert (job.status, len(executor.submitted)) == (COMPLETED, 1)


def test_a_further_job_is_submitted_and_while_all_is_paused_kept(tmp_path: Path) -> None:
    first, second, third = jobs(tmp_path, 3)

    def pause(queue: LiveQueue) -> None:
        queue.is_paused = True
        queue.add(third)

    def resume(queue: LiveQueue) -> None:
        assert queue.held == [third]
        queue.is_paused = False
        queue.let_go_on([third])

    executor = Executor((5, True), (5, True), (1, True))
    run(executor, Orders(lambda queue: queue.add(second), pause, *[wait] * 20, resume), first)
    assert [job.status for job in (first, second, third)] == [COMPLETED] * 3


def test_a_job_that_comes_is_dropped_or_held_where_an_order_has_said_so(tmp_path: Path) -> None:
    dropped, held, _ = some = jobs(tmp_path, 3)
    executor, seen = Executor((1, True), (1, True)), list[Job]()

    def resume(queue: LiveQueue) -> None:
        seen.extend(queue.held)
        queue.let_go_on([held])

    orders = Orders(*[wait] * 3, resume)
    queue = orders.queue = LiveQueue(executor, orders)
    queue.is_dropped, queue.is_held = (
        (lambda job: job is dropped),
        (lambda job: job is held or None),
    )
    queue.run(iter(some))
    assert [job.status for job in some] == [INTERRUPTED, COMPLETED, COMPLETED]
    assert (seen, len(executor.submitted), queue.jobs) == ([held], 2, some)
    assert orders.events[0] == ("dropped", "0")
    assert not dropped.paths.result.exists()


def test_one_that_is_let_go_on_after_the_end_was_decided_is_not_submitted(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1)
    executor = Executor(LONG)

    def order(queue: LiveQueue) -> None:
        queue.pause([job])
        queue.let_go_on([job])
        queue.finish("the budget is used up")

    run(executor, Orders(order), job)
    assert (len(executor.submitted), job.status) == (1, "queued")


def test_to_finish_cancels_what_runs_waits_or_is_held_and_is_no_interruption(
    tmp_path: Path,
) -> None:
    running, waiting, held = jobs(tmp_path, 3)
    executor = Executor(LONG, WAITS, WAITS)
    orders = Orders(
        lambda queue: queue.pause([held]), wait, lambda queue: queue.finish("the budget is used up")
    )
    run(executor, orders, running, waiting, held)
    assert [each.cancelled for each in executor.submitted] == [1, 1, 1]
    assert [str(job.error) for job in (running, waiting)] == ["the budget is used up"] * 2
    assert [job.status for job in (running, waiting, held)] == [INTERRUPTED, INTERRUPTED, "queued"]


@pytest.mark.parametrize(
    ("order", "status"),
    [
        (lambda queue, job: queue.pause([job]), PAUSED),
        (lambda queue, job: queue.drop([job]), INTERRUPTED),
        (lambda queue, _: queue.finish("the budget is used up"), INTERRUPTED),
        (lambda *_: signal.raise_signal(signal.SIGINT), INTERRUPTED),
    ],
    ids=["pause", "drop", "finish", "Ctrl-C"],
)
def test_one_that_is_killed_before_it_can_save_has_cost_what_it_had_when_it_was_cancelled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order: Callable[[LiveQueue, Job], object],
    status: str,
) -> None:
    (job,) = jobs(tmp_path, 1)
    monkeypatch.setattr(spending, "time", SimpleNamespace(time=lambda: time.time() + 1000))
    orders = Orders(lambda queue: order(queue, job), *[wait] * 5, lambda queue: queue.drop([job]))
    orders.job_held = lambda job: seen.append(read_result(job.paths))  # type: ignore[method-assign]
    seen = list[Any]()
    with contextlib.suppress(KeyboardInterrupt):
        run(Executor(LONG, kind=Killed), orders, job)
    record = seen[0] if seen else read_result(job.paths)
    assert record["status"] == status
    assert record["device_s"] == pytest.approx(100, abs=20)


def test_while_a_word_of_one_that_has_ended_is_waited_for_the_others_are_looked_after(
    tmp_path: Path,
) -> None:
    late, other = jobs(tmp_path, 2)
    held = list[Job]()

    def come(_: LiveQueue) -> None:
        create_result(late.paths, may_exist=True, status=COMPLETED)

    orders = Orders(
        *[wait] * 3,
        lambda queue: queue.pause([other]),
        wait,
        lambda queue: held.extend(queue.held),
        come,
    )
    executor = Executor((0, True), LONG, kind=Silent)
    orders._orders.append(lambda queue: queue.drop([other]))
    run(executor, orders, late, other)
    assert (late.status, held) == (COMPLETED, [other])


def test_it_is_asked_between_two_looks_whether_to_finish(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1)
    queue = LiveQueue(executor := Executor(LONG), Observer())
    queue.look_on = lambda: queue.finish("enough")
    queue.run(iter([job]))
    assert (job.status, executor.submitted[0].cancelled) == (INTERRUPTED, 1)


def test_a_job_in_the_queue_has_cost_nothing_yet(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1)
    assert running_elsewhere_s(job, 9e9) == 0
    create_result(job.paths, status=RUNNING, started=time.time() - 100, devices=["0", "1"])
    assert running_elsewhere_s(job, 9e9) == pytest.approx(200, abs=20)
    update_result(job.paths, status=INTERRUPTED)
    assert running_elsewhere_s(job, 9e9) == 0, "its record says what it has cost"
