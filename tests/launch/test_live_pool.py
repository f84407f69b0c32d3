"""A pool that is told, while it runs, to do more, less, later or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from expt.errors import RunFailed
from expt.launch.job import DROPPED, QUEUED, Job, Options
from expt.launch.live_pool import LivePool
from expt.machine import Machine
from expt.runs.folder_lock import FolderLock, at_work
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PAUSED, read_result
from tests.launch.test_pool import Told, World, world

__all__ = ["world"]


class Orders(Told):
    """At each look what is to be done then."""

    def __init__(self, *orders: Callable[[LivePool], object]) -> None:
        super().__init__()
        self._orders, self.pool = list(orders), None

    pool: LivePool | None

    def job_held(self, job: Job) -> None:
        self.events.append(("held", job.name, read_result(job.paths)["status"]))

    def job_locked_out(self, job: Job) -> None:
        self.events.append(("locked out", job.name))

    def tick(self, active: Sequence[Job]) -> None:
        if self._orders:
            assert self.pool is not None
            self._orders.pop(0)(self.pool)


def run(
    world: World, orders: Orders, *jobs: Job, gpus: int = 0, cpus: int = 4, fail_fast: bool = False
) -> None:
    machine = Machine(gpus=tuple(map(str, range(gpus))), cpus=cpus)
    orders.pool = LivePool(
        machine, Options(fail_fast=fail_fast), orders, start=world.start, clock=world.clock
    )
    orders.pool.run(iter(jobs))


def wait(_: LivePool) -> None:
    """Look on."""


LONG = {"looks": 50}


def test_a_run_pauses_and_goes_on_in_its_folder(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    world.plans = {"a": [LONG, {}], "b": [LONG]}
    orders = Orders(
        wait,
        lambda pool: pool.pause([a]),
        wait,
        wait,
        lambda pool: pool.let_go_on([a]),
        lambda pool: pool.let_go_on([b]),
    )
    run(world, orders, a, b, cpus=2)
    assert world.names == ["a", "b", "a"]
    assert ("held", "a", PAUSED) in orders.events
    assert (a.status, b.status, b.retries) == (COMPLETED, COMPLETED, 0)
    second = world.started[-1].attempt
    assert (second.number, second.request.resumes) == (1, True)


def test_a_run_in_whose_folder_another_is_at_work_waits_for_that_and_holds_up_what_a_search_would_choose(
    world: World,
) -> None:
    """As workers of a command that was killed are, as long as they take to be gone."""
    a, b = world.job("a"), world.job("b")
    other, room = FolderLock(a.paths), list[bool]()

    def look(pool: LivePool) -> None:
        room.append(pool.has_room())
        world.clock.now += 0.75

    orders = Orders(wait, look, look, look, look, lambda _: other.release())
    run(world, orders, a, b)
    assert (a.status, b.status, world.names, room) == (
        COMPLETED,
        COMPLETED,
        ["b", "a"],
        [False] * 4,
    )
    assert [event for event in orders.events if event[1] == "a"] == [
        ("locked out", "a"),
        ("starting", "a"),
        ("ended", "a", COMPLETED),
    ]


def test_a_run_that_waits_for_its_folder_can_be_dropped(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    with at_work(a.paths), at_work(b.paths):
        orders = Orders(
            wait, lambda pool: pool.drop([a]), lambda pool: pool.finish("that is enough")
        )
        run(world, orders, a, b)
    assert (a.status, b.status, world.names) == (INTERRUPTED, QUEUED, [])


def test_a_run_that_comes_is_dropped_or_held_where_an_order_has_said_so(world: World) -> None:
    a, b, c, seen = world.job("a"), world.job("b"), world.job("c"), list[list[Job]]()

    def order(pool: LivePool) -> None:
        pool.is_dropped, pool.is_held = (lambda job: job is b), (lambda job: job is c or None)

    def resume(pool: LivePool) -> None:
        seen.append(pool.held)
        pool.let_go_on([c])

    run(world, Orders(order, *[wait] * 3, resume), a, b, c)
    assert (a.status, b.status, str(b.error), c.status) == (
        COMPLETED,
        INTERRUPTED,
        DROPPED,
        COMPLETED,
    )
    assert (world.names, seen) == (["a", "c"], [[c]])


def test_one_that_was_told_to_go_on_is_tried_again_though_an_order_holds_those_that_come(
    world: World,
) -> None:
    a, b = world.job("a", max_restarts=1), world.job("b")
    world.plans = {"a": [{"error": RunFailed("broken")}, {}], "b": [{"looks": 9}]}

    def order(pool: LivePool) -> None:
        pool.is_paused, pool.is_held = True, lambda _: True

    run(world, Orders(order, lambda pool: pool.add(a), wait, lambda pool: pool.let_go_on([a])), b)
    assert (a.status, a.retries) == (COMPLETED, 1)


def test_one_that_is_let_go_on_while_it_saves_goes_on_though_an_order_holds_those_that_come(
    world: World,
) -> None:
    a = world.job("a")
    world.plans = {"a": [LONG, {}]}

    def order(pool: LivePool) -> None:
        pool.is_paused, pool.is_held = True, lambda _: True
        pool.pause([a])
        pool.let_go_on([a])

    run(world, Orders(wait, order), a)
    assert (a.status, world.names) == (COMPLETED, ["a", "a"])


def test_one_that_was_told_to_go_on_starts_though_all_others_are_paused(world: World) -> None:
    a, b, c = world.job("a"), world.job("b"), world.job("c")
    held = list[Job]()

    def order(pool: LivePool) -> None:
        pool.is_paused, pool.is_held = True, lambda job: False if job is b else None

    def resume(pool: LivePool) -> None:
        held.extend(pool.held)
        pool.is_paused = False
        pool.let_go_on(pool.held)

    world.plans = {"a": [LONG]}
    run(world, Orders(order, *[wait] * 3, resume), a, b, c)
    assert (held, world.names) == ([c], ["a", "b", "c"])


def test_a_pool_rests_where_nothing_runs_and_a_person_has_paused_it(world: World) -> None:
    a, b, seen = world.job("a"), world.job("b"), list[bool]()

    def look(pool: LivePool) -> None:
        seen.append(pool.rests)

    def pause(pool: LivePool) -> None:
        pool.is_paused = True
        pool.pause([b])

    def resume(pool: LivePool) -> None:
        pool.is_paused = False
        pool.let_go_on([b])

    world.plans = {"a": [{"looks": 4}]}
    run(world, Orders(look, pause, look, *[wait] * 5, look, resume, look), a, b, cpus=1)
    assert seen == [False, False, True, False], "a has come to its end before it could pause"
    assert (a.status, b.status) == (COMPLETED, COMPLETED)


def test_a_waiting_run_that_pauses_does_not_start_and_the_pool_waits_for_it(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    world.plans = {"a": [{"looks": 3}]}
    seen = list[list[str]]()
    orders = Orders(
        wait,
        lambda pool: pool.pause([b]),
        *[lambda pool: seen.append([job.name for job in pool.active])] * 6,
        lambda pool: pool.let_go_on([b]),
    )
    run(world, orders, a, b, cpus=1)
    assert seen[-1] == [], "nothing runs, and it has not ended"
    assert world.names == ["a", "b"]
    assert b.status == COMPLETED


def test_a_run_that_ends_before_it_hears_of_the_pause_has_ended(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    world.plans = {"a": [{"looks": 3, "obeys": False}], "b": [{"looks": 3, "obeys": False}]}
    run(world, Orders(wait, lambda pool: pool.pause([a, b])), a, b)
    assert (a.status, b.status, world.names) == (COMPLETED, COMPLETED, ["a", "b"])


def test_a_dropped_run_is_no_failure_and_one_that_waited_leaves_no_folder(world: World) -> None:
    a, b, c = world.job("a"), world.job("b"), world.job("c")
    world.plans = {"a": [LONG]}
    orders = Orders(wait, lambda pool: pool.drop([a, b]))
    run(world, orders, a, b, c, cpus=1)
    assert world.started[0].stopped
    assert (read_result(a.paths)["status"], read_result(a.paths)["error"]) == (INTERRUPTED, DROPPED)
    assert (b.status, b.refused, b.paths.folder.exists()) == (INTERRUPTED, False, False)
    assert c.status == COMPLETED


def test_a_run_that_is_dropped_after_a_pause_has_paused_no_more(world: World) -> None:
    a = world.job("a")
    world.plans = {"a": [LONG]}
    run(
        world,
        Orders(wait, lambda pool: pool.pause([a]), wait, wait, lambda pool: pool.drop([a])),
        a,
    )
    assert (a.status, read_result(a.paths)["status"]) == (INTERRUPTED, INTERRUPTED)


def test_a_run_that_waits_at_a_rung_can_be_dropped(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    world.plans = {"b": [LONG]}

    def drop(pool: LivePool) -> None:
        a.status = PAUSED
        pool.drop([a])

    run(world, Orders(*[wait] * 20, drop), a, b)
    assert (a.status, str(a.error), b.status) == (INTERRUPTED, DROPPED, COMPLETED)


def test_runs_leave_the_gpus_that_are_lent_and_go_on_on_others(world: World) -> None:
    jobs = [world.job(name, gpus=1) for name in "ab"]
    two = world.job("two", gpus=2)
    world.plans = {"a": [LONG], "b": [LONG, {}], "two": [{}]}
    moved = list[list[str]]()
    orders = Orders(
        wait,
        lambda pool: moved.append([job.name for job in pool.use_gpus(["0"])]),
        *[wait] * 10,
        lambda pool: pool.drop([jobs[0]]),
        *[wait] * 10,
        lambda pool: moved.append([job.name for job in pool.use_gpus(["0", "1"])]),
    )
    run(world, orders, *jobs, gpus=2)
    assert moved[0] == ["b"]
    starts = [event for event in orders.events if event[0] == "starting"]
    assert starts == [("starting", "a", "0"), ("starting", "b", "1"), ("starting", "b", "0")]
    run(
        world,
        Orders(
            lambda pool: pool.use_gpus(["1"]), *[wait] * 5, lambda pool: pool.use_gpus(["0", "1"])
        ),
        two,
        gpus=2,
    )
    assert two.status == COMPLETED


def test_a_failure_that_stops_all_leaves_nobody_waiting_for_a_paused_run(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    world.plans = {"a": [LONG], "b": [{"looks": 9, "error": RunFailed("broken")}]}
    run(world, Orders(wait, lambda pool: pool.pause([a])), a, b, fail_fast=True)
    assert (world.names, b.status, read_result(a.paths)["status"]) == (["a", "b"], FAILED, PAUSED)


def test_a_further_job_is_taken(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    world.plans = {"a": [LONG]}
    run(world, Orders(wait, lambda pool: pool.add(b)), a)
    assert (a.status, b.status) == (COMPLETED, COMPLETED)


def all_paused(pool: LivePool) -> None:
    pool.is_paused = True
    pool.pause(pool.jobs)


def none_paused(pool: LivePool) -> None:
    pool.is_paused = False
    pool.let_go_on(pool.held)


def test_while_all_is_paused_nothing_that_comes_later_starts(world: World) -> None:
    a, b = world.job("a"), world.job("b")
    world.plans = {"a": [LONG, {}]}
    seen = list[bool]()
    orders = Orders(
        wait,
        all_paused,
        lambda pool: pool.add(b),
        *[wait] * 5,
        lambda pool: seen.extend([pool.has_room(), bool(pool.active)]),
        none_paused,
    )
    run(world, orders, a)
    assert seen == [False, False]
    assert (a.status, b.status, world.names) == (COMPLETED, COMPLETED, ["a", "a", "b"])


def test_a_source_may_have_nothing_now_and_is_asked_when_there_is_room(world: World) -> None:
    """It decides by what came of those before: at most as many wait or run as there are cores."""
    left, rooms = [world.job(name, world_size=2) for name in "abc"], list[int]()
    asked = [
        LivePool(
            Machine(gpus=(), cpus=4), Options(), world.told, start=world.start, clock=world.clock
        )
    ]

    def source() -> Iterator[Job | None]:
        while left:
            if asked[0].has_room():
                rooms.append(sum(job.status == "running" for job in started))
                started.append(left.pop(0))
                yield started[-1]
            else:
                yield None

    started = list[Job]()
    world.plans = {"a": [{"looks": 3}], "b": [{"looks": 5}], "c": [{}]}
    asked[0].run(source())
    assert world.names == ["a", "b", "c"]
    assert rooms == [
        0,
        1,
        1,
    ], "the third is asked for when the first has ended, while the second runs"
    assert not LivePool(
        Machine(gpus=("0",), cpus=4), Options(max_concurrent=0), world.told
    ).has_room()


def test_to_finish_lets_what_runs_save_and_is_no_interruption(world: World) -> None:
    world.plans = {"a": [{"looks": 99}]}
    pool = LivePool(
        Machine(gpus=(), cpus=4), Options(), world.told, start=world.start, clock=world.clock
    )
    job = world.job("a")

    def source() -> Iterator[Job | None]:
        yield job
        pool.finish("the budget is used up")

    pool.run(source())
    assert world.told.events[-1] == ("ended", "a", INTERRUPTED)
    assert str(job.error) == "the budget is used up"
    assert not pool.has_room()
