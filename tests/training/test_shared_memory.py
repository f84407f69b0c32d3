"""Memory that workers share: without a name, and never that of another process."""

import functools
import os
import tempfile
from pathlib import Path

import pytest
import torch

from expt.errors import RunFailed, TimedOut
from expt.training import shared_memory
from expt.training.collectives import Worker
from expt.training.shared_memory import SharedMemory, _allocate, _identity, _map_at, _path_of
from tests.ranks import together

pytestmark = pytest.mark.cpu("workers on cards share no memory")


def test_it_has_no_name_from_its_first_moment() -> None:
    mine = _allocate(4096)
    assert (os.fstat(mine).st_nlink, os.fstat(mine).st_size) == (0, 4096)
    theirs = _map_at(_path_of(mine), _identity(mine), 4096)
    os.pwrite(mine, b"seen", 8)
    assert theirs[8:12] == b"seen"
    os.close(mine)


def test_what_another_process_has_under_that_number_is_left_alone() -> None:
    with tempfile.TemporaryFile() as mine, tempfile.TemporaryFile() as other:
        own, elsewhere = _identity(mine.fileno()), _path_of(other.fileno())
        with pytest.raises(OSError, match=f"^{elsewhere} is not that of rank 0"):
            _map_at(elsewhere, own, 4096)
        with pytest.raises(FileNotFoundError):
            _map_at("/proc/1/fd/none", own, 4096)


def test_every_rank_is_told_which_one_cannot_share(tmp_path: Path) -> None:
    """Refuse on every rank if one cannot share memory, or there is no room."""

    def refusal(worker: Worker, *, room: bool) -> str:
        def fail(*_: object) -> None:
            raise OSError("no such place" if room else "File too large")

        if worker.rank == 1:
            os.fstat = fail  # type: ignore[assignment]
        if not room:
            os.posix_fallocate = fail
        try:
            SharedMemory(rank=worker.rank, world_size=3, timeout_s=5.0)
        except RunFailed as error:
            return str(error)
        return "shared"

    for room, why in ((True, "no such place"), (False, "File too large")):
        told = together(tmp_path, 3, functools.partial(refusal, room=room))
        assert told == [told[0]] * 3
        assert told[0].endswith(f"({why}); use ddp.shared_memory=false")


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    def gather(worker: Worker) -> str:
        memory = SharedMemory(rank=worker.rank, world_size=3, timeout_s=0.2)
        if worker.rank == 0:
            return "stays away"
        try:
            memory.gather(torch.ones(2))
        except TimedOut as error:
            return str(error)
        return "nobody is missed"

    missed = "rank 0 did not arrive within 0.2 s (timeout_s)"
    assert together(tmp_path, 3, gather) == ["stays away", missed, missed]


def test_what_takes_several_slots_is_put_together_again(tmp_path: Path) -> None:
    def exchange(worker: Worker) -> tuple[object, object, bool]:
        shared_memory.CHUNK = 3
        memory = SharedMemory(rank=worker.rank, world_size=2, timeout_s=5.0)
        before = memory.spent_s
        mine = torch.arange(8.0) + 100 * worker.rank
        everyones = memory.gather(mine).tolist()
        memory.average(mine)
        return everyones, mine.tolist(), before == 0 < memory.spent_s < 5

    numbers = [float(number) for number in range(8)]
    expected = [numbers, [number + 100 for number in numbers]]
    for found in together(tmp_path, 2, exchange):
        assert found == (expected, [number + 50 for number in numbers], True)
