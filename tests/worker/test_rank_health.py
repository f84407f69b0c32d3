"""The ranks' rows of numbers, what they say, and when workers meet to agree."""

import contextlib
import io
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from expt.tasks.classification import Classification
from expt.tasks.sums import Sums
from expt.training.collectives import Worker
from expt.training.learner import Position
from expt.training.loop import train_epoch
from expt.training.shared_memory import SharedMemory
from expt.training.strategy import Strategy
from expt.worker import rank_health, watchdog
from expt.worker import steps as agreement
from expt.worker.steps import Agreement
from expt.worker.watchdog import TICKS, Watchdog
from tests.facade import Patch
from tests.ranks import together
from tests.training.test_loop import DEVICE, batches, learner, plain
from tests.worker.conftest import ALONE

CPU = torch.device("cpu")


def reading(all_reduce_s: float | None = 0.5) -> rank_health.Reading:
    return rank_health.reading(
        steps=10, seconds=2.0, all_reduce_s=all_reduce_s, device=CPU, wish=False
    )


def scalars(*changes: dict[str, float]) -> dict[str, float]:
    """Return the curves of ranks with these readings and the same weights."""
    health = rank_health.RankHealth(learner(plain()), Position(4, 8), ALONE, check_weights=True)
    health.readings = [reading()._replace(**change) for change in changes]
    return health.scalars()


def test_a_straggler_shows() -> None:
    found = scalars({}, {"step_ms": 400.0}, {}, {"memory_mib": 1e6})
    assert (
        found["ranks/step_ms_min"],
        found["ranks/step_ms_median"],
        found["ranks/step_ms_max"],
    ) == (150, 150, 400)
    assert found["ranks/all_reduce_share"] == 0.25
    assert found["memory/worker_mib"] == 1e6
    assert found["ranks/unequal_weights"] == 0
    assert not {"memory/gpu_mib", "ranks/gpu_utilisation"} & found.keys(), "there is no GPU"
    assert not any(math.isnan(value) for value in found.values())
    assert scalars({}).keys() == {"memory/worker_mib"}, "one worker alone"


def test_what_nobody_has_measured_is_no_number() -> None:
    """Leave out a share that one rank lacks, and report no negative times."""
    unknown = reading(None)
    assert unknown.step_ms == 200
    found = scalars({}, unknown._asdict())
    assert "ranks/all_reduce_share" not in found
    assert (found["ranks/step_ms_min"], found["ranks/step_ms_max"]) == (150, 200)
    fallen = reading(-0.5)
    assert (fallen.step_ms, fallen.all_reduce_share) == (200, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
def test_the_checksum_knows_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((5, 3), (3,), ())]
    before = rank_health.checksum(parameters)
    assert before == rank_health.checksum([nn.Parameter(p.detach().clone()) for p in parameters])
    assert before == int(before)
    assert 0 <= before < 2**48
    with torch.no_grad():
        parameters[0].t().contiguous()
        kept = parameters[1][0].item()
        parameters[1][0] = kept * (1 + 2 * torch.finfo(dtype).eps)
    assert rank_health.checksum(parameters) != before, "the last bit of one number"
    assert rank_health.checksum([]) == 0


def warned_of(worker: Worker) -> int:
    """How often unequal weights of ranks on unlike devices are warned of, in two epochs."""
    torch.backends.cpu.get_cpu_capability = lambda: f"kind {worker.rank}"
    torch.cuda.get_device_name = lambda *_: f"kind {worker.rank}"
    module = plain()
    weight = next(module.parameters()).detach().fill_(1.0)
    weight[0, 0] += worker.rank * torch.finfo(weight.dtype).eps  # its last bit
    health = rank_health.RankHealth(learner(module), Position(4, 8), worker, check_weights=True)
    sums = torch.zeros(3, dtype=torch.float64, device=worker.device)
    health.end_epoch(sums, wish=lambda: False)
    assert health.scalars()["ranks/unequal_weights"] == 1
    with contextlib.redirect_stderr(io.StringIO()) as said:
        health.refuse_unequal()
        health.refuse_unequal()
    return said.getvalue().count("kind 0, kind 1 may round differently")


def test_unlike_devices_may_round_differently(tmp_path: Path) -> None:
    assert together(tmp_path, 2, warned_of) == [1, 0]


def test_the_checksum_knows_the_order_of_parameters_and_not_that_in_memory() -> None:
    first, second = (nn.Parameter(torch.randn(4, 3, 5, 5)) for _ in range(2))
    assert rank_health.checksum([first, second]) != rank_health.checksum([second, first])
    last = nn.Parameter(first.detach().clone().to(memory_format=torch.channels_last))
    assert rank_health.checksum([last]) == rank_health.checksum([first])


def test_sums_of_an_epoch_come_with_readings() -> None:
    module, memory, position = plain(), SimpleNamespace(spent_s=0.0), Position(4, 8)
    strategy = Strategy(module, memory=cast(SharedMemory, memory))
    subject = learner(module, strategy=strategy)
    health = rank_health.RankHealth(subject, position, ALONE, check_weights=True)
    for _ in range(2):
        health.begin_epoch()
        sums = Sums(Classification(), DEVICE)
        train_epoch(subject, batches(4), position, sums, log_every=100)
        memory.spent_s += 0.001
        assert torch.equal(
            health.end_epoch(sums.values, wish=lambda: position.step == 8), sums.values
        )
        (reading,) = health.readings
        assert reading.wish == (position.step == 8)
        assert reading.all_reduce_share > 0
        assert 0 <= reading.step_ms < 1000
        assert reading.weights == 0, "a single worker has none to compare with"
        health.refuse_unequal()
    assert 0 < health.spent_s < 10


NONE = set[str]()


class Clock:
    """Stands until it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_all_save_and_stop_after_the_same_step(tmp_path: Path, monkeypatch: Patch) -> None:
    """Meet after the first step of 0.125 s, then every second; agreed wishes stay."""

    def each(worker: Worker) -> list[tuple[set[str], bool]]:
        clock, done = Clock(), list[tuple[set[str], bool]]()
        monkeypatch.setattr(agreement, "time", clock)
        asked = Agreement(worker, asked_to_stop=lambda: worker.rank == 0 and 3 <= len(done) < 6)
        for _ in range(6):
            clock.now += 0.125 if worker.rank == 1 else 0.001
            wishes = ({"end"}, {"save"})[worker.rank]
            done.append((asked.after_step(wishes), asked.stopping))
        return [*done, (asked.meet(set()), asked.stopping)]

    both = together(tmp_path, 2, each)
    of_both = {"save", "end"}
    expected = [
        (of_both, False), (NONE, False), (of_both, False), (NONE, False), (of_both, True),
        (NONE, True),
    ]  # fmt: skip
    assert both == [[*expected, (NONE, True)]] * 2


def test_fast_steps_do_not_put_a_meeting_off_for_ever(tmp_path: Path, monkeypatch: Patch) -> None:
    def each(worker: Worker) -> list[int]:
        monkeypatch.setattr(agreement, "time", Clock())  # a step takes no time at all
        asked = Agreement(worker, asked_to_stop=lambda: False)
        return [step for step in range(1, 2002) if asked.after_step({"save"})]

    assert together(tmp_path, 2, each) == [[1, 1001, 2001]] * 2


def naps_until_a_hang(
    beats_after: set[int], monkeypatch: Patch, *, most: int = 5 * TICKS
) -> int | None:
    """Return after how many naps `on_hang` is called, or None if not within `most`."""
    naps, ended, hung = list[float](), threading.Event(), list[int]()
    ready = threading.Event()
    dog: Watchdog

    def nap(seconds: float) -> None:
        ready.wait()
        naps.append(seconds)
        if len(naps) in beats_after:
            dog.beat()
        if len(naps) == most:
            ended.set()
            threading.Event().wait()  # for ever: the thread is a daemon

    def on_hang() -> None:
        hung.append(len(naps))
        ended.set()

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=nap))
    dog = Watchdog(100.0, on_hang)
    ready.set()
    assert ended.wait(10)
    assert set(naps) == {100.0 / TICKS}
    return hung[0] if hung else None


@pytest.mark.parametrize(
    ("beats_after", "hangs_after"),
    [
        (set(), {TICKS}),  # its dataset blocks, or the others cannot be reached
        (set(range(1, 5 * TICKS, TICKS - 1)), {None}),
        ({1, 2, 7}, {7 + TICKS, 8 + TICKS}),
    ],
)
def test_watchdog_barks_in_time(
    beats_after: set[int], hangs_after: set[int | None], monkeypatch: Patch
) -> None:
    assert naps_until_a_hang(beats_after, monkeypatch) in hangs_after
