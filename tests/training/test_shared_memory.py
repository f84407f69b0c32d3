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
from expt.training.shared_memory import SharedMemory, _allocate, _map_at, _place_of
from tests.facade import Patch
from tests.ranks import together

pytestmark = pytest.mark.cpu("workers on cards share no memory")


def test_it_has_no_name_from_its_first_moment() -> None:
    mine, problem = _allocate(4096)
    assert mine is not None, problem
    with mine:
        assert (os.fstat(mine.fileno()).st_nlink, os.fstat(mine.fileno()).st_size) == (0, 4096)
        place = _place_of(mine)
        assert place is not None
        theirs, refusal = _map_at(place, 4096)
        assert refusal is None
        assert theirs is not None
        os.pwrite(mine.fileno(), b"seen", 8)
        assert theirs[8:12] == b"seen"


def test_where_there_is_no_room_there_is_none(monkeypatch: Patch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for call in ("posix_fallocate", "memfd_create"):
        monkeypatch.setattr(os, call, full)
        assert _allocate(4096) == (None, "[Errno 28] No space left on device")
    assert _place_of(None) is None


def test_what_another_process_has_under_that_number_is_left_alone() -> None:
    with tempfile.TemporaryFile() as mine, tempfile.TemporaryFile() as other:
        place, elsewhere = _place_of(mine), _place_of(other)
        assert place is not None
        assert elsewhere is not None
        mapped, problem = _map_at(place._replace(path=elsewhere.path), 4096)
        assert (mapped, problem) == (None, f"{elsewhere.path} is not that of rank 0")
        mapped, problem = _map_at(place._replace(path="/proc/1/fd/none"), 4096)
        assert mapped is None
        assert problem


def test_every_rank_is_told_which_one_cannot_share(tmp_path: Path) -> None:
    """Refuse on every rank if one cannot share memory, or there is no room."""

    def refusal(worker: Worker, *, room: bool) -> str:
        if worker.rank == 1:
            shared_memory._map_at = lambda place, size: (None, "no such place")
        if not room:
            shared_memory._allocate = lambda size: (None, "File too large")
        try:
            SharedMemory(rank=worker.rank, world_size=3, timeout_s=5.0)
        except RunFailed as error:
            return str(error)
        return "shared"

    cut = "the workers cannot share memory (no such place); use ddp.shared_memory=false"
    assert together(tmp_path, 3, functools.partial(refusal, room=True)) == [cut] * 3
    for told in together(tmp_path, 3, functools.partial(refusal, room=False)):
        assert told.endswith(
            "can be shared by the workers (File too large);"
            " raise the limit of a file's size (ulimit -f), or use ddp.shared_memory=false"
        )


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
