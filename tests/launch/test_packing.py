"""Packing by itself: what it never does, and how full it keeps a machine."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expt.launch.packing import Demand, GpuLocks, Packing
from tests.facade import Patch


@dataclass
class Timeline:
    """When each run of a simulated machine started and ended, and where it ran."""

    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    start: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        return max(self.end.values(), default=0.0)

    def under_way(self, moment: float) -> set[int]:
        return {run for run in self.start if self.start[run] <= moment < self.end[run]}

    def load(self, moment: float) -> Counter[str]:
        return Counter(device for run in self.under_way(moment) for device in self.devices[run])


def simulate(
    packing: Packing, lengths: Mapping[int, float], added: Sequence[Sequence[Demand]]
) -> Timeline:
    """Simulate to the end: the first of `added` waits at the start, others arrive as runs end."""
    timeline, ends, now, more = Timeline(), list[tuple[float, int]](), 0.0, iter(added)
    packing.add(next(more, ()))
    while True:
        while (ready := packing.start_next()) is not None:
            run, devices = ready
            assert run not in timeline.start, f"run {run} started twice"
            timeline.devices[run], timeline.start[run], timeline.end[run] = (
                devices,
                now,
                now + lengths[run],
            )
            heapq.heappush(ends, (now + lengths[run], run))
        if ends:
            now, run = heapq.heappop(ends)
            packing.end(run)
        elif not packing.waiting:
            return timeline
        packing.add(next(more, ()))


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[str], list[list[Demand]], dict[int, float]]:
    """Devices; runs for them in the batches in which they arrive; how long each takes."""
    devices = [f"gpu{index}" for index in range(draw(st.integers(1, 8)))]
    anywhere = st.integers(1, len(devices)).map(lambda count: (count, None))
    chosen = st.lists(st.sampled_from(devices), min_size=1, unique=True).map(
        lambda names: (len(names), tuple(names))
    )
    asked = draw(st.lists(anywhere | chosen, max_size=30))
    demands = [Demand(run, count, names) for run, (count, names) in enumerate(asked)]
    size = draw(st.integers(1, 30))
    lengths = {demand.run: float(draw(st.integers(1, 20))) for demand in demands}
    return (
        devices,
        [demands[at : at + size] for at in range(0, len(demands), size)] or [[]],
        lengths,
    )


@settings(max_examples=100, deadline=None)
@given(machines(), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_what_packing_keeps(
    machine: tuple[list[str], list[list[Demand]], dict[int, float]],
    share: int,
    max_concurrent: int | None,
) -> None:
    devices, batches, lengths = machine
    timeline = simulate(
        Packing(devices, share=share, max_concurrent=max_concurrent), lengths, batches
    )
    demands = [demand for batch in batches for demand in batch]
    assert timeline.start.keys() == {demand.run for demand in demands}, "every run has started"
    for demand in demands:
        given_devices = timeline.devices[demand.run]
        assert len(set(given_devices)) == len(given_devices) == demand.count
        assert set(given_devices) <= set(devices)
        assert demand.devices in (None, given_devices)
    for moment in timeline.start.values():
        assert max(timeline.load(moment).values()) <= share
        assert max_concurrent is None or len(timeline.under_way(moment)) <= max_concurrent


@settings(max_examples=100, deadline=None)
@given(machines(), st.integers(1, 3))
def test_no_run_waits_for_one_that_started_after_it_was_passed_over(
    machine: tuple[list[str], list[list[Demand]], dict[int, float]], share: int
) -> None:
    """All wait from the start.

    Each in its turn: when those before it have started, it waits for them, at most."""
    devices, batches, lengths = machine
    packing = Packing(devices, share=share)
    demands = [demand for batch in batches for demand in batch]
    packing.add(demands)
    order = [demand.run for demand in packing.waiting]
    timeline = simulate(packing, lengths, [])
    for place, run in enumerate(order):
        # From this moment on, nobody is ahead of the run.
        turn = max([timeline.start[other] for other in order[:place]], default=0.0)
        there = [timeline.end[other] for other in timeline.under_way(turn)]
        assert timeline.start[run] <= max([turn, *there]), f"run {run} waited for a later one"


def test_a_big_run_is_not_starved_by_small_ones_that_keep_coming() -> None:
    packing = Packing(["a", "b"])
    packing.add([Demand(0, 1), Demand(1, 1)])
    assert [packing.start_next(), packing.start_next()] == [(0, ("a",)), (1, ("b",))]
    packing.add([Demand(2, 2)])
    packing.end(0)
    packing.add([Demand(3, 1)])
    # The big run claims both devices: the small one may not have the idle one.
    assert packing.start_next() is None
    packing.end(1)
    assert packing.start_next() == (2, ("a", "b"))


def test_small_runs_use_what_a_waiting_big_one_does_not_claim() -> None:
    packing = Packing(["a", "b", "c"])
    packing.add([Demand(0, 2)])
    assert packing.start_next() == (0, ("a", "b"))
    packing.add([Demand(1, 2), Demand(2, 1)])
    assert packing.start_next() == (2, ("c",))


def test_devices_in_other_hands_are_left_alone_until_then() -> None:
    packing = Packing(["a", "b"])
    packing.add([Demand(0, 1), Demand(1, 1)])
    assert packing.start_next() == (0, ("a",))
    packing.close("a", until=5.0)
    packing.end(0)
    packing.add([Demand(0, 1)])
    assert packing.start_next() == (0, ("b",))
    assert packing.start_next() is None
    packing.release_unavailable(4.9)
    assert packing.start_next() is None
    packing.release_unavailable(5.0)
    assert packing.start_next() == (1, ("a",))


def test_of_gpus_that_are_shared_the_least_loaded_come_first() -> None:
    packing = Packing(["a", "b"], share=2)
    packing.add([Demand(run, 1) for run in range(3)])
    assert [packing.start_next() for _ in range(3)] == [(0, ("a",)), (1, ("b",)), (2, ("a",))]
    packing.end(0)
    packing.end(2)
    packing.add([Demand(3, 1), Demand(4, 1)])
    assert [packing.start_next(), packing.start_next()] == [(3, ("a",)), (4, ("a",))]


def test_a_claim_on_a_gpu_that_is_in_other_hands_is_given_up() -> None:
    """Give up the claim of a waiting run on a GPU that another command has taken."""
    packing = Packing(["a", "b", "c"])
    packing.add([Demand(0, 2), Demand(1, 2)])
    assert packing.start_next() == (0, ("a", "b"))
    assert packing.start_next() is None  # run 1 claims two, a among them
    packing.close("a", until=5.0)
    packing.end(0)
    packing.add([Demand(0, 2)])
    assert packing.start_next() == (0, ("b", "c"))


def test_a_claim_on_a_gpu_that_is_taken_out_is_given_up() -> None:
    packing = Packing(["a", "b", "c"])
    packing.add([Demand(0, 2), Demand(1, 2)])
    assert packing.start_next() == (0, ("a", "b"))
    assert packing.start_next() is None  # run 1 claims two, a among them
    for run in (5, 6):
        packing.blame(run, "a")
    packing.end(0)
    packing.add([Demand(0, 1)])
    assert packing.start_next() == (1, ("b", "c"))


def test_runs_elsewhere_count_towards_the_limit() -> None:
    packing = Packing(["a", "b"], max_concurrent=2)
    packing.add([Demand(0, 1), Demand(1, 1)])
    assert packing.start_next(elsewhere=1) == (0, ("a",))
    assert packing.start_next(elsewhere=1) is None
    assert packing.start_next(elsewhere=0) == (1, ("b",))


@pytest.mark.parametrize("demand", [Demand(0, 3), Demand(0, 1, ("c",)), Demand(0, 2, ("a",))])
def test_what_can_never_start_waits_in_vain(demand: Demand) -> None:
    packing = Packing(["a", "b"])
    packing.add([Demand(1, 2), demand])
    assert packing.pop_impossible() == demand
    assert packing.pop_impossible() is None
    assert packing.waiting == [Demand(1, 2)]


def test_a_device_that_is_left_alone_comes_last() -> None:
    packing = Packing(["a", "b"])
    packing.close("a", until=5.0, while_busy=True)
    packing.add([Demand(0, 1)])
    assert packing.start_next() == (0, ("b",))
    packing.end(0)
    packing.add([Demand(0, 2)])
    assert packing.start_next() == (0, ("b", "a"))


def test_a_device_that_has_failed_two_runs_gets_no_more() -> None:
    packing = Packing(["a", "b"])
    packing.add([Demand(0, 2), Demand(1, 1), Demand(2, 1, avoided=frozenset("b"))])
    packing.blame(7, "a")
    packing.blame(7, "a")
    assert packing.pop_impossible() is None
    packing.blame(8, "a")
    assert packing.devices == ["b"]
    taken = [packing.pop_impossible() for _ in range(3)]
    assert [demand and demand.run for demand in taken] == [0, 2, None]
    assert packing.start_next() == (1, ("b",))


def test_a_device_is_left_alone_while_others_are_in_use() -> None:
    packing = Packing(["a", "b"], share=2)
    packing.close("a", until=5.0, while_busy=True)
    packing.add([Demand(0, 1, ("b",)), Demand(1, 1), Demand(2, 1), Demand(3, 1)])
    assert [packing.start_next() for _ in range(3)] == [(0, ("b",)), (1, ("b",)), None]
    packing.release_unavailable(4.0)
    assert packing.start_next() is None
    packing.release_unavailable(5.0)
    assert packing.start_next() == (2, ("a",))
    packing.close("ab", until=9.0, while_busy=True)
    for run in range(3):
        packing.end(run)
    assert packing.start_next() == (3, ("a",))


LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "even lengths": lambda draw: draw.uniform(1.0, 60.0),
    "a few long ones": lambda draw: draw.lognormvariate(3.0, 0.7),
}


@pytest.mark.parametrize("num_gpus", [8, 64])
@pytest.mark.parametrize("sizes", [range(1, 9), (1, 2, 4, 8)], ids=["1 to 8 GPUs", "powers of two"])
@pytest.mark.parametrize("law", LENGTHS)
def test_a_thousand_runs_fill_the_machine(num_gpus: int, sizes: Sequence[int], law: str) -> None:
    """The makespan is within 5% of two bounds.

    Nothing beats the GPU-seconds over the GPUs, nor the sum of the runs that exclude each other.
    One that knows no lengths may meet the longest run last: Graham's bound of list scheduling adds
    (1 - 1/GPUs) of it."""
    draw = random.Random(3)
    demands = [Demand(run, draw.choice(sizes)) for run in range(1000)]
    lengths = {demand.run: LENGTHS[law](draw) for demand in demands}
    packing = Packing([f"gpu{index}" for index in range(num_gpus)])
    timeline = simulate(packing, lengths, [demands])
    area = sum(demand.count * lengths[demand.run] for demand in demands) / num_gpus
    alone = sum(lengths[demand.run] for demand in demands if demand.count > num_gpus / 2)
    longest = max(lengths.values())
    bound = (
        max(area, alone)
        if law == "even lengths"
        else max(area, alone) + (1 - 1 / num_gpus) * longest
    )
    assert timeline.makespan <= 1.05 * bound
    for moment in list(timeline.start.values())[::20]:
        assert max(timeline.load(moment).values()) == 1


@pytest.fixture(autouse=True)
def locks_folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("EXPT_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_a_gpu_has_one_holder_and_of_several_all_are_held_or_none() -> None:
    """Else two sweeps could each hold a half of what both need, for ever."""
    mine, theirs = GpuLocks(), GpuLocks()
    assert mine.acquire(["1"]) == mine.acquire(["1"]) == []  # held already
    assert theirs.acquire(["0", "1", "2"]) == ["1"]
    assert mine.acquire(["0", "2"]) == []
    mine.release(["1"])
    assert theirs.acquire(["1"]) == []
    assert mine.acquire(["0", "1"]) == ["1"]
    assert theirs.acquire(["0"]) == ["0"], "what was held before is kept"


def test_other_people_may_take_part(locks_folder: Path) -> None:
    GpuLocks().acquire(["0"])
    modes = [path.stat().st_mode & 0o777 for path in (locks_folder, *locks_folder.iterdir())]
    assert modes == [0o777, 0o666]


def test_two_jobs_that_each_call_their_own_gpu_0_do_not_wait_for_each_other() -> None:
    """Under Slurm's cgroups every job counts from 0; and the same card may have two names."""
    one, other, third = (
        GpuLocks({"0": uuid}.__getitem__) for uuid in ("GPU-11aa", "GPU-22bb", "GPU-11aa")
    )
    assert one.acquire(["0"]) == []
    assert other.acquire(["0"]) == []
    assert third.acquire(["0"]) == ["0"]
    one.release(["0"])
    assert third.acquire(["0"]) == []
