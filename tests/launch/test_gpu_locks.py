"""Which GPUs are in use, among commands: two holders stand for two commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.launch.gpu_locks import GpuLocks


@pytest.fixture(autouse=True)
def locks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXPT_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_a_gpu_has_one_holder() -> None:
    mine, theirs = GpuLocks(), GpuLocks()
    assert mine.acquire(["0", "1"]) == []
    assert theirs.acquire(["1"]) == ["1"]
    mine.release(["1"])
    assert theirs.acquire(["1"]) == []
    assert mine.acquire(["0"]) == []  # held already


def test_of_several_all_are_held_or_none() -> None:
    """Else two sweeps could each hold a half of what both need, for ever."""
    mine, theirs = GpuLocks(), GpuLocks()
    assert mine.acquire(["1"]) == []
    assert theirs.acquire(["0", "1", "2"]) == ["1"]
    assert mine.acquire(["0", "2"]) == []


def test_what_was_held_before_is_kept_where_the_rest_is_missed() -> None:
    mine, theirs = GpuLocks(), GpuLocks()
    assert mine.acquire(["0"]) == []
    assert theirs.acquire(["1"]) == []
    assert mine.acquire(["0", "1"]) == ["1"]
    assert theirs.acquire(["0"]) == ["0"]


def test_other_people_may_take_part(locks_folder: Path) -> None:
    GpuLocks().acquire(["0"])
    assert {path.stat().st_mode & 0o777 for path in (locks_folder, *locks_folder.iterdir())} == {
        0o777
    }


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
